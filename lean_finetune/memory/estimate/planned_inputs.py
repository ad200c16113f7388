"""Read the inputs of stage estimate, and refuse what the device or the model cannot do."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PretrainedConfig

from lean_finetune.config.field_types import Precision
from lean_finetune.config.schema import Params
from lean_finetune.core.atomic_files import read_json
from lean_finetune.memory.advice.workload import Workload
from lean_finetune.memory.devices import attention_on, precision_on, resolve_gpu
from lean_finetune.memory.estimate.planned_run import PlannedRun, accumulates_gradients
from lean_finetune.memory.predict.other_phases import OtherPhases, generation_shapes, heldout_shape, stored_dtype
from lean_finetune.memory.predict.peak import Prediction
from lean_finetune.memory.predict.setting import Setting
from lean_finetune.memory.predict.traced_shapes import longest_row
from lean_finetune.model.allocator_settings import segments_from_environment
from lean_finetune.model.attention import materializes_scores
from lean_finetune.model.model_config import attention_window, read_config, refuse_joined_rows, refuse_long_rows
from lean_finetune.pinning.locate import config_directory
from lean_finetune.plan.batch_plan import read_plan
from lean_finetune.step.activation_offload import refuse_offload
from lean_finetune.step.batches import refuse_other_tokens
from lean_finetune.step.evaluation_limits import EvaluationLimits
from lean_finetune.step.host_transfer import refuse_offloaded_state
from lean_finetune.step.optimizer_in_backward import refuse_in_backward
from lean_finetune.step.token_rows import read_lengths


@dataclass(frozen=True, kw_only=True, eq=False)
class EstimateInputs:
    """A run to be predicted, and how its parameters were resolved."""

    planned: PlannedRun
    device_reason: str
    """Why this device was chosen."""
    precision: Precision
    precision_reason: str
    stored: torch.dtype
    """Type of the weights in their files."""
    longest: int
    """Tokens of the longest row."""
    attention: str
    """The attention kernels, and why."""

    @property
    def config(self) -> PretrainedConfig:
        """The model's config."""
        return self.planned.config

    @property
    def setting(self) -> Setting:
        """How the model is trained."""
        return self.planned.setting

    def workload(self, p: Params, prediction: Prediction) -> Workload:
        """The run as advice describes it."""
        plan = self.planned.own_plan
        steps = len(plan.steps)
        return Workload(
            config=self.config,
            setting=self.setting,
            steps=prediction.steps_of_peak,
            mode=p.bucket.mode,
            max_tokens=p.bucket.max_tokens,
            fixed_rows=p.bucket.fixed_rows,
            longest=self.longest,
            tokens_per_step=float(plan.padded_tokens.sum()) / steps,
            micro_batches_per_step=len(plan) / steps,
            unpadded_tokens_per_step=p.train.tokens_per_step,
        )

    def other_phases(self, p: Params) -> OtherPhases:
        """What memory outside of the training step depends on."""
        plan, limits = self.planned.own_plan, EvaluationLimits.from_params(p)
        return OtherPhases(
            stored_dtype=self.stored,
            in_training=heldout_shape(int(plan.padded_tokens[plan.step == 0].max()), self.longest),
            evaluation=heldout_shape(limits.max_tokens, self.longest),
            logits_chunk=limits.logits_chunk,
            generation=generation_shapes(
                limits,
                prompts=p.evaluate.generate_rows,
                longest=self.longest,
                positions=getattr(self.config.get_text_config(), "max_position_embeddings", None),
            ),
            merged=p.evaluate.merged,
        )


def read_run(p: Params, plan_path: Path, index: Path, model_lock: Path) -> EstimateInputs:
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
    if plan.flat:
        refuse_joined_rows(config, longest)
    refuse_offload(p.train.offload_activations, device.kind)
    refuse_offloaded_state(p.train.offload, device.kind)
    setting = Setting.from_params(p, precision, accumulates_gradients=accumulates_gradients(plan))
    beyond_window = longest >= (attention_window(config) or math.inf)
    segments = segments_from_environment()
    planned = PlannedRun(
        plan=plan,
        lengths=lengths,
        config=config,
        setting=setting,
        device=device,
        windowed=materializes_scores(config, p.train.attention) or beyond_window,
        expandable=p.train.expandable_segments if segments is None else segments,
    )
    if setting.optimizer_in_backward:
        refuse_in_backward(setting.model, np.diff(planned.own_plan.step_bounds))
    return EstimateInputs(
        planned=planned,
        device_reason=device_reason,
        precision=precision,
        precision_reason=precision_reason,
        stored=stored_dtype(config),
        longest=longest,
        attention=attention_on(device, config, setting.model, masked=beyond_window and not plan.flat),
    )
