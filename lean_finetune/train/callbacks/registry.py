"""The callbacks of every training run, and the trackers that `run.trackers` may name."""

from collections.abc import Sequence
from importlib.util import find_spec

from lean_finetune.core.errors import UserError
from lean_finetune.train.callbacks.callback import Callback, RunInfo
from lean_finetune.train.callbacks.dvclive_tracker import DvcLiveTracker
from lean_finetune.train.callbacks.growth_warnings import GrowthWarnings
from lean_finetune.train.callbacks.live_curves import LiveCurves
from lean_finetune.train.callbacks.mlflow_tracker import MlflowTracker
from lean_finetune.train.callbacks.progress_bar import ProgressBar
from lean_finetune.train.callbacks.slow_steps import SlowSteps
from lean_finetune.train.callbacks.tensorboard_tracker import TensorBoardTracker
from lean_finetune.train.callbacks.tracker import Tracker
from lean_finetune.train.callbacks.wandb_tracker import WandbTracker

CALLBACKS: list[type[Callback]] = [GrowthWarnings, SlowSteps, LiveCurves, ProgressBar]
"""Of every run, called in this order."""
TRACKERS: dict[str, type[Tracker]] = {
    tracker.name: tracker for tracker in (DvcLiveTracker, TensorBoardTracker, WandbTracker, MlflowTracker)
}
"""By their name in `run.trackers`; `config.field_types.TrackerName` lists the names."""


def make_callbacks(info: RunInfo, trackers: Sequence[str], *, leads: bool) -> list[Callback]:
    """Create the callbacks of a run; none on other processes than the first."""
    return [create(info) for create in (*CALLBACKS, *(TRACKERS[name] for name in trackers))] if leads else []


def refuse_missing_trackers(trackers: Sequence[str]) -> None:
    """Refuse trackers whose packages are not installed.

    Raises:
        UserError: with the command that installs the first one.
    """
    for tracker in (TRACKERS[name] for name in trackers):
        spec = find_spec(tracker.package)
        if spec is None or spec.origin is None:  # A directory of that name in the working directory has no origin.
            raise UserError(
                f"run.trackers: {tracker.name} needs a package that is not installed; run `pip install "
                f"{tracker.install}` or remove it from run.trackers"
            )
