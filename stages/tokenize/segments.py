"""A row's text, cut into what is trained and what is not."""

from typing import NamedTuple

from stages.tokenize.example import Plain, RowFault
from stages.tokenize.guard import TRAINED_END, TRAINED_START


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


def split_segments(text: str) -> list[Segment]:
    """Cut rendered text at the sentinels; trained stretches that touch become one.

    Raises:
        RowFault: generation blocks lie inside each other.
    """
    segments: list[Segment] = []
    parts = text.replace(TRAINED_END + TRAINED_START, "").replace(TRAINED_START + TRAINED_END, "").split(TRAINED_START)
    if parts[0]:
        segments.append(Segment(parts[0], False))
    if TRAINED_END in parts[0]:
        raise _nested()
    for part in parts[1:]:
        inside, end, outside = part.partition(TRAINED_END)
        if TRAINED_END in outside or not end:
            raise _nested()
        if inside:
            segments.append(Segment(inside, True))
        if outside:
            segments.append(Segment(outside, False))
    return segments


def segments_of_spans(text: str, spans: list[tuple[int, int]]) -> list[Segment]:
    """Cut text at half-open character spans, which are trained, ascending and disjoint."""
    segments: list[Segment] = []
    done = 0
    for start, end in spans:
        segments += [Segment(text[done:start], False), Segment(text[start:end], True)]
        done = end
    segments.append(Segment(text[done:], False))
    return [segment for segment in segments if segment.text]


def without_marks(text: str) -> str:
    """Rendered text without the sentinels."""
    return text.replace(TRAINED_START, "").replace(TRAINED_END, "")


def _nested() -> RowFault:
    return RowFault("the chat template puts a generation block inside another; mend its generation marks")
