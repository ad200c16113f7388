"""A row's text, cut into what is trained and what is not."""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lean_finetune.data.chat.control_tokens import TRAINED_END, TRAINED_START
from lean_finetune.data.format.example import Plain, RowFault

_SENTINELS = (TRAINED_START, TRAINED_END)
_SENTINEL = re.compile(f"([{TRAINED_START}{TRAINED_END}])")


class Segment(NamedTuple):
    """A stretch of a row's text that is trained as a whole or not at all."""

    text: str
    trained: bool


def plain_segments(example: Plain, *, bos: str, eos: str, train_on: str) -> list[Segment]:
    """Prompt and completion as the tokenizer itself would start and end a text: BOS where it adds one, then EOS.

    `bos` is empty where the tokenizer adds none. With `train_on` all, the prompt is trained too.
    """
    segments = (
        Segment(text=bos + example.prompt, trained=train_on == "all"),
        Segment(text=example.completion + eos, trained=True),
    )
    return [segment for segment in segments if segment.text]


def split_segments(pieces: Sequence[str]) -> list[Segment]:
    """Join the pieces of a rendering, cut at the sentinels; trained stretches that touch become one.

    A sentinel is a piece of its own, or no piece holds one. Looking for them in the joined text would cost more than
    rendering it: they widen every character of it.

    Raises:
        RowFault: generation blocks lie inside each other.
    """
    segments: list[Segment] = []
    trained, start = False, 0
    for place, piece in enumerate(pieces):
        if piece not in _SENTINELS:
            continue
        if trained == (piece == TRAINED_START):
            raise RowFault("the chat template puts a generation block inside another; mend its generation marks")
        _add(segments, "".join(pieces[start:place]), trained)
        trained, start = not trained, place + 1
    if trained:
        raise RowFault("the chat template opens a generation block and does not close it; mend its generation marks")
    _add(segments, "".join(pieces[start:]), trained)
    return segments


def set_apart(pieces: Iterable[str]) -> list[str]:
    """The pieces, with the sentinels inside them as pieces of their own."""
    return [part for piece in pieces for part in _SENTINEL.split(piece)]


def _add(segments: list[Segment], text: str, trained: bool) -> None:
    """Add text to the last segment, or as a new one where that is of the other kind."""
    if not text:
        return
    if segments and segments[-1].trained == trained:
        text = segments.pop().text + text
    segments.append(Segment(text, trained))


def segments_of_spans(text: str, spans: list[tuple[int, int]]) -> list[Segment]:
    """Cut text at half-open character spans, which are trained, ascending and disjoint."""
    segments: list[Segment] = []
    done = 0
    for start, end in spans:
        segments += [Segment(text[done:start], False), Segment(text[start:end], True)]
        done = end
    segments.append(Segment(text[done:], False))
    return [segment for segment in segments if segment.text]
