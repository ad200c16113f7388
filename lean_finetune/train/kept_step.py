"""Whose weights a run keeps, and when it stops early: what `train.keep` and `train.stop_after_no_gain` mean.

Both follow from the curves alone, so a resumed run chooses the same step as one that was never interrupted.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lean_finetune.config.schema import Train
from lean_finetune.train.callbacks.callback import CurveRow

HELDOUT_LOSS = "heldout_loss"


def kept_step(train: Train, curves: Sequence[CurveRow]) -> int | None:
    """The finished steps at the lowest held-out loss so far, the first of equals: the run keeps the weights from there.

    None: the run keeps its last weights, or had no evaluation yet.
    """
    return _best(_losses(curves)) if train.keep == "best" else None


def stops_early(train: Train, curves: Sequence[CurveRow]) -> bool:
    """Whether the last `train.stop_after_no_gain` held-out losses are no lower than the best before them."""
    if train.stop_after_no_gain is None:
        return False
    losses = _losses(curves)
    best = _best(losses)
    return best is not None and sum(step > best for step in losses) >= train.stop_after_no_gain


def kept_figures(train: Train, curves: Sequence[CurveRow], planned_steps: int) -> dict[str, Any]:
    """The part of figures.json that says which step was kept, and after which one training ended early."""
    kept, stopped = kept_step(train, curves), len(curves) < planned_steps
    chosen = {} if kept is None else {"kept_step": kept, "heldout_loss_kept": curves[kept - 1][HELDOUT_LOSS]}
    return {**chosen, **({"stopped_after_step": len(curves)} if stopped else {})}


def kept_lines(figures: Mapping[str, Any], planned_steps: int) -> Iterator[str]:
    """The same for a person."""
    if (stopped := figures.get("stopped_after_step")) is not None:
        yield f"train: stopped after optimizer step {stopped} of {planned_steps}: the held-out loss falls no more"
    if (kept := figures.get("kept_step")) is not None:
        loss = figures["heldout_loss_kept"]
        yield f"train: keeps the weights after optimizer step {kept}, with the lowest held-out loss ({loss:.4f})"


def _losses(curves: Sequence[CurveRow]) -> dict[int, float]:
    """The held-out losses by finished steps."""
    return {number: row[HELDOUT_LOSS] for number, row in enumerate(curves, 1) if HELDOUT_LOSS in row}


def _best(losses: dict[int, float]) -> int | None:
    """The first step with the lowest loss; None without one."""
    return min(losses, key=lambda step: (losses[step], step), default=None)
