"""A planned run: its inputs, its prediction by the worst micro-batches, and a replay of its plan in the allocator.

Advice predicts changed runs by the same code, so that the verdict accepts what it offers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from transformers import PretrainedConfig

from cuda_memory.gpus import Device
from lean_finetune.config.parallel_layout import ParallelLayout
from lean_finetune.config.schema import Params
from lean_finetune.core.atomic_files import read_json
from lean_finetune.core.errors import UserError
from lean_finetune.memory.advice.plan_memory import PlanMemory, replay_plan
from lean_finetune.memory.advice.verdict import judge
from lean_finetune.memory.advice.workload import Workload
from lean_finetune.memory.devices import attention_on, experts_on, precision_on, resolve_gpu
from lean_finetune.memory.predict.other_phases import stored_dtype
from lean_finetune.memory.predict.peak import Prediction
from lean_finetune.memory.predict.peak_explanation import Explanation, predict_explained
from lean_finetune.memory.predict.process_memory import host_shortage
from lean_finetune.memory.predict.setting import Setting
from lean_finetune.memory.predict.traced_shapes import longest_row, steps_in_flight, traced_steps
from lean_finetune.memory.trace.cuda_kernels import target_of
from lean_finetune.model import fused_kernels
from lean_finetune.model.allocator_settings import segments_from_environment
from lean_finetune.model.attention_choice import materializes_scores
from lean_finetune.model.empty_model import meta_model
from lean_finetune.model.files.quantized_checkpoint import format_text
from lean_finetune.model.language_part import left_out_text
from lean_finetune.model.model_config import attention_window, other_layers, read_config
from lean_finetune.model.row_limits import refuse_divided_rows, refuse_joined_rows, refuse_long_rows
from lean_finetune.pinning.locate import config_directory
from lean_finetune.plan.batch_plan import Plan, read_plan
from lean_finetune.plan.planner import PlanSettings
from lean_finetune.plan.row_index import read_index
from lean_finetune.step.activation_offload import refuse_offload
from lean_finetune.step.batches import refuse_other_tokens
from lean_finetune.step.offload.master_weights import refuse_offloaded_state
from lean_finetune.step.optimizer_in_backward import refuse_in_backward
from lean_finetune.step.token_rows import read_lengths


def accumulates_gradients(plan: Plan) -> bool:
    """Whether a GPU has more than one micro-batch in some step."""
    return bool((np.diff(plan.step_bounds) > plan.ranks).any())


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedRun:
    """A plan, and the training it is for."""

    plan: Plan
    """Micro-batches of all GPUs."""
    lengths: np.ndarray
    """Tokens of every training row."""
    config: PretrainedConfig
    setting: Setting
    device: Device
    windowed: bool
    """The model creates masks, or saves attention scores."""
    expandable: bool
    """train.expandable_segments."""
    stored: torch.dtype
    """Type of the weights in their files."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Why `gpu`, `precision` and `attention` were chosen; how `experts` run, and what is `not_loaded`."""

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return longest_row(self.plan, self.lengths)

    @property
    def own_plan(self) -> Plan:
        """The micro-batches of one GPU."""
        return self.plan.of_rank(0) if self.plan.ranks > 1 else self.plan

    def predict(self) -> tuple[Prediction, Explanation]:
        """Predict and explain the peak of the worst micro-batches."""
        tiled = self.device.kind == "cuda"
        chunked = bool(other_layers(self.config))
        kinds = {"tiled": tiled, "windowed": self.windowed, "chunked": chunked}
        if (stages := self.setting.pipeline_stages) > 1:
            steps = steps_in_flight(self.plan, self.lengths, stages, **kinds)
        else:
            steps = traced_steps(self.plan, self.lengths, **kinds)
        return predict_explained(self.config, self.setting, steps, target_of(self.device))

    def shortage(self, prediction: Prediction, there: int | None) -> str | None:
        """What hosts with RAM of `there` bytes lack; None if that suffices or is not known."""
        if self.device.kind != "cuda":
            return None
        tokens = int(self.own_plan.padded_tokens.max())
        return host_shortage(
            there,
            self.config,
            self.setting,
            self.stored,
            batch_tokens=tokens,
            offloaded_bytes=prediction.offloaded_bytes,
        )

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


def read_run(p: Params, plan_path: Path, index: Path, model_lock: Path) -> PlannedRun:
    """Read a planned run: the plan of stage bucket, the index of the training rows, the lock file of the base model.

    Raises:
        UserError: the device is unknown, or cannot run the setting; the files do not belong together.
    """
    device, device_reason = resolve_gpu(p.hardware.gpu)
    precision, precision_reason = precision_on(device, p.train.precision)
    plan, lengths = read_plan(plan_path), read_lengths(index)
    refuse_other_tokens(plan, lengths)
    config = read_config(config_directory(read_json(model_lock)))
    longest = longest_row(plan, lengths)
    refuse_long_rows(config, longest)
    refuse_divided_rows(config, ParallelLayout.from_params(p).context)
    if plan.flat:
        refuse_joined_rows(config, longest)
    fused_kernels.refuse_fused(p.train.fused_kernels, device.kind, config, enforce=p.estimate.enforce)
    refuse_offload(p.train.offload_activations, device.kind)
    refuse_offloaded_state(p.train.offload, p.train.offload_to, device.kind)
    setting = Setting.from_params(p, precision, accumulates_gradients=accumulates_gradients(plan))
    beyond_window = longest >= (attention_window(config) or math.inf)
    segments = segments_from_environment()
    of_model = {
        "fused_kernels": fused_kernels.memory_note(p.train.fused_kernels),
        "experts": experts_on(device, config, setting.train),
        "not_loaded": left_out_text(meta_model(config)),
        "weights": format_text(config),
    }
    planned = PlannedRun(
        plan=plan,
        lengths=lengths,
        config=config,
        setting=setting,
        device=device,
        windowed=materializes_scores(config, p.train.attention) or beyond_window,
        expandable=p.train.expandable_segments if segments is None else segments,
        stored=stored_dtype(config),
        reasons={
            "gpu": device_reason,
            "precision": precision_reason,
            "attention": attention_on(device, config, setting.train, masked=beyond_window and not plan.flat),
            **{name: text for name, text in of_model.items() if text is not None},
        },
    )
    if setting.train.optimizer_in_backward:
        refuse_in_backward(setting.train, np.diff(planned.own_plan.step_bounds))
    return planned


@dataclass(frozen=True, kw_only=True, eq=False)
class FitCheck:
    """Checks by the verdict's rule whether changed runs fit the device."""

    planned: PlannedRun
    """The unchanged run."""
    run: Workload
    """The same run as advice describes it."""
    plan_settings: PlanSettings
    """Settings of its plan."""
    index: Path
    """Of the training rows."""
    headroom_percent: float

    def __call__(self, changed: Workload) -> int | None:
        """The predicted peak of a changed run that fits; None if it does not."""
        try:
            trial = self.trial(changed)
            if trial.setting.train.optimizer_in_backward:
                refuse_in_backward(trial.setting.train, np.diff(trial.own_plan.step_bounds))
        except UserError:  # Rows that fit no micro-batch, or steps of several: a later stage would refuse the change.
            return None
        prediction, _ = trial.predict()
        device = trial.device
        shortage = trial.shortage(prediction, changed.host_ram_bytes)
        if prediction.peak.bytes > device.usable_bytes(self.headroom_percent) or shortage is not None:
            return None  # Skip the replay, which takes as long as the prediction.
        memory, _ = trial.replay(prediction)
        fits = judge(prediction, device, (), headroom_percent=self.headroom_percent, enforce=True, memory=memory).fits
        return prediction.peak.bytes if fits else None

    def trial(self, changed: Workload) -> PlannedRun:
        """The changed run, with a new plan if micro-batches or rows are smaller.

        Raises:
            UserError: a row does not fit in a micro-batch.
        """
        setting, planned = changed.setting, self.planned
        if changed.steps is self.run.steps and setting.context == planned.setting.context:
            return replace(planned, setting=setting)
        index = read_index(self.index, self.plan_settings.weights)
        if changed.longest < self.run.longest:
            lengths = np.minimum(index.lengths, changed.longest)
            # As many supervised tokens as possible remain.
            index = replace(index, lengths=lengths, supervised=np.minimum(index.supervised, lengths - 1))
        refuse_divided_rows(planned.config, setting.context)
        settings = self.plan_settings
        micro_batches = replace(
            settings.micro_batches,
            mode=changed.mode,
            max_tokens=changed.max_tokens,
            fixed_rows=changed.fixed_rows,
            pad_multiple=math.lcm(settings.micro_batches.pad_multiple, setting.context),
            ranks=1 if setting.sharing is None else setting.sharing.layout.data,
        )
        settings = replace(settings, micro_batches=micro_batches, tokens_per_step=changed.unpadded_tokens_per_step)
        plan = settings.plan(index)
        if setting.sharing is not None:
            sharing = replace(setting.sharing, accumulates_gradients=accumulates_gradients(plan))
            setting = replace(setting, sharing=sharing)
        return replace(planned, plan=plan, lengths=index.lengths, setting=setting)
