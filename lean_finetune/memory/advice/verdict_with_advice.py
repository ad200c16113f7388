"""The verdict on a predicted run, with settings that fit if the run does not."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lean_finetune.config.schema import Params
from lean_finetune.memory.advice.search import Confirm, Remedy, advise
from lean_finetune.memory.advice.switch import EFFECTS, SAME
from lean_finetune.memory.advice.verdict import Verdict, judge, usable_bytes
from lean_finetune.memory.advice.workload import Costs, Workload
from lean_finetune.memory.allocator.plan_memory import PlanMemory
from lean_finetune.memory.allocator.reserved_memory import ALLOCATORS
from lean_finetune.memory.gpus import Device
from lean_finetune.memory.predict.peak import Prediction
from lean_finetune.memory.trace.cuda_kernels import target_of
from lean_finetune.model.allocator_settings import segments_from_environment


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A verdict with its advice."""

    verdict: Verdict
    remedies: tuple[Remedy, ...]
    """Best first; empty if the run fits."""
    ranked: str | None
    """How remedies were ranked; None if there was no search."""

    def as_json(self) -> dict[str, Any]:
        """The content of advice.json."""
        remedies = [remedy.as_json() for remedy in self.remedies]
        return {"verdict": self.verdict.state, "ranked": self.ranked, "remedies": remedies}


def answer(
    run: Workload,
    prediction: Prediction,
    device: Device,
    p: Params,
    memory: PlanMemory | None = None,
    confirm: Confirm | None = None,
) -> Answer:
    """Compare a prediction with a device, and search for changes if the run does not fit.

    Args:
        run: the run.
        prediction: of its peak.
        device: that it has to fit.
        p: the parameters.
        memory: the allocator's behaviour over the plan, if known. If only fragmentation makes the run fail, the other
            kind of segments is the first remedy, because it costs no time.
        confirm: returns the peak of a changed run that the caller accepts. Without it, tensors alone decide.
    """
    headroom, enforce = p.estimate.headroom_percent, p.estimate.enforce
    usable, target = usable_bytes(device, headroom), target_of(device)

    def judged(remedies: Sequence[Remedy]) -> Verdict:
        return judge(prediction, device, remedies, headroom_percent=headroom, enforce=enforce, memory=memory)

    if prediction.peak.bytes <= usable:
        other = () if memory is None or segments_from_environment() is not None else other_segments(memory, prediction)
        verdict = judged(other)
        if verdict.fits or other or confirm is None:
            return Answer(verdict=verdict, remedies=other, ranked=None)
    costs = Costs(run, device, target)
    remedies = advise(
        run,
        costs,
        target,
        peak=prediction.peak,
        usable_bytes=usable,
        native_bf16=device.native_bf16,
        progress=p.run.progress,
        confirm=confirm,
    )
    ranked = f"by effect on learning, then {costs.reason}"
    return Answer(verdict=judged(remedies), remedies=tuple(remedies), ranked=ranked)


def other_segments(memory: PlanMemory, prediction: Prediction) -> tuple[Remedy, ...]:
    """The other kind of allocator segments, if the run fails with its own kind and not with the other."""
    if memory.failing_step(memory.chosen) is None:
        return ()
    return tuple(
        Remedy(
            flags=(f"train.expandable_segments={str(expands).lower()}",),
            peak_bytes=prediction.peak.bytes,
            slowdown=1.0,
            effect=EFFECTS[SAME],
        )
        for kind, expands in ALLOCATORS.items()
        if kind != memory.chosen and memory.failing_step(kind) is None
    )
