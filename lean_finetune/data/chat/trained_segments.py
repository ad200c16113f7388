"""Segments of a row's text that are trained or not."""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lean_finetune.data.chat.control_tokens import TRAINED_END, TRAINED_START
from lean_finetune.data.format.example import RowFault

_SENTINELS = (TRAINED_START, TRAINED_END)
_SENTINEL = re.compile(f"([{TRAINED_START}{TRAINED_END}])")


class Segment(NamedTuple):
    """A part of a row's text that is trained completely or not at all."""

    text: str
    trained: bool


def split_segments(parts: Sequence[str]) -> list[Segment]:
    """The segments of a rendering; trained segments without text between them become one.

    Each sentinel must be one element of `parts`. Searching the joined text would cost more than rendering it: with a
    sentinel in it, Python stores every character in two bytes. Raises RowFault if generation blocks are nested or not
    closed.
    """
    segments: list[Segment] = []
    trained, start = False, 0
    for index, part in enumerate(parts):
        if part not in _SENTINELS:
            continue
        if trained == (part == TRAINED_START):
            raise RowFault("the chat template puts a generation block inside another; correct its generation marks")
        _add(segments, "".join(parts[start:index]), trained)
        trained, start = not trained, index + 1
    if trained:
        raise RowFault("the chat template opens a generation block and does not close it; correct its generation marks")
    _add(segments, "".join(parts[start:]), trained)
    return segments


def split_at_marks(parts: Iterable[str]) -> list[str]:
    """The parts of a rendering, with each sentinel inside them as a separate part."""
    return [text for part in parts for text in _SENTINEL.split(part)]


def _add(segments: list[Segment], text: str, trained: bool) -> None:
    """Append text to the last segment if that is of the same kind, else as a new segment."""
    if not text:
        return
    if segments and segments[-1].trained == trained:
        text = segments.pop().text + text
    segments.append(Segment(text, trained))


def segments_of_spans(text: str, spans: list[tuple[int, int]]) -> list[Segment]:
    """The segments of a text whose trained spans, half-open ranges of characters, are ascending and disjoint."""
    segments: list[Segment] = []
    done = 0
    for start, end in spans:
        segments += [Segment(text[done:start], False), Segment(text[start:end], True)]
        done = end
    segments.append(Segment(text[done:], False))
    return [segment for segment in segments if segment.text]
