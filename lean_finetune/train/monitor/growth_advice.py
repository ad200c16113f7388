"""When the curves of a run are checked for growth, and one line with cause and remedy."""

import shlex
from collections.abc import Mapping
from typing import Any

from cuda_memory.growth import LIVE, OWN, PEAK, RESIDENT, SHAPES, Cause, Growth, Rows
from cuda_memory.units import counted, readable_size

FIRST_CHECK_STEPS, CHECK_FACTOR = 20, 1.5
"""Check after 20 steps, then whenever the run is half as long again: few chances of a false alarm, bounded cost."""
REMEDIES: Mapping[Cause, str] = {
    "jump": "something was allocated there and is still referenced; memory is flat before and after",
    "steady": "it does not grow any more, nothing to do",
    "unclear": "no cause is certain; more steps, reserved memory and batch shapes would help to find one",
}
"""Remedies of the causes for which no setting helps."""
Settings = Mapping[str, Any]
"""Parameters of the run by dotted name; empty where they are unknown, as for a recorded curve."""
KEPT_ON_DEVICE = (
    "`total += loss` without .item(): keeps each step's graph, and its activations if backward does not free them",
    "losses, logits or model outputs kept in a list or an attribute: store .item() or .detach().cpu()",
    "a list or dictionary of tensors that grows, such as metrics or a cache by batch",
    "a forward for evaluation without torch.no_grad(), or backward(retain_graph=True)",
    "hooks that are registered in every step and never removed",
)
KEPT_ON_HOST = (
    "a list or dictionary that grows: losses, metrics, texts, logged images",
    "`total += loss` without .item(): keeps each step's graph, whose nodes are in RAM",
    "a DataLoader with workers over a large list of Python objects: reading copies its pages into each worker",
    "figures or runs of a tracker that are never closed",
)
USUAL_CAUSES: Mapping[Cause, tuple[str, ...]] = {
    "fragmentation": (
        "batches of ever other lengths: pad them to a few lengths, or to multiples of 64 tokens",
        "blocks of fixed size: set PYTORCH_ALLOC_CONF=expandable_segments:True in the environment",
        "evaluation or generation between steps, whose blocks stay cached between those of training",
    ),
    "length": (
        "longer rows come later: truncate them, or run the longest batch first to see the peak at once",
        "batches of a fixed number of rows: limit the tokens of a batch instead",
    ),
    "jump": (
        "the optimizer's state, allocated by its first update",
        "an evaluation, a generation or a saved checkpoint whose outputs or copies are kept",
        "a longer batch, whose blocks stay cached (reserved memory only)",
    ),
}
"""In programs that are not this pipeline; of a leak see `usual_causes`."""


def usual_causes(growth: Growth) -> tuple[str, ...]:
    """What usually causes this growth in a program that is not this pipeline; empty where nothing is to be done."""
    if growth.jumps is not None:
        return USUAL_CAUSES["jump"]
    if growth.cause in ("leak", "unclear"):
        return KEPT_ON_HOST if growth.series in (OWN, RESIDENT) else KEPT_ON_DEVICE
    return USUAL_CAUSES.get(growth.cause, ())


def check_is_due(steps: int) -> bool:
    """Whether the curves are checked after this number of steps."""
    due = FIRST_CHECK_STEPS
    while due < steps:
        due = round(due * CHECK_FACTOR)
    return due == steps


def growth_line(growth: Growth, rows: Rows, free_bytes: int | None, settings: Settings | None) -> str:
    """Return one line with cause, figures, confidence and remedy of a finding in `rows`.

    `free_bytes` is the memory that is left for its series, None if unknown. Remedies in `settings` are not proposed;
    without settings the run is another program's, and no parameter of ours is.
    """
    if growth.series is None:
        return f"too short: {counted(len(rows), 'step')} with memory; record more steps"
    if growth.jumps is not None:
        return f"jump: {growth.series} {growth.jumps}; {REMEDIES['jump']}"
    how = {
        "leak": "grows steadily " + ("at equal batch shape" if growth.at_equal_shape else "(batch shapes unknown)"),
        "fragmentation": "grows beyond the highest peak",
        "length": "grows with batch length",
    }.get(growth.cause, "grows")
    figures = (
        f"{growth.cause}: {growth.series} {how} by {readable_size(max(0, round(growth.slope_bytes_per_step)))} a step, "
        f"{readable_size(max(0, growth.growth_bytes))} over steps {growth.first_step}-{growth.last_step}"
    )
    if growth.cause == "leak":
        figures += f", confidence {100 * (growth.confidence or 0):.4g} %"
        if free_bytes is not None and growth.slope_bytes_per_step > 0:
            free_bytes = max(0, free_bytes)
            step = growth.last_step + int(free_bytes / growth.slope_bytes_per_step)
            figures += f"; the remaining {readable_size(free_bytes)} are used up at about step {step}"
    if settings is None:
        return figures
    return f"{figures}; {_remedy(growth, rows, settings)}"


def _remedy(growth: Growth, rows: Rows, settings: Settings) -> str:
    """Return what to change: for a leak, what to switch off to find the code that leaks."""
    if growth.cause == "leak":
        kernels = {"train.optimizer": "adamw", "train.attention": "sdpa"}, "uses only PyTorch's kernels"
        threads = {"run.loader_threads": 0}, "runs without the threads that read ahead"
        command = _command(settings, *(kernels if growth.series in (LIVE, PEAK) else threads))
        return f"a step must not leave memory behind, so this is a bug: {command}"
    if growth.cause == "fragmentation":
        if settings.get("train.expandable_segments"):
            one_shape = {"bucket.mode": "packed", "bucket.constant_shape": "true"}
            return _command(settings, one_shape, "gives all batches one shape")
        return _command(settings, {"train.expandable_segments": "true"}, "lets segments grow")
    if growth.cause == "length":
        shape = next(shape for shape in SHAPES if any(row.get(shape) is not None for row in rows))
        parameter = "data.max_length" if shape == "longest_row" else "bucket.max_tokens"
        longest = int(max(row[shape] for row in rows if row.get(shape) is not None))
        return (
            f"`dvc exp run -S bucket.mode=bucketed -S {parameter}={longest}` runs the largest batch first: "
            f"memory is flat after it; a value below {longest} lowers it"
        )
    return REMEDIES[growth.cause]


def _command(settings: Settings, changes: Settings, effect: str) -> str:
    """Return a command with the changes that are not set already."""
    # Attention auto is eager only where a model caps its scores, and sdpa would be refused there.
    current = {name: "sdpa" if value == "auto" else value for name, value in settings.items()}
    new = [word for name, value in changes.items() if current.get(name) != value for word in ("-S", f"{name}={value}")]
    return f"`dvc exp run {shlex.join(new)}` {effect}" if new else "please report it with data/train/curves.csv"
