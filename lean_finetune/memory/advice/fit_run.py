"""Whether a run fits a GPU, from a config.json alone: what the command `lean-finetune fit` answers."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from cuda_memory.gpus import GIGA, Device
from cuda_memory.units import round_up
from lean_finetune.config.field_types import Precision
from lean_finetune.config.overrides import with_flags
from lean_finetune.config.parallel_layout import ParallelLayout
from lean_finetune.config.schema import Params
from lean_finetune.core.errors import UserError
from lean_finetune.memory.advice.largest_that_fits import Limits, find_limits
from lean_finetune.memory.advice.search_space import Candidate
from lean_finetune.memory.advice.step_cost import step_seconds, tokens_per_second
from lean_finetune.memory.advice.verdict import Answer, Verdict, answer, judge
from lean_finetune.memory.advice.workload import Workload, full_batch, host_ram_bytes, largest_steps
from lean_finetune.memory.devices import attention_on, experts_on, precision_on, resolve_gpu
from lean_finetune.memory.predict.offloaded_states import disk_state_bytes, host_state_bytes
from lean_finetune.memory.predict.other_phases import load_and_save, stored_dtype
from lean_finetune.memory.predict.peak import Prediction, predict
from lean_finetune.memory.predict.process_memory import host_shortage
from lean_finetune.memory.predict.setting import Setting
from lean_finetune.memory.predict.state_formulas import model_shapes
from lean_finetune.memory.trace.cuda_kernels import target_of
from lean_finetune.model import fused_kernels
from lean_finetune.model.adapter_targets import layers_without_adapters
from lean_finetune.model.allocator_settings import environment_notes
from lean_finetune.model.empty_model import meta_model
from lean_finetune.model.language_part import left_out_text
from lean_finetune.model.model_config import attention_window, max_positions, read_config
from lean_finetune.model.row_limits import refuse_divided_rows, refuse_joined_rows, refuse_long_rows
from lean_finetune.pinning.locate import find_model
from lean_finetune.plan.planner import pad_multiple
from lean_finetune.step.activation_offload import refuse_offload
from lean_finetune.step.offload.master_weights import refuse_offloaded_state
from lean_finetune.step.optimizer_in_backward import refuse_in_backward


@dataclass(frozen=True, kw_only=True)
class FitRun:
    """A run with every micro-batch full of rows of data.max_length, all of their tokens trained, on a device."""

    params: Params
    model: str
    """As the user named it."""
    device: Device
    device_reason: str
    workload: Workload
    stored: torch.dtype
    """Type of the weights in the model's files."""

    @property
    def config(self) -> PretrainedConfig:
        """The model's config."""
        return self.workload.config

    @property
    def usable_bytes(self) -> int:
        """Memory for tensors on the device."""
        return self.device.usable_bytes(self.params.estimate.headroom_percent)

    @property
    def attention(self) -> str:
        """Attention kernels on the device."""
        beyond_window = self.workload.longest >= (attention_window(self.config) or math.inf)
        masked = beyond_window and self.params.bucket.mode != "packed"
        return attention_on(self.device, self.config, self.workload.setting.train, masked=masked)

    @property
    def experts(self) -> str | None:
        """How the device multiplies rows by their experts; None without experts."""
        return experts_on(self.device, self.config, self.workload.setting.train)

    @property
    def not_loaded(self) -> str | None:
        """Parts of a multimodal model that are neither loaded nor counted; None without any."""
        return left_out_text(meta_model(self.config))

    @property
    def tokens_per_second(self) -> tuple[float, float] | None:
        """Lowest and highest speed of one GPU by its data sheet; None if it is not known."""
        return tokens_per_second(self.workload, self.device)

    @property
    def step_seconds(self) -> Mapping[str, float] | None:
        """Seconds of each part of a step on one GPU by its data sheet; None if its speed is not known."""
        if self.device.speed is None:
            return None
        shapes = model_shapes(self.config, self.workload.setting.tensor_parallel)
        return step_seconds(self.workload, shapes, self.device.speed)

    def notes(self) -> list[str]:
        """Settings of the environment that differ from those predicted, and layers without adapters."""
        notes = list(environment_notes(self.params.train.expandable_segments)) if self.device.kind == "cuda" else []
        if names := layers_without_adapters(meta_model(self.config), self.workload.setting.train):
            notes.append(f"all-linear leaves out {', '.join(names)}: no effect, or named like experts (docs/models.md)")
        if of_kernels := fused_kernels.memory_note(self.params.train.fused_kernels):
            notes.append(of_kernels)
        return notes

    def predict(self) -> Prediction:
        """Peaks by phase. Takes several seconds."""
        return predict(self.config, self.workload.setting, self.workload.steps, target_of(self.device))

    def load_bytes(self, prediction: Prediction) -> int:
        """Peak of loading the weights on the device."""
        setting, target, update = self.workload.setting, target_of(self.device), prediction.by_phase["optimizer"]
        return load_and_save(self.config, setting, self.stored, target, update)[0].bytes

    def host_bytes(self, prediction: Prediction) -> Iterator[tuple[str, str, int]]:
        """What the run stores outside of the device: (what, where, bytes)."""
        if prediction.offloaded_bytes:
            where = {"cpu": "in host memory", "disk": "on disk"}[self.params.train.offload_activations]
            yield "activations", where, prediction.offloaded_bytes
        if optimizer_bytes := host_state_bytes(self.config, self.workload.setting):
            away = self.params.train.offload == "parameters"
            yield "weights" if away else "optimizer", "in host memory", optimizer_bytes
        if disk_bytes := disk_state_bytes(self.config, self.workload.setting):
            yield "optimizer", "on disk", disk_bytes

    def judge(self, prediction: Prediction) -> Verdict:
        """Whether it fits, without a search for what would."""
        return judge(
            prediction,
            self.device,
            (),
            headroom_percent=self.params.estimate.headroom_percent,
            enforce=self.params.estimate.enforce,
            shortage=self.shortage(prediction),
        )

    def shortage(self, prediction: Prediction) -> str | None:
        """What the host lacks; None if it suffices or is not known."""
        return self._shortage(self.workload, prediction.offloaded_bytes)

    def _shortage(self, run: Workload, offloaded_bytes: int) -> str | None:
        if self.device.kind != "cuda":
            return None
        tokens = max(shape.rows * shape.length for step in run.steps for shape in step)
        return host_shortage(
            run.host_ram_bytes,
            run.config,
            run.setting,
            self.stored,
            batch_tokens=tokens,
            offloaded_bytes=offloaded_bytes,
            nodes=run.nodes,
        )

    def search(self, prediction: Prediction) -> Answer:
        """Settings with which the run fits. Takes up to a minute."""
        shortage = self.shortage(prediction)
        return answer(
            self.workload, prediction, self.device, self.params, confirm=self._confirmed_peak, shortage=shortage
        )

    def limits(self, prediction: Prediction) -> Limits:
        """The smallest GPU for the run, and the longest row and the largest micro-batch that fit."""
        return find_limits(
            self.workload,
            self.device,
            peak_bytes=prediction.peak.bytes,
            headroom_percent=self.params.estimate.headroom_percent,
            positions=max_positions(self.config),
        )

    def _confirmed_peak(self, candidate: Candidate, peak_bytes: int) -> int | None:
        """The peak that `fit` reports for a candidate's overrides; None if they do not fit or are refused.

        `peak_bytes` is the peak of the candidate's own micro-batches, which are mostly the same.
        """
        try:
            run = _checked_workload(with_flags(self.params, candidate.flags), self.device, candidate.run.config)
            offloaded_bytes = 0
            same = (run.setting, run.steps) == (candidate.run.setting, candidate.run.steps)
            if not same or (run.host_ram_bytes and run.setting.train.offload_activations != "none"):
                prediction = predict(run.config, run.setting, run.steps, target_of(self.device))
                peak_bytes, offloaded_bytes = prediction.peak.bytes, prediction.offloaded_bytes
        except UserError:
            return None
        fits = peak_bytes <= self.usable_bytes and not self._shortage(run, offloaded_bytes)
        return peak_bytes if fits else None


def fit_run(p: Params, *, shorten: bool = False) -> FitRun:
    """The run of some parameters, checked against its device. Of a hub model, only config.json is downloaded.

    `shorten` lowers data.max_length to the positions of the model.

    Raises:
        UserError: the device, the model or a parameter does not work.
    """
    torch.set_num_threads(p.run.cpu_threads or torch.get_num_threads())
    device, reason = resolve_gpu(p.hardware.gpu)
    refuse_offload(p.train.offload_activations, device.kind)
    refuse_offloaded_state(p.train.offload, p.train.offload_to, device.kind)
    config = read_config(find_model(p.model.name, p.model.revision))
    fused_kernels.refuse_fused(p.train.fused_kernels, device.kind, config, enforce=p.estimate.enforce)
    positions, stored = max_positions(config), stored_dtype(config)
    if shorten and positions and positions < p.data.max_length:
        p = with_flags(p, [f"data.max_length={positions}"])
    return FitRun(
        params=p,
        model=p.model.name,
        device=device,
        device_reason=reason,
        workload=_checked_workload(p, device, config),
        stored=stored,
    )


def _checked_workload(p: Params, device: Device, config: PretrainedConfig) -> Workload:
    """The workload of a run; refuses what its steps do not support."""
    run = workload_of(p, config, precision_on(device, p.train.precision)[0])
    if p.train.optimizer_in_backward:
        refuse_in_backward(run.setting.train, [math.ceil(run.micro_batches_per_step)])
    return run


def workload_of(p: Params, config: PretrainedConfig, precision: Precision) -> Workload:
    """The run of params.yaml with every micro-batch full of rows of data.max_length.

    Raises:
        UserError: rows are too long for the model, or it does not support packed rows.
    """
    length, layout = round_up(p.data.max_length, pad_multiple(p)), ParallelLayout.from_params(p)
    refuse_long_rows(config, length)
    refuse_divided_rows(config, layout.context)
    if p.bucket.mode == "packed":
        refuse_joined_rows(config, length)
    shape = full_batch(p.bucket.mode, length, max_tokens=p.bucket.max_tokens, fixed_rows=p.bucket.fixed_rows)
    tokens = shape.rows * shape.length
    micro_batches = max(1, math.ceil(p.train.tokens_per_step / tokens / layout.data))
    return Workload(
        config=config,
        setting=Setting.from_params(p, precision, accumulates_gradients=micro_batches > 1),
        steps=largest_steps(shape, several=micro_batches > 1, in_flight=min(layout.pipeline, micro_batches)),
        mode=p.bucket.mode,
        max_tokens=p.bucket.max_tokens,
        fixed_rows=p.bucket.fixed_rows,
        longest=length,
        tokens_per_step=max(p.train.tokens_per_step / layout.data, length) / layout.context,
        micro_batches_per_step=micro_batches,
        unpadded_tokens_per_step=p.train.tokens_per_step,
        disk_bytes_per_second=p.hardware.disk_gb_per_second * GIGA,
        host_ram_bytes=host_ram_bytes(p),
        nodes=p.run.nodes,
    )
