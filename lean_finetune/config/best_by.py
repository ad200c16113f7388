"""The held-out figures of `train.best_by`, by which the steps of a run are compared."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class HeldoutFigure:
    """A column of the curves by which steps are compared."""

    column: str
    sign: int
    """-1 if higher is better, else 1."""
    best: str
    """The best value's name, as a person says it."""
    no_gain: str
    """What ended a run that stopped early."""


FIGURES = {
    "loss": HeldoutFigure(
        column="heldout_loss",
        sign=1,
        best="lowest held-out loss",
        no_gain="the held-out loss fell no more",
    ),
    "accuracy": HeldoutFigure(
        column="heldout_reward_accuracy",
        sign=-1,
        best="highest held-out accuracy",
        no_gain="the held-out accuracy rose no more",
    ),
}
"""By the value of train.best_by."""
