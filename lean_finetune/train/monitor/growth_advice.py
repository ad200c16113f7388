"""What growth means and what to do, in one line; and when a run is looked at for it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lean_finetune.core.units import readable_size
from lean_finetune.train.monitor.growth import HELD, PEAK, RESERVED, SHAPES, Cause, Growth, Rows, classify

FIRST_LOOK_STEPS, NEXT_LOOK = 20, 1.5
"""A run is looked at after so many steps, then whenever it is so many times as long: a bounded cost a step, and few
chances of a false alarm."""

REMEDIES: Mapping[Cause, str] = {
    "jump": "something was allocated there and kept; the steps before and after it are flat",
    "periodic": "no growth, nothing to do",
    "plateau": "nothing to do: it has settled",
    "flat": "nothing to do",
    "unclear": "no cause is sure; more steps tell more, and so do the peak beside what is reserved, and batch shapes",
    "too_short": "more steps tell more",
}
"""What helps, where no setting does."""

Settings = Mapping[str, Any]
"""Parameters of the run by their dotted names; empty where they are not known, as for a recorded curve."""


class GrowthWatch:
    """Looks at the rows of a run now and then, and tells each cause once."""

    def __init__(self) -> None:
        """Nothing told yet. What a resumed run has rows of is told again, to whoever reads it now."""
        self._told: set[Cause] = set()
        self._next_look = FIRST_LOOK_STEPS

    def look(self, rows: Rows) -> list[Growth]:
        """Causes of growth not told before, if it is time to look."""
        if len(rows) < self._next_look:
            return []
        while self._next_look <= len(rows):
            self._next_look = round(self._next_look * NEXT_LOOK)
        found = [one for one in classify(rows) if one.cause in ("leak", "fragmentation", "length")]
        new = [one for one in found if one.cause not in self._told]
        self._told.update(one.cause for one in new)
        return new


def growth_line(growth: Growth, rows: Rows, left_bytes: Callable[[str], int | None], settings: Settings) -> str:
    """Cause, figures, confidence and remedy.

    Args:
        growth: what was found.
        rows: in which it was found.
        left_bytes: memory that a series can still grow into, by its column; None where that is not known.
        settings: with which the rows were recorded: a remedy that is already in use is not proposed.
    """
    if growth.series is None:
        return f"{growth.cause.replace('_', ' ')}: {len(rows)} steps with memory; {REMEDIES[growth.cause]}"
    if growth.cause == "periodic":
        return (
            f"periodic: {growth.series} rises and falls by {readable_size(growth.swing_bytes)} every "
            f"{growth.period_steps:.3g} steps; {REMEDIES[growth.cause]}"
        )
    if growth.cause == "jump":
        return f"jump: {growth.series} has {_jumps(growth)}; {REMEDIES[growth.cause]}"
    figures = (
        f"{growth.cause}: {_meaning(growth)} {readable_size(max(0, round(growth.slope_bytes_per_step)))} a step, "
        f"{readable_size(max(0, growth.growth_bytes))} over steps {growth.first_step}-{growth.last_step}"
    )
    if growth.confidence is not None:
        figures += f", confidence {100 * growth.confidence:.4g} %"
    if growth.cause == "leak":
        return f"{figures}{_end(growth, left_bytes(growth.series))}; {_leak_remedy(growth.series, settings)}"
    if growth.cause == "fragmentation":
        return f"{figures}; {_fragmentation_remedy(settings)}"
    if growth.cause == "length":
        return f"{figures}; {_length_remedy(rows)}"
    return f"{figures}; {REMEDIES[growth.cause]}"


def _jumps(growth: Growth) -> str:
    """How many jumps, how large, and where."""
    size, steps = readable_size(growth.largest_jump_bytes), ", ".join(map(str, growth.jump_steps))
    if len(growth.jump_steps) == 1:
        return f"one jump of {size} at step {steps}"
    return f"{len(growth.jump_steps)} jumps of up to {size} at steps {steps}"


def _meaning(growth: Growth) -> str:
    """The series and how it moves."""
    if growth.cause == "fragmentation":
        return "what is reserved beyond the most that tensors took grows by"
    if growth.cause == "length":
        return f"{growth.series} grows as batches get longer, by"
    if growth.cause == "leak":
        shape = "at equal batch shape" if growth.at_equal_shape else "(batch shapes unknown)"
        return f"{growth.series} grows steadily {shape} by"
    return f"{growth.series} grows by"


def _end(growth: Growth, left_bytes: int | None) -> str:
    """When memory will be spent."""
    if left_bytes is None or growth.slope_bytes_per_step <= 0:
        return ""
    steps = int(max(0, left_bytes) / growth.slope_bytes_per_step)
    return f"; the {readable_size(max(0, left_bytes))} left are spent about step {growth.last_step + steps}"


def _leak_remedy(series: str, settings: Settings) -> str:
    """A leak is a fault of code: what to leave out to find it."""
    changes: dict[str, Any]
    if series in (HELD, PEAK, RESERVED):
        changes = {"train.optimizer": "adamw", "train.attention": "sdpa"}
        effect = "leaves out kernels that are not PyTorch's"
    else:
        changes, effect = {"run.loader_threads": 0}, "leaves out the threads that read ahead"
    return f"a step should keep nothing, so this is a fault of code: {_proposed(changes, settings, effect)}"


def _fragmentation_remedy(settings: Settings) -> str:
    """Segments that grow; batches of one shape."""
    if settings.get("train.expandable_segments"):
        changes = {"bucket.mode": "packed", "bucket.constant_shape": "true"}
        return _proposed(changes, settings, "makes all batches of one shape")
    return _proposed({"train.expandable_segments": "true"}, settings, "lets segments grow")


def _proposed(changes: Settings, settings: Settings, effect: str) -> str:
    """A command with the changes that are not in use already; what to do where all of them are."""
    new = [f"-S {name}={value}" for name, value in changes.items() if settings.get(name) != value]
    if not new:
        return "please report it with data/train/curves.csv"
    return f"`dvc exp run {' '.join(new)}` {effect}"


def _length_remedy(rows: Sequence[Mapping[str, Any]]) -> str:
    """Smaller batches, the largest first."""
    for shape, parameter in zip(SHAPES, ("bucket.max_tokens", "bucket.max_tokens", "data.max_length"), strict=True):
        known = [row[shape] for row in rows if row.get(shape) is not None]
        if known:
            longest = int(max(known))
            return (
                f"`dvc exp run -S bucket.mode=bucketed -S {parameter}={longest}` takes the largest batch first: "
                f"memory is flat from then on; fewer than {longest} tokens lower it"
            )
    raise AssertionError("growth by length is never found without lengths")
