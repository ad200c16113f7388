"""What the predicted peak means for a run with compiled layers (train.compile): a trace has none."""

from transformers import PretrainedConfig

from lean_finetune.config.schema import Params
from lean_finetune.core.errors import UserError
from lean_finetune.model.empty_model import meta_model
from lean_finetune.model.experts.experts_forward import has_experts

PEAKS_ON_CPU = (0.77, 1.5)
"""Lowest and highest peak of compiled steps as a multiple of the prediction: docs/memory-switches.md, on a CPU only."""
COUNTED = 2.0
"""Multiple of the prediction that the verdict for a CPU counts with."""


def refuse_compiled(params: Params, device_type: str, config: PretrainedConfig) -> None:
    """Raise UserError if train.compile cannot be predicted or compiled for a device and a model."""
    refuse_unpredicted(params.train.compile, device_type, enforce=params.estimate.enforce)
    if params.train.compile and has_experts(meta_model(config)):
        raise UserError(
            f"train.compile: mixtures of experts count the rows of each expert outside of what can be compiled; got "
            f"true with {config.model_type}; set it to false"
        )


def refuse_unpredicted(compiled: bool, device_type: str, *, enforce: bool) -> None:
    """Raise UserError if the memory of compiled layers is unknown and estimate.enforce demands a prediction."""
    if compiled and enforce and device_type != "cpu":
        raise UserError(
            "train.compile: the memory of compiled layers was never measured on a GPU, and estimate.enforce=true "
            "starts only runs that are predicted to fit; got true; set it to false, or estimate.enforce=false"
        )


def memory_note(compiled: bool, device_type: str) -> str | None:
    """What the predicted peak means for a run with compiled layers; None for other runs."""
    if not compiled:
        return None
    low, high = PEAKS_ON_CPU
    measured = f"on a CPU compiled steps took {low:g} to {high:g} times that"
    known = f"the verdict counts {COUNTED:g} times" if device_type == "cpu" else "on a GPU none was measured"
    return f"train.compile: peaks are predicted for layers that are not compiled; {measured}; {known}"


def headroom_percent(params: Params, device_type: str) -> float:
    """estimate.headroom_percent; on a CPU compiled layers leave more free, so that `COUNTED` times the peak fits."""
    percent = params.estimate.headroom_percent
    if not params.train.compile or device_type != "cpu":
        return percent
    return round(100 - (100 - percent) / COUNTED, 1)
