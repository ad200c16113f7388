"""Whether a run fits its device, and what would make it fit."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lean_finetune.config.field_types import Precision
from lean_finetune.core.units import readable_size
from lean_finetune.memory.advice.search import Remedy
from lean_finetune.memory.allocator.plan_memory import PlanMemory
from lean_finetune.memory.gpus import Device
from lean_finetune.memory.predict.peak import Prediction
from lean_finetune.step.batches import BatchShape

LARGEST_CATEGORIES = 3
MOST_REMEDIES = 3
TIGHT = " of headroom, without which it would fit"
SMALLER = "lower bucket.max_tokens"
NO_REMEDY = "no change of the known switches makes it fit: choose a larger device"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether train may start. It names no device if the run fits, so another device causes no retraining."""

    enforce: bool
    """Whether train refuses a run that does not fit."""
    state: Literal["fits", "tight", "does not fit"]
    """Tight: it fits the device, but without the headroom. Train refuses that too."""
    refusal: str | None
    """One line with prediction, capacity, largest parts and settings that fit; None if the run fits."""

    @property
    def fits(self) -> bool:
        """Whether it fits with the headroom."""
        return self.state == "fits"

    def as_json(self, precision: Precision | None) -> dict[str, Any]:
        """The content of verdict.json.

        `precision` is the one that train.precision=auto means on the device; None if the user chose one.
        """
        content = {"enforce": self.enforce, "refusal": self.refusal if self.enforce else None}
        return content if precision is None else {**content, "precision": precision}


def usable_bytes(device: Device, headroom_percent: float) -> int:
    """Memory for tensors: the device's memory without the headroom."""
    return device.usable_bytes(headroom_percent)


def judge(
    prediction: Prediction,
    device: Device,
    remedies: Sequence[Remedy],
    *,
    headroom_percent: float,
    enforce: bool,
    memory: PlanMemory | None = None,
) -> Verdict:
    """Hold a prediction against a device.

    Tensors must leave the headroom free. What the allocator reserves may take all of the device, since cached blocks
    are given back before a request fails: it is held against the device by a replay that does so, where there is one
    (`memory`). `remedies` are told, best first, where the run does not fit.
    """
    usable = usable_bytes(device, headroom_percent)
    if prediction.peak.bytes <= usable:
        refusal = None if memory is None else _reserved_too_much(memory, device, remedies)
        return Verdict(enforce=enforce, state="does not fit" if refusal else "fits", refusal=refusal)
    by_size = sorted(prediction.peak.by_category.items(), key=lambda item: (-item[1], item[0]))
    largest = ", ".join(f"{category} {readable_size(size)}" for category, size in by_size[:LARGEST_CATEGORIES])
    remedy = _would_fit(remedies) or NO_REMEDY
    tight = prediction.peak.bytes <= device.usable_bytes(0)
    kept_free = device.headroom_text(headroom_percent)
    capacity = f"{readable_size(device.memory_bytes)} less {kept_free}{TIGHT if tight else ''}"
    refusal = (
        f"hardware.gpu: predicted peak {readable_size(prediction.peak.bytes)} (in {prediction.worst_phase}"
        f"{_first_failure(prediction, usable, memory)}) exceeds the {readable_size(usable)} usable on {device.name} "
        f"({capacity}); largest: {largest}; {remedy}"
    )
    return Verdict(enforce=enforce, state="tight" if tight else "does not fit", refusal=refusal)


def _first_failure(prediction: Prediction, usable: int, memory: PlanMemory | None) -> str:
    """Where the run would stop: the first phase whose peak is too large, and its micro-batch."""
    phase = next(phase for phase, peak in prediction.by_phase.items() if peak.bytes > usable)
    earlier = "" if phase == prediction.worst_phase else f", too large from {phase} on"
    step = None if memory is None else memory.first_step_above(usable)
    at = "" if step is None else f", at optimizer step {step}"
    return f"{earlier}, micro-batch of {describe(prediction.steps_of_peak[-1][-1])}{at}"


def _would_fit(remedies: Sequence[Remedy]) -> str | None:
    """The first few remedies; None if there is none."""
    shown = [f"{r.switches} ({readable_size(r.peak_bytes)}, {r.slowdown:.2f}x time)" for r in remedies[:MOST_REMEDIES]]
    return f"would fit: {'; '.join(shown)}" if shown else None


def _reserved_too_much(memory: PlanMemory, device: Device, remedies: Sequence[Remedy]) -> str | None:
    """Why a run whose tensors fit ends for want of memory all the same; None where it does not."""
    step, error = memory.failing_step(memory.chosen), memory.limited[memory.chosen].out_of_memory
    if step is None:
        return None
    return (
        f"hardware.gpu: tensors fit {device.name}, but blocks of other sizes stay reserved between them: out of memory "
        f"at optimizer step {step} ({error}); {_would_fit(remedies) or SMALLER}"
    )


def describe(shape: BatchShape) -> str:
    """A micro-batch in words."""
    if shape.joined_lengths is not None:
        return f"{len(shape.joined_lengths)} rows packed into {shape.length} tokens"
    return f"{shape.rows} x {shape.length} tokens"
