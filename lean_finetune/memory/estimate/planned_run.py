"""A planned run as the stage looks at it: its worst micro-batches traced, a sample of its plan replayed.

Advice looks at changed runs in the same way, so that what it offers is what the verdict would let through.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from transformers import PretrainedConfig

from lean_finetune.core.errors import UserError
from lean_finetune.memory.advice.verdict import judge, usable_bytes
from lean_finetune.memory.advice.workload import Workload
from lean_finetune.memory.allocator.plan_memory import PlanMemory, replay_plan
from lean_finetune.memory.gpus import Device
from lean_finetune.memory.predict.peak import Prediction
from lean_finetune.memory.predict.peak_explanation import Explanation, predict_explained
from lean_finetune.memory.predict.setting import Setting
from lean_finetune.memory.predict.traced_shapes import traced_steps
from lean_finetune.memory.trace.cuda_kernels import target_of
from lean_finetune.plan.batch_plan import Plan
from lean_finetune.plan.planner import PlanSettings
from lean_finetune.plan.row_index import RowIndex, read_index
from lean_finetune.step.optimizer_in_backward import refuse_in_backward


def several_turns(plan: Plan) -> bool:
    """Whether a GPU has more than one micro-batch in a step."""
    return bool((np.diff(plan.step_bounds) > plan.ranks).any())


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedRun:
    """A plan, and what is trained on it."""

    plan: Plan
    """Of all GPUs."""
    lengths: np.ndarray
    """Tokens of every training row."""
    config: PretrainedConfig
    setting: Setting
    device: Device
    windowed: bool
    """The model makes masks, or keeps the scores of its attention."""
    expandable: bool
    """train.expandable_segments."""

    @property
    def own_plan(self) -> Plan:
        """What one GPU computes."""
        return self.plan.of_rank(0) if self.plan.ranks > 1 else self.plan

    def predict(self) -> tuple[Prediction, Explanation]:
        """The peak of its worst micro-batches, taken apart."""
        tiled = self.device.kind == "cuda"
        steps = traced_steps(self.plan, self.lengths, tiled=tiled, windowed=self.windowed)
        return predict_explained(self.config, self.setting, steps, target_of(self.device))

    def replay(self, prediction: Prediction) -> tuple[PlanMemory | None, str | None]:
        """Predict what the plan reserves on a GPU, and say how much of it was replayed; a CPU reserves nothing."""
        if self.device.kind != "cuda":
            return None, None
        return replay_plan(
            self.own_plan,
            self.lengths,
            self.config,
            self.setting,
            target_of(self.device),
            prediction,
            expandable=self.expandable,
            device=self.device,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Confirmation:
    """Holds changed runs against the device by the verdict's own rule."""

    planned: PlannedRun
    """The run that is changed."""
    run: Workload
    """The same as advice sees it."""
    cut: PlanSettings
    """How its plan was made."""
    index: Path
    """Of the training rows."""
    headroom_percent: float

    def __call__(self, changed: Workload) -> int | None:
        """The predicted peak where the stage would say that the changed run fits; None where it would not."""
        try:
            trial = self.trial(changed)
            if trial.setting.optimizer_in_backward:
                refuse_in_backward(trial.setting.model, np.diff(trial.own_plan.step_bounds))
        except UserError:  # Rows that fit no micro-batch, or steps of several: a later stage would refuse the change.
            return None
        prediction, _ = trial.predict()
        device = trial.device
        if prediction.peak.bytes > usable_bytes(device, self.headroom_percent):
            return None  # Before the replay, which takes as long again.
        memory, _ = trial.replay(prediction)
        fits = judge(prediction, device, (), headroom_percent=self.headroom_percent, enforce=True, memory=memory).fits
        return prediction.peak.bytes if fits else None

    def trial(self, changed: Workload) -> PlannedRun:
        """The changed run, cut anew where micro-batches or rows are smaller.

        Raises:
            UserError: a row does not fit in a micro-batch.
        """
        setting, planned = changed.setting, self.planned
        if changed.steps is self.run.steps:
            return replace(planned, setting=setting)
        index = read_index(self.index, self.cut.weights)
        if changed.longest < self.run.longest:
            index = _shortened(index, changed.longest)
        cutting = replace(
            self.cut.micro_batches, mode=changed.mode, max_tokens=changed.max_tokens, fixed_rows=changed.fixed_rows
        )
        plan = replace(self.cut, micro_batches=cutting, tokens_per_step=changed.unpadded_tokens_per_step).plan(index)
        if setting.sharing is not None:
            setting = replace(setting, sharing=replace(setting.sharing, several_turns=several_turns(plan)))
        return replace(planned, plan=plan, lengths=index.lengths, setting=setting)


def _shortened(index: RowIndex, longest: int) -> RowIndex:
    """The rows cut to `longest` tokens; as many of them are trained as can be."""
    lengths = np.minimum(index.lengths, longest)
    return replace(index, lengths=lengths, supervised=np.minimum(index.supervised, lengths - 1))
