"""Warn of memory growth while a run trains: when its curves are checked, and one line with cause and remedy."""

from collections.abc import Callable, Mapping
from typing import Any

from lean_finetune.core.units import readable_size
from lean_finetune.train.monitor.growth import LIVE, PEAK, RESERVED, SHAPES, Cause, Growth, Rows, classify

FIRST_CHECK_STEPS, CHECK_FACTOR = 20, 1.5
"""Check after 20 steps, then whenever the run is half as long again: few chances of a false alarm, bounded cost."""
REMEDIES: Mapping[Cause, str] = {
    "jump": "something was allocated there and is still referenced; memory is flat before and after",
    "periodic": "no growth, nothing to do",
    "plateau": "it has settled, nothing to do",
    "flat": "nothing to do",
    "unclear": "no cause is certain; more steps, reserved memory and batch shapes would help to find one",
    "too_short": "record more steps",
}
"""Remedies of the causes for which no setting helps."""
Settings = Mapping[str, Any]
"""Parameters of the run by dotted name; empty where they are unknown, as for a recorded curve."""


class GrowthWatch:
    """Checks the rows of a run at increasing intervals and reports each cause once."""

    def __init__(self) -> None:
        """Start with nothing reported. A resumed run reports again, to whoever reads its log."""
        self._reported: set[Cause] = set()
        self._next_check = FIRST_CHECK_STEPS

    def check(self, rows: Rows) -> list[Growth]:
        """Return causes that were not reported before; empty if no check is due."""
        if len(rows) < self._next_check:
            return []
        while self._next_check <= len(rows):
            self._next_check = round(self._next_check * CHECK_FACTOR)
        causes = [growth for growth in classify(rows) if growth.cause in ("leak", "fragmentation", "length")]
        new = [growth for growth in causes if growth.cause not in self._reported]
        self._reported.update(growth.cause for growth in new)
        return new


def growth_line(growth: Growth, rows: Rows, free_bytes: Callable[[str], int | None], settings: Settings) -> str:
    """Return one line with cause, figures, confidence and remedy.

    Args:
        growth: the finding.
        rows: the rows it was found in.
        free_bytes: returns the memory that is left for a column's series; None where that is unknown.
        settings: parameters of the run: a remedy that is already set is not proposed.
    """
    if growth.series is None:
        return f"{growth.cause.replace('_', ' ')}: {len(rows)} steps with memory; {REMEDIES[growth.cause]}"
    if growth.description is not None:
        return f"{growth.cause}: {growth.series} {growth.description}; {REMEDIES[growth.cause]}"
    how = {
        "leak": "grows steadily " + ("at equal batch shape" if growth.at_equal_shape else "(batch shapes unknown)"),
        "fragmentation": "grows beyond the highest peak",
        "length": "grows with batch length",
    }.get(growth.cause, "grows")
    figures = (
        f"{growth.cause}: {growth.series} {how} by {readable_size(max(0, round(growth.slope_bytes_per_step)))} a step, "
        f"{readable_size(max(0, growth.growth_bytes))} over steps {growth.first_step}-{growth.last_step}"
    )
    if growth.confidence is not None:
        figures += f", confidence {100 * growth.confidence:.4g} %"
    if growth.cause == "leak":
        return f"{figures}{_exhausted(growth, free_bytes(growth.series))}; {_leak_remedy(growth.series, settings)}"
    if growth.cause == "fragmentation":
        return f"{figures}; {_fragmentation_remedy(settings)}"
    return f"{figures}; {_length_remedy(rows) if growth.cause == 'length' else REMEDIES[growth.cause]}"


def _exhausted(growth: Growth, free_bytes: int | None) -> str:
    """Say at which step memory will be exhausted."""
    if free_bytes is None or growth.slope_bytes_per_step <= 0:
        return ""
    free_bytes = max(0, free_bytes)
    step = growth.last_step + int(free_bytes / growth.slope_bytes_per_step)
    return f"; the remaining {readable_size(free_bytes)} are used up at about step {step}"


def _leak_remedy(series: str, settings: Settings) -> str:
    """Propose what to switch off to find the code that leaks."""
    if series in (LIVE, PEAK, RESERVED):
        changes: Settings = {"train.optimizer": "adamw", "train.attention": "sdpa"}
        effect = "uses only PyTorch's kernels"
    else:
        changes, effect = {"run.loader_threads": 0}, "runs without the threads that read ahead"
    return f"a step must not leave memory behind, so this is a bug: {_command(changes, settings, effect)}"


def _fragmentation_remedy(settings: Settings) -> str:
    """Propose expandable segments, else batches of one shape."""
    if settings.get("train.expandable_segments"):
        changes = {"bucket.mode": "packed", "bucket.constant_shape": "true"}
        return _command(changes, settings, "gives all batches one shape")
    return _command({"train.expandable_segments": "true"}, settings, "lets segments grow")


def _command(changes: Settings, settings: Settings, effect: str) -> str:
    """Return a command with the changes that are not set already."""
    # Attention auto is eager only where a model caps its scores, and sdpa would be refused there.
    current = {name: "sdpa" if value == "auto" else value for name, value in settings.items()}
    new = [f"-S {name}={value}" for name, value in changes.items() if current.get(name) != value]
    return f"`dvc exp run {' '.join(new)}` {effect}" if new else "please report it with data/train/curves.csv"


def _length_remedy(rows: Rows) -> str:
    """Propose to run the largest batch first."""
    for shape, parameter in zip(SHAPES, ("bucket.max_tokens", "bucket.max_tokens", "data.max_length"), strict=True):
        known = [row[shape] for row in rows if row.get(shape) is not None]
        if known:
            longest = int(max(known))
            return (
                f"`dvc exp run -S bucket.mode=bucketed -S {parameter}={longest}` runs the largest batch first: "
                f"memory is flat after it; a value below {longest} lowers it"
            )
    raise AssertionError("growth by length is never found without lengths")
