"""What a prediction means on a device: the verdict, and what would fit where the run does not."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lean_finetune.config.schema import Params
from lean_finetune.memory.advice.search import Confirm, Remedy, advise
from lean_finetune.memory.advice.search_space import EFFECTS, SAME
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
    """Best first; none where the run fits."""
    ranked: str | None
    """How remedies were ranked; None where nothing was."""

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
    """Hold a prediction against a device, and look for changes where the run does not fit.

    `memory` is the replay of the whole plan, where there is one. Where tensors fit but not the segments they lie in,
    the other kind of segments comes before every other change: it costs nothing. `confirm` holds a changed run against
    the device in the same way: without it tensors alone decide what is offered.
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
    ranked = f"by what is learnt, then {costs.reason}"
    return Answer(verdict=judged(remedies), remedies=tuple(remedies), ranked=ranked)


def other_segments(memory: PlanMemory, prediction: Prediction) -> tuple[Remedy, ...]:
    """The other kind of segments, where memory ends in those of the run and not in these; it costs no time."""
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
