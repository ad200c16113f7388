"""Labelled rows: an answer in any format and whether it is desirable, from the source to the columns of tokens."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pyarrow as pa

from lean_finetune.core.errors import RowFault, UserError
from lean_finetune.data.format.format_base import PROMPT_ROLES, Compared, Conversation, PlainText, RowFormat, rates
from lean_finetune.data.format.row_values import show
from lean_finetune.data.read.arrow_batches import from_numpy
from lean_finetune.islands.objectives.registry import KINDS
from lean_finetune.preferences.objectives.kto import LABELLED
from lean_finetune.rows.columns import InspectedRows, RowColumns

if TYPE_CHECKING:
    from lean_finetune.data.encode.row_tokenizer import Chunks
    from lean_finetune.data.format.format_base import Example, SourceFormat

COLUMN = LABELLED.label_column
_WORDS = {"true": True, "1": True, "false": False, "0": False}
"""Labels in tables of text, such as CSV files."""


@dataclass(frozen=True, kw_only=True)
class Labelled(Compared):
    """An answer, and whether it is desirable."""

    answer: Conversation | PlainText
    desirable: bool

    @property
    def parts(self) -> tuple[Conversation | PlainText, ...]:
        """See the base class."""
        return (self.answer,)


@rates(LABELLED)
def labelled(row: Mapping[str, Any], example: Conversation | PlainText, row_format: RowFormat) -> Labelled:
    """The example of a row with its label.

    Raises RowFault if the label is none, or the row does not have a prompt and end with an answer that it can rate.
    """
    desirable = _label(row, LABELLED.labels)
    if isinstance(example, Conversation) and not row_format.divides_prompt:
        example = _last_answer(example)
    _refuse_without_prompt(example)
    return Labelled(answer=example, desirable=desirable)


def _label(row: Mapping[str, Any], columns: Sequence[str]) -> bool:
    """The row's label."""
    given = {key: row[key] for key in columns if row.get(key) is not None}
    if not given:
        names = " nor ".join(map(repr, columns))
        raise RowFault(f"the row has neither {names}; say whether its answer is good, or remove the row")
    found = {key: _truth(value) for key, value in given.items()}
    for key, truth in found.items():
        if truth is None:
            raise RowFault(f"{key!r} must be true or false, got {show(given[key])}; change it")
    if len(set(found.values())) > 1:
        raise RowFault(f"{' and '.join(map(repr, found))} differ; keep one of them")
    return bool(found.popitem()[1])


def _truth(value: Any) -> bool | None:
    """Whether a label means desirable; 0 and 1 too, as ms-swift reads them. None for anything else."""
    if isinstance(value, str):
        return _WORDS.get(value.strip().lower())
    return bool(value) if isinstance(value, bool | int) and value in (0, 1) else None


def _refuse_without_prompt(example: Conversation | PlainText) -> None:
    """Refuse an answer to nothing: its label says how good it is as an answer to its prompt."""
    if isinstance(example, PlainText):
        asks = bool(example.prompt.strip())
    else:
        asks = any(message["role"] in PROMPT_ROLES for message in example.messages[: max(example.turns(), default=0)])
    if not asks:
        raise RowFault("a labelled row needs a prompt in front of its answer; add it, or remove the row")


def _last_answer(example: Conversation) -> Conversation:
    """The conversation with its last turn alone trained: the label rates that one."""
    last = len(example.messages) - 1
    if example.messages[last]["role"] != "assistant":
        raise RowFault("a labelled row must end with the assistant's answer, which its label rates; change it")
    earlier = (number for number in example.turns() if number != last)
    return replace(example, context=example.context | frozenset(earlier))


@dataclass(frozen=True, kw_only=True)
class LabelColumns(RowColumns):
    """The labels of answers. A mismatch has that of its row."""

    rows_text = "rows with labels"
    fields = (pa.field(COLUMN, pa.bool_(), nullable=False),)

    kind: str
    """Name of the kind of rows."""

    @classmethod
    def of(cls, rows: InspectedRows) -> Self | None:
        """See the base class."""
        return cls(kind=rows.kind.name) if rows.kind.labels else None

    def value(self, row: Mapping[str, Any], example: "Example", source: "SourceFormat", file: int) -> bool:
        """See the base class."""
        assert isinstance(example, Labelled)
        return example.desirable

    def with_untrained(self, chunks: "Chunks", ids: np.ndarray, max_length: int) -> "tuple[Chunks, np.ndarray]":
        """See the base class: mismatches."""
        return with_mismatches(chunks, ids, max_length)

    def arrays(self, values: Sequence[bool]) -> list[pa.Array]:
        """See the base class."""
        return [from_numpy(np.array(values, bool), pa.bool_())]

    def digest(self, value: bool) -> bytes:
        """See the base class."""
        return bytes([value])

    def published(self, store: Path, out: Path, rows: Path, dropped: np.ndarray | None) -> int:
        """See the base class: desirable answers that are no duplicates; mismatches do not count."""
        found = start = 0
        for path in sorted(rows.glob("*.arrow")):
            with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
                for number in range(reader.num_record_batches):
                    labels = reader.get_batch(number).column(COLUMN).to_numpy(zero_copy_only=False)
                    used = True if dropped is None else ~dropped[start : start + len(labels)]
                    start += len(labels)
                    found += int((labels & used)[::2].sum())
        return found

    def check(self, found: Mapping[str, int], rows: Mapping[str, int], why: str) -> None:
        """See the base class: training rows that all have one label."""
        if found["train"] in (0, rows["train"]):
            label = "undesirable" if found["train"] == 0 else "desirable"
            raise UserError(
                f"data.source: training rows must have both labels; all {rows['train']} are {label}{why}; add rows of "
                "the other label, or set train.objective=sft"
            )

    def figures(self, found: Mapping[str, int]) -> Mapping[str, int]:
        """See the base class."""
        return {"desirable_rows": found["train"]}

    def advice(self, found: Mapping[str, int], rows: Mapping[str, int]) -> Iterable[str]:
        """See the base class: as many desirable rows as the usual objective wants."""
        kind, good = KINDS[self.kind], found["train"]
        bad = rows["train"] - good
        if not kind.is_balanced(good, bad):
            balance = kind.balance.format(good=good, bad=bad)
            yield f"{good} training rows are desirable and {bad} are not; {balance}"


# Mismatched answers: each row's prompt with the answer to another prompt.
#
# By their log-probabilities an objective estimates how far the model is from its reference. They depend on the block
# and the side of the split alone, so that the reference of each is computed once.


def with_mismatches(chunks: "Chunks", ids: np.ndarray, max_length: int) -> "tuple[Chunks, np.ndarray]":
    """Each row followed by its mismatch, and the ids in which `starts` are indices.

    A mismatch has the row's tokens up to its first trained one, then those from there on of another row. It is cut to
    `max_length` tokens.
    """
    if not len(chunks.rows):
        return chunks, ids
    count = len(chunks.rows)
    bounds = np.searchsorted(chunks.span_chunks, np.arange(count + 1))
    prompts = chunks.spans[bounds[:-1], 0].tolist()
    starts, lengths = chunks.starts.tolist(), chunks.lengths.tolist()
    prompt_ids = [ids[start : start + size] for start, size in zip(starts, prompts, strict=True)]
    parts, spans, span_counts, new_lengths = [ids], [], [], []
    for row, other in enumerate(other_rows([tokens.tobytes() for tokens in prompt_ids])):
        own_spans = _shifted(chunks, bounds, other, prompts[row] - prompts[other], max_length)
        if supervised_tokens(own_spans) < 1:  # One token behind no prompt, which nothing predicts.
            other = row
            own_spans = chunks.spans[bounds[row] : bounds[row + 1]]
        length = int(own_spans[-1, 1])
        answer = starts[other] + prompts[other]
        parts += [prompt_ids[row], ids[answer : answer + length - prompts[row]]]
        spans += [chunks.spans[bounds[row] : bounds[row + 1]], own_spans]
        span_counts += [len(spans[-2]), len(own_spans)]
        new_lengths += [lengths[row], length]
    all_lengths = np.array(new_lengths, np.int64)
    mismatch_starts = len(ids) + np.cumsum(all_lengths[1::2]) - all_lengths[1::2]
    made = replace(
        chunks,
        rows=np.repeat(chunks.rows, 2),
        starts=np.stack([chunks.starts, mismatch_starts], axis=1).ravel(),
        lengths=all_lengths,
        supervised=np.array([supervised_tokens(one) for one in spans], np.int64),
        span_chunks=np.repeat(np.arange(2 * count), span_counts),
        spans=np.concatenate(spans),
    )
    return made, np.concatenate(parts)


def other_rows(prompts: Sequence[bytes]) -> list[int]:
    """For each row the last one before it with another prompt, in a circle; the row before it if all prompts are equal.

    Rows with one prompt often follow each other, and the answer to the same prompt would be no mismatch.
    """
    count = len(prompts)
    if len(set(prompts)) == 1:
        return [(row - 1) % count for row in range(count)]
    found, other = [0] * count, 0
    for row in (*range(count), *range(count)):  # The second round knows what lies before the first row.
        if prompts[row - 1] != prompts[row]:
            other = (row - 1) % count
        found[row] = other
    return found


def supervised_tokens(spans: np.ndarray) -> int:
    """Trained tokens of spans (spans, 2), without the first token of the row, which nothing predicts."""
    return int((spans[:, 1] - np.maximum(spans[:, 0], 1)).sum())


def _shifted(chunks: "Chunks", bounds: np.ndarray, row: int, by: int, max_length: int) -> np.ndarray:
    """The spans of a row, moved and cut to `max_length`."""
    spans = chunks.spans[bounds[row] : bounds[row + 1]] + by
    return np.minimum(spans[spans[:, 0] < max_length], max_length)
