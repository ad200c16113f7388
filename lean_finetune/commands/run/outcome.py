"""What a finished run came to: memory, held-out loss, a few answers, and the next commands."""

import re
import textwrap
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from shutil import get_terminal_size
from typing import Any

from cuda_memory.page.html import visible
from cuda_memory.units import readable_size
from cuda_memory.user_paths import no_option, shell_line
from lean_finetune.commands.project.repository import has_identity
from lean_finetune.commands.run.place import commit_command
from lean_finetune.core.atomic_files import FIGURES, read_json
from lean_finetune.report.formats import percent
from lean_finetune.report.report_inputs import read_lines

ANSWERS = 3
MOST_LINES = 6
"""Lines of an answer that are shown."""
LABEL = 15
COLUMNS = (60, 100)
"""Fewest and most columns of the output."""
CONTROL = re.compile(r"<[|｜][^<>|｜]{1,40}[|｜]>|</?s>|<(?:bos|eos|(?:start|end)_of_turn)>|\[/?INST\]")
"""A control token of a usual chat template."""
ROLE = re.compile(r"^(user|human|assistant|model|system|tool)\b:?", re.IGNORECASE)
REPORT = Path("data/report/report.html")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Figures of the last run in the working directory. Sizes are in bytes."""

    fits: bool
    """Whether it was predicted to fit."""
    peak_bytes_predicted: int
    peak_bytes_measured: int | None
    base_loss: float | None
    tuned_loss: float | None
    base_reward_accuracy: float | None
    """Share of held-out preferences that the model judges right."""
    tuned_reward_accuracy: float | None
    answers: Sequence[Mapping[str, Any]]
    """A few held-out prompts, with the answers before and after training; see generations.jsonl."""


def read_outcome() -> Outcome:
    """Read the figures of the stages. Raises UserError if a file is missing or damaged."""
    data = Path("data")
    estimate, train = read_json(data / "estimate" / FIGURES), read_json(data / "train" / FIGURES)
    evaluate, lines = read_json(data / "evaluate" / FIGURES), read_lines(data / "evaluate/generations.jsonl")
    count = min(ANSWERS, len(lines))
    return Outcome(
        fits=read_json(data / "estimate/verdict.json")["refusal"] is None,
        peak_bytes_predicted=estimate["peak_bytes_predicted"],
        peak_bytes_measured=train["peak_bytes_measured"],
        base_loss=evaluate["base_loss"],
        tuned_loss=evaluate["tuned_loss"],
        base_reward_accuracy=evaluate.get("base_reward_accuracy"),
        tuned_reward_accuracy=evaluate.get("tuned_reward_accuracy"),
        answers=[lines[number * len(lines) // count] for number in range(count)],  # Spread over the file, not picked.
    )


def outcome_lines(found: Outcome, directory: Path, *, elsewhere: bool) -> Iterator[str]:
    """The figures, the answers side by side, and what to do next.

    `directory` is the project's as the user named it; `elsewhere`: the user's shell is in another one.
    """
    yield ""
    yield f"{'memory':<{LABEL}}{memory_text(found)}"
    yield f"{'held-out loss':<{LABEL}}{change_text(found.base_loss, found.tuned_loss, lambda loss: f'{loss:.4g}')}"
    if found.tuned_reward_accuracy is not None:
        yield f"{'right order':<{LABEL}}{change_text(found.base_reward_accuracy, found.tuned_reward_accuracy, percent)}"
    columns = min(max(get_terminal_size().columns, COLUMNS[0]), COLUMNS[1])
    for line in found.answers:
        yield ""
        yield from _answer_lines(line, columns)
    yield ""
    yield f"{'report':<{LABEL}}{directory / REPORT}"
    commands = [*([shell_line(["cd", no_option(directory)])] if elsewhere else []), *_next_commands()]
    yield from (f"{label:<{LABEL}}{text}" for label, text in zip_longest(["next"], commands, fillvalue=""))


def memory_text(found: Outcome) -> str:
    """Whether it was predicted to fit, and the predicted and measured peak."""
    predicted, measured = found.peak_bytes_predicted, found.peak_bytes_measured
    verdict = "fits" if found.fits else "was predicted not to fit"
    text = f"{verdict}: peak of tensors {readable_size(predicted)} predicted, "
    if measured is None:
        return f"{text}not measured"
    return f"{text}{readable_size(measured)} measured ({predicted / measured - 1:+z.1%})"


def change_text(before: float | None, after: float | None, text: Any) -> str:
    """A figure before and after training; `text` writes it."""
    if before is None or after is None:
        return "not known: no rows are held out"
    return f"{text(before)} before training, {text(after)} after"


def _next_commands() -> Iterator[str]:
    """What the user does next in the project, in a shell."""
    commands = [
        ("lean-finetune chat", "talk to the model"),
        ("lean-finetune exp run -S train.epochs=3", "try another setting"),
        ("lean-finetune compare", "all side by side"),
    ]
    if not has_identity(Path()):
        yield "git config user.name you && git config user.email you@example.org"
    if (commit := commit_command(Path())) is not None:
        yield commit
    width = max(len(command) for command, _ in commands)
    for command, why in commands:
        yield f"{command:<{width}}   # {why}"


def _answer_lines(line: Mapping[str, Any], columns: int) -> Iterator[str]:
    """One prompt, and below it the answers before and after training side by side."""
    yield f"{'asked':<{LABEL}}{_clipped(last_turn(str(line['prompt'])), columns - LABEL)}"
    if line["expected"]:
        yield f"{'expected':<{LABEL}}{_clipped(' / '.join(_text_lines(line['expected'])), columns - LABEL)}"
    width = (columns - 3) // 2
    titles = [f"{name}{_judged(line[f'{model}_correct'])}" for name, model in (("before", "base"), ("after", "tuned"))]
    sides = [_side(line[model], width) for model in ("base", "tuned")]
    for left, right in zip_longest([titles[0], *sides[0]], [titles[1], *sides[1]], fillvalue=""):
        yield f"{left}{' ' * (width - _width(left))} | {right}".rstrip()


def last_turn(prompt: str) -> str:
    """The last text of a prompt, without the control tokens and roles of its chat template."""
    parts = (ROLE.sub("", part.strip(), count=1).strip() for part in CONTROL.split(prompt))
    return " / ".join(_text_lines(next((part for part in reversed(list(parts)) if part), "")))


def _judged(correct: bool | None) -> str:
    """Whether an answer was compared with the row's own, and is the same."""
    return "" if correct is None else " (exact)" if correct else " (differs)"


def _text_lines(text: str) -> list[str]:
    return [visible(line).strip() for line in str(text).splitlines() if line.strip()]


def _side(text: str, width: int) -> list[str]:
    """An answer in lines of at most `width` columns."""
    lines = [part for line in _text_lines(text) for part in _wrapped(line, width)] or ["(nothing)"]
    return lines if len(lines) <= MOST_LINES else [*lines[: MOST_LINES - 1], "..."]


def _wrapped(line: str, width: int) -> list[str]:
    if _width(line) == len(line):
        return textwrap.wrap(line, width)
    parts: list[str] = []
    part = ""  # Of scripts with wide characters, which break anywhere.
    for character in line:
        if _width(part + character) > width:
            parts, part = [*parts, part], ""
        part += character
    return [*parts, part]


def _clipped(text: str, width: int) -> str:
    """A text of at most `width` columns."""
    if _width(text) <= width:
        return text
    while _width(text) > width - 4:
        text = text[:-1]
    return f"{text} ..."


def _width(text: str) -> int:
    """Columns of a text in a terminal."""
    if text.isascii():
        return len(text)
    wide = {"W": 2, "F": 2}
    return sum(0 if unicodedata.combining(one) else wide.get(unicodedata.east_asian_width(one), 1) for one in text)
