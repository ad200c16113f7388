"""A few training rows as text, with the parts that are trained."""

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from lean_finetune.step.token_rows import TokenRows

SAMPLED_ROWS = 4
SAMPLE_CHARACTERS = 800
"""Most characters of a text that are shown."""

Segments = list[tuple[str, bool]]
"""The text of a row in parts, and whether each is trained."""


def row_samples(tokens: Path, tokenizer_file: Path) -> list[Segments]:
    """Return `SAMPLED_ROWS` training rows, spread evenly over the rows.

    Raises UserError if the token files are missing or damaged.
    """
    rows = TokenRows(tokens, "train")
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    used = rows.used
    chosen = used[np.linspace(0, len(used) - 1, min(SAMPLED_ROWS, len(used)), dtype=int)]
    return [_segments(tokenizer, rows.ids(row).tolist(), rows.spans(row).tolist()) for row in chosen.tolist()]


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


def shortened(text: str) -> str:
    """Return both ends of a long text."""
    half = SAMPLE_CHARACTERS // 2
    return text if len(text) <= SAMPLE_CHARACTERS else f"{text[:half]} … {text[-half:]}"
