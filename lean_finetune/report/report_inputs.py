"""Read what the report shows: metrics, curves and sample rows."""

import csv
import io
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from lean_finetune.core.atomic_files import FIGURES, check_tables, read_sealed
from lean_finetune.core.errors import UserError
from lean_finetune.core.regular_files import read_regular
from lean_finetune.pinning.read_locks import read_data_lock, read_model_lock
from lean_finetune.rows.attachment import files_of
from lean_finetune.step.token_rows import TokenRows

SAMPLED_ROWS = 4
SAMPLE_CHARACTERS = 800
"""Most characters of a text that are shown."""

REPEATED = re.compile(r"(<[^<>\s]{1,40}>)\1{3,}")
"""A control token that follows itself, as hundreds may stand for what is no text."""

Segments = list[tuple[str, bool]]
"""The text of a row in parts, and whether each is trained."""


class RowSample(NamedTuple):
    """A training row to show."""

    segments: Segments
    files: list[bytes]
    """The hashes of its files."""


def row_samples(tokens: Path, tokenizer_file: Path) -> list[RowSample]:
    """Return `SAMPLED_ROWS` training rows, spread evenly over the rows.

    Raises UserError if the token files or the tokenizer are missing or damaged.
    """
    rows, tokenizer = TokenRows(tokens, "train"), _tokenizer(tokenizer_file)
    used = rows.used
    chosen = used[np.linspace(0, len(used) - 1, min(SAMPLED_ROWS, len(used)), dtype=int)]
    return [
        RowSample(_segments(tokenizer, rows.ids(row).tolist(), rows.spans(row).tolist()), files_of(rows, row))
        for row in chosen.tolist()
    ]


def _tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a file that a stage wrote. Raises UserError if it is missing or damaged."""
    try:
        return Tokenizer.from_str(read_regular(path).decode())
    except Exception as error:  # tokenizers raises a plain Exception
        raise UserError(f"{path}: is no tokenizer that can be read ({error}); run `dvc repro` again") from None


def _segments(tokenizer: Tokenizer, ids: list[int], spans: list[list[int]]) -> Segments:
    """Divide a row's text at its trained spans.

    Each part is the text that its tokens add to those before, because some tokenizers remove a space at the start.
    """
    bounds = [bound for span in spans for bound in span]
    found: Segments = []
    before = ""
    for number, end in enumerate([*bounds, len(ids)]):
        text = tokenizer.decode(ids[:end], skip_special_tokens=False)
        if added := text[len(before) :]:
            found.append((shortened(added), number % 2 == 1))
        before = text
    return found


def shortened(text: str, characters: int = SAMPLE_CHARACTERS) -> str:
    """Return both ends of a text longer than so many characters; a token that repeats is counted."""
    text = REPEATED.sub(lambda found: f"{found[1]} × {len(found[0]) // len(found[1])}", text)
    half = characters // 2
    return text if len(text) <= characters else f"{text[:half]} … {text[-half:]}"


PHASES = ("reference", "load", "forward", "backward", "clip", "optimizer", "heldout", "save", "evaluate")
"""Phases in the order in which they run; others follow by name."""


class Inputs:
    """The content of the other stages' files."""

    def __init__(
        self, *, locks: Path, tokens: Path, batches: Path, estimate: Path, train: Path, tuned: Path, evaluate: Path
    ):
        """Read all files from the stages' output directories. Raises UserError if one is missing or damaged."""
        for directory in (estimate, train, evaluate):
            check_tables(directory)
        self.model = read_model_lock(locks / "model.json")
        self.data = read_data_lock(locks / "data.json")
        self.tokenize = read_sealed(tokens / FIGURES)
        self.bucket = read_sealed(batches / FIGURES)
        self.estimate = read_sealed(estimate / FIGURES)
        self.train = read_sealed(train / FIGURES)
        self.evaluate = read_sealed(evaluate / FIGURES)
        self.breakdown = read_sealed(estimate / "breakdown.json")
        """Bytes by category at the peak of each phase and, under `peak`, of the whole run."""
        self.explanation = read_sealed(estimate / "explanation.json")
        """The largest tensors at the peak, and the memory that persists between steps."""
        self.timeline = read_csv(estimate / "timeline.csv")
        """Bytes by category over the events of the worst step, in GiB."""
        replayed = estimate / "reserved.csv"
        self.reserved = read_csv(replayed) if replayed.exists() else []
        """Memory by optimizer step in plan order, in GiB; empty without a replay of the plan, as on a CPU."""
        self.verdict = read_sealed(estimate / "verdict.json")
        self.switches = read_csv(estimate / "switches.csv")
        """Predicted peak of the run, and after changing one switch."""
        self.curves = read_csv(train / "curves.csv")
        """One record per optimizer step; a cell is empty where nothing was measured."""
        self.generations = read_lines(evaluate / "generations.jsonl")
        pairs = evaluate / "pairs.jsonl"
        self.pairs = read_lines(pairs) if pairs.exists() else []
        """Preference pairs whose order changed; empty for rows that are no pairs."""
        self.samples = row_samples(tokens, tuned / "tokenizer.json")
        """A few training rows."""
        self.tokens = tokens
        """The directory of tokens, and of the files of rows."""


def in_order(phases: Mapping[str, Any]) -> list[str]:
    """Sort names of phases in the order of `PHASES`."""
    known = {name: number for number, name in enumerate(PHASES)}
    return sorted(phases, key=lambda name: (known.get(name, len(known)), name))


def read_csv(path: Path) -> list[dict[str, str]]:
    """Read a CSV file with a header; raises UserError if it is missing or has no rows."""
    records = list(csv.DictReader(io.StringIO(_read(path), newline="")))
    if not records:
        raise UserError(f"{path}: has no rows; delete it and run `dvc repro`")
    return records


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a JSON-lines file, which may be empty; raises UserError if it is missing or a line is not JSON."""
    records = []
    for number, line in enumerate(_read(path).split("\n")[:-1], start=1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise UserError(f"{path}:{number}: not JSON ({error.msg}); delete it and run `dvc repro`") from None
    return records


def _read(path: Path) -> str:
    """The text of a file with its line ends unchanged."""
    try:
        return read_regular(path).decode()
    except FileNotFoundError:
        raise UserError(f"{path}: file is missing; run `dvc repro`") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); delete it and run `dvc repro`") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 ({error.reason}); delete it and run `dvc repro`") from None
