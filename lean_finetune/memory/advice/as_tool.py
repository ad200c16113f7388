"""The memory of a run as another tool does it: peaks by phase, and what each difference of its step costs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lean_finetune.config.rule import off_values
from lean_finetune.memory.advice.margins import MARGINS, Margin, State, judge_bytes
from lean_finetune.memory.advice.plan_memory import replay
from lean_finetune.memory.advice.run import Run
from lean_finetune.memory.predict.deep_events import StepEvents
from lean_finetune.memory.predict.first_step import FirstStep
from lean_finetune.memory.predict.process_memory import outside_of_blocks
from lean_finetune.memory.tool_step.litgpt_decoder import LITGPT_FAMILIES
from lean_finetune.memory.tool_step.pair_losses import PAIR_LOSSES
from lean_finetune.memory.tool_step.sharing import sharing_of, under_fsdp1
from lean_finetune.memory.tool_step.tool_step import LOSS_TEXT
from lean_finetune.memory.tool_step.tools import Keys, step_of
from lean_finetune.memory.tool_step.trace_tool import ToolRun, predict_tool, predict_tool_events
from lean_finetune.memory.trace.memory_trace import INPUTS, Peak

SHOWN_PART = 0.01
"""Causes below this share of the peak are left out."""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A difference of the tool's step from ours, and the bytes by which it alone raises the peak."""

    what: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class AsTool:
    """The prediction of a run as another tool does it."""

    run: ToolRun
    by_phase: Mapping[str, Peak]
    """loading, forward, backward, clip, optimizer."""
    state: State
    """The verdict, with the margin."""
    margin: Margin
    """The margin of other tools' steps, on one GPU or on several."""
    reserved_bytes: int | None
    """What the allocator reserves over two steps with fixed segments, which tools have; None if not known."""
    process_bytes: int | None
    """With the CUDA context and NCCL's buffers, without their margins."""

    @property
    def worst_phase(self) -> str:
        """The phase with the highest peak."""
        return max(self.by_phase, key=lambda phase: self.by_phase[phase].bytes)

    @property
    def peak(self) -> Peak:
        """The highest peak."""
        return self.by_phase[self.worst_phase]

    def dying_first_step(self, room_bytes: int) -> FirstStep | None:
        """The first optimizer step, if only its update does not fit; None for another run."""
        makes_state = self.run.train.optimizer == "adamw" and not self.run.train.optimizer_in_backward
        if not makes_state or self.by_phase["loading"].bytes > room_bytes or self.peak.bytes <= room_bytes:
            return None
        found = FirstStep.of_tool(_peaks(replace(self.run, optimizer_steps=1, micro_batches=1))[0])
        return found if found.dies_in_update(room_bytes) else None

    def causes(self) -> list[Cause]:
        """What the differences cost, the largest first; each is traced without it alone."""
        found = []
        for what, lean in _leaner(self.run):
            cost = self.peak.bytes - _peaks(lean)[1]
            if cost > SHOWN_PART * self.peak.bytes:
                found.append(Cause(what=what, bytes=cost))
        return sorted(found, key=lambda cause: -cause.bytes)

    def as_json(self) -> dict[str, Any]:
        """For `fit --json`. Sizes are in bytes."""
        return {
            "tool": self.run.step.tool,
            "verdict": self.state,
            "peak_bytes": self.peak.bytes,
            "reserved_bytes": self.reserved_bytes,
            "process_bytes": self.process_bytes,
            "worst_phase": self.worst_phase,
            "phases": {phase: peak.bytes for phase, peak in self.by_phase.items()},
            "causes": [vars(cause) for cause in self.causes()],
        }


def predict_as_tool(run: Run, tool: str, keys: Keys) -> AsTool | str:
    """Predict a run as a tool does it. `keys` are the values of its configuration. If that is not known, return why.

    Raises:
        UserError: the step cannot be traced.
    """
    train = run.setting.train
    if run.attached:
        return f"the training step of {tool} for {run.attached[0].rows_text} is not described here"
    step = step_of(tool, keys, train)
    if step is None:
        of_pairs = f" for objective {train.objective}" if train.goal.compares else ""
        return f"the training step of {tool}{of_pairs} is not described here"
    sharing = sharing_of(tool, keys, run.setting, step, run.config)
    if isinstance(sharing, str):
        return sharing
    if sharing is not None and train.goal.compares:
        return "preference tuning of other tools is traced on one GPU; use --gpus 1"
    if run.device.kind != "cuda":
        return "other tools' steps are traced for GPUs alone; name one with --gpu"
    if step.decoder == "litgpt" and run.config.model_type not in LITGPT_FAMILIES:
        return f"LitGPT's code of {run.config.model_type} is not described here"
    shape, alone = run.steps[-1][-1], off_values("offload", "offload_activations", "sharding")
    tool_run = ToolRun(
        step=step if sharing is None else under_fsdp1(step, train, sharing),
        config=run.config,
        train=train.model_copy(update=alone | ({"grad_ckpt": False} if step.decoder == "litgpt" else {})),
        target=run.target,
        rows=shape.rows,
        length=shape.length,
        micro_batches=2 if run.micro_batches_per_step > 1 else 1,
        sharing=sharing,
    )
    by_phase, events = predict_tool_events(tool_run)
    by_phase.pop(INPUTS, None)
    peak_bytes = max(peak.bytes for peak in by_phase.values())
    reserved_bytes = None if events is None else replayed_bytes(tool_run, events)
    outside = sum(figure.bytes for figure in outside_of_blocks(run.device, run.setting.gpus))
    headroom = run.params.estimate.headroom_percent
    margin = MARGINS["tool_one_gpu" if sharing is None else "tool_several_gpus"]
    state = judge_bytes(peak_bytes, run.device, "tensors", margin, headroom)
    return AsTool(
        run=tool_run,
        by_phase=by_phase,
        state=state,
        margin=margin,
        reserved_bytes=reserved_bytes,
        process_bytes=reserved_bytes and reserved_bytes + outside,
    )


def replayed_bytes(run: ToolRun, events: StepEvents) -> int:
    """What the allocator reserves over a tool's steps with fixed segments."""
    steps = ((run.shape,) * run.micro_batches,) * run.optimizer_steps
    return replay(events, steps, expandable=False, capacity_bytes=None).reserved_peak_bytes


def _peaks(run: ToolRun) -> tuple[dict[str, Peak], int]:
    """The peaks by phase, and the highest one in bytes."""
    found = predict_tool(run)
    found.pop(INPUTS, None)
    return found, max(peak.bytes for peak in found.values())


def _leaner(run: ToolRun) -> Iterator[tuple[str, ToolRun]]:
    """Each difference of the tool's step in words, and the run without this difference."""
    step = run.step

    def without(**changes: Any) -> ToolRun:
        return replace(run, step=replace(step, **changes))

    litgpt = step.decoder == "litgpt"
    if step.reference == "second model":
        yield "the reference, a second model", without(reference="none")
    if step.loss in PAIR_LOSSES:
        if step.loss != "pairs_in_tiles":
            yield LOSS_TEXT[step.loss], without(loss="pairs_in_tiles", outputs_in_fp32=False)
    elif step.loss not in ("liger", "cut_cross_entropy") and not litgpt:
        yield LOSS_TEXT[step.loss], without(loss="liger", outputs_in_fp32=False, logits_measured=False)
    if step.weights == "fp32":
        yield "base weights in fp32", without(weights="16 bits")
    if step.fp32_parts != "none":
        yield "frozen parts in fp32, and hidden states with them", without(fp32_parts="none")
    if step.foreach_update and run.train.optimizer == "adamw":
        yield "multi-tensor update of AdamW", without(foreach_update=False)
    if run.sharing is not None and run.sharing.kind == "ddp":
        yield "DDP's buckets, a copy of all gradients", replace(run, sharing=None)
    if step.old_4bit:
        yield "4-bit layers of bitsandbytes 0.42, which save their inputs", without(old_4bit=False)
    if step.stable_embedding:
        yield "a second embedding, and its gradient", without(stable_embedding=False)
    if not run.train.grad_ckpt:
        train = run.train.model_copy(update={"grad_ckpt": True})
        why = "which LitGPT does not recompute on one GPU" if litgpt else "because gradient checkpointing is off"
        yield f"activations of all layers, {why}", replace(run, train=train)
