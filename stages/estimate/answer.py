"""What a prediction means on a device: the verdict, and what would fit where the run does not."""

from dataclasses import dataclass
from typing import Any

from stages.estimate.advice import Remedy, advise
from stages.estimate.devices import Device
from stages.estimate.kernels import target_of
from stages.estimate.plan_memory import PlanMemory
from stages.estimate.predict import Prediction
from stages.estimate.verdict import Verdict, judge, usable_bytes
from stages.estimate.workload import Costs, Workload
from stages.params import Params


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A verdict with its advice."""

    verdict: Verdict
    remedies: tuple[Remedy, ...]
    """Best first; none where the run fits."""
    ranked: str | None
    """How remedies were ranked; None where the run fits."""

    def as_json(self) -> dict[str, Any]:
        """The content of advice.json."""
        remedies = [remedy.as_json() for remedy in self.remedies]
        return {"verdict": self.verdict.state, "ranked": self.ranked, "remedies": remedies}


def answer(
    run: Workload, prediction: Prediction, device: Device, p: Params, memory: PlanMemory | None = None
) -> Answer:
    """Hold a prediction against a device, and look for changes only where its tensors do not fit.

    `memory` is the replay of the whole plan, where there is one.
    """
    headroom, enforce = p.estimate.headroom_percent, p.estimate.enforce
    usable, target = usable_bytes(device, headroom), target_of(device)
    if prediction.peak.bytes <= usable:
        verdict = judge(prediction, device, (), headroom_percent=headroom, enforce=enforce, memory=memory)
        return Answer(verdict=verdict, remedies=(), ranked=None)
    costs = Costs(run, device, target)
    remedies = advise(run, costs, target, usable_bytes=usable, native_bf16=device.native_bf16, progress=p.run.progress)
    return Answer(
        verdict=judge(prediction, device, remedies, headroom_percent=headroom, enforce=enforce, memory=memory),
        remedies=tuple(remedies),
        ranked=f"by what is learnt, then {costs.reason}",
    )
