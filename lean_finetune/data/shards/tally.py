"""Counts of rows, and the rows that are not used, of a block, a shard, or all shards."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

MAX_UNREAD_COLUMNS = 32
"""Unread columns, and unknown keys of turns, listed for a source: rows may have any number of keys."""
MAX_REJECTS = 100
"""Rejected rows that are listed: a broken source would fill the list with all its rows."""


class Reject(NamedTuple):
    """A row that was not used."""

    file: int
    row: int
    line: int
    reason: str


@dataclass(kw_only=True)
class Tally:
    """Counts of rows, of a block, a shard, or all shards.

    The names of the counts:
        rows: read, without empty lines
        bad_rows: left out by on_bad_row: skip
        empty_answer_rows: left out: a trained answer is empty
        reasoning_left_out_rows: the template shows an earlier trained turn without its reasoning
        truncated_rows: lost trained tokens to max_length
        dropped_long_rows: longer than max_length, over_length: drop
        split_rows: split into several, over_length: split
        no_answer_rows: left out: no trained token is left (of a split row, in none of its chunks)
        control_tokens_as_text, surrogates_replaced: occurrences in the text of rows
        engine_fallback_rows: tiktoken could not encode them
        sampled_rows, sampled_rows_differing: also encoded as one text, to see whether the ids differ
        others: of what rows carry besides tokens (`RowColumns.notes`)
    """

    counts: dict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """By source, then by name."""
    rejects: list[Reject] = field(default_factory=list)
    first: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By name of a count: (file, line) of its first row."""
    unread: dict[int, list[str]] = field(default_factory=dict)
    """By source: columns that its format does not read, sorted."""
    unknown: dict[int, list[str]] = field(default_factory=dict)
    """By source: keys of turns that we do not know and pass to the chat template, sorted."""

    @property
    def bad_row(self) -> Reject | None:
        """The first row that cannot be used; None without one. Rows behind it may be listed for other reasons."""
        place = self.first.get("bad_rows")
        return next((one for one in self.rejects if (one.file, one.line) == place), None)

    def add(self, other: "Tally") -> None:
        """Add the counts of later rows. At most MAX_REJECTS rejects and MAX_UNREAD_COLUMNS columns remain."""
        for source, counts in other.counts.items():
            self.counts[source].update(counts)
        self.rejects += other.rejects[: MAX_REJECTS - len(self.rejects)]
        self.first = other.first | self.first
        for mine, theirs in ((self.unread, other.unread), (self.unknown, other.unknown)):
            for source, names in theirs.items():
                mine[source] = sorted({*mine.get(source, ()), *names})[:MAX_UNREAD_COLUMNS]
