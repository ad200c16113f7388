"""The callbacks of every training run. To add a tracker, add its class to `CALLBACKS`."""

from lean_finetune.train.callbacks.callback import Callback, RunInfo
from lean_finetune.train.callbacks.growth_warnings import GrowthWarnings
from lean_finetune.train.callbacks.progress_bar import ProgressBar

CALLBACKS: list[type[Callback]] = [GrowthWarnings, ProgressBar]
"""Called in this order."""


def make_callbacks(info: RunInfo, *, leads: bool) -> list[Callback]:
    """Create the callbacks of a run; none on other processes than the first."""
    return [callback(info) for callback in CALLBACKS] if leads else []
