"""Whose weights a run keeps, and when it stops early: what `train.keep`, `best_by` and `stop_after_no_gain` mean.

All follow from the curves alone, so a resumed run chooses the same step as one that was never interrupted.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lean_finetune.config.best_by import FIGURES
from lean_finetune.config.schema import Train
from lean_finetune.train.callbacks.callback import CurveRow


def kept_step(train: Train, curves: Sequence[CurveRow]) -> int | None:
    """The finished steps at the best held-out figure so far, the first of equals: the run keeps the weights from there.

    None: the run keeps its last weights, or had no evaluation yet.
    """
    return _best(_figures(train, curves)) if train.keep == "best" else None


def stops_early(train: Train, curves: Sequence[CurveRow]) -> bool:
    """Whether the last `train.stop_after_no_gain` held-out figures are no better than the best before them."""
    if train.stop_after_no_gain is None:
        return False
    figures = _figures(train, curves)
    best = _best(figures)
    return best is not None and sum(step > best for step in figures) >= train.stop_after_no_gain


def kept_figures(train: Train, curves: Sequence[CurveRow], planned_steps: int) -> dict[str, Any]:
    """The part of figures.json that says which step was kept, and after which one training ended early."""
    kept, stopped = kept_step(train, curves), len(curves) < planned_steps
    column = FIGURES[train.best_by].column
    chosen = {} if kept is None else {"kept_step": kept, f"{column}_kept": curves[kept - 1][column]}
    return {**chosen, **({"stopped_after_step": len(curves)} if stopped else {})}


def kept_lines(train: Train, figures: Mapping[str, Any], planned_steps: int) -> Iterator[str]:
    """The same for a person."""
    by = FIGURES[train.best_by]
    if (stopped := figures.get("stopped_after_step")) is not None:
        yield f"train: stopped after optimizer step {stopped} of {planned_steps}: {by.no_gain}"
    if (kept := figures.get("kept_step")) is not None:
        found = figures[f"{by.column}_kept"]
        yield f"train: keeps the weights after optimizer step {kept}, with the {by.best} ({found:.4f})"


def _figures(train: Train, curves: Sequence[CurveRow]) -> dict[int, float]:
    """The held-out figures by finished steps, so that lower is better."""
    by = FIGURES[train.best_by]
    return {number: by.sign * row[by.column] for number, row in enumerate(curves, 1) if by.column in row}


def _best(figures: dict[int, float]) -> int | None:
    """The first step with the lowest figure; None without one."""
    return min(figures, key=lambda step: (figures[step], step), default=None)
