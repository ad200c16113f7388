"""A run whose memory is predicted. `full_rows` makes one with full rows, `planned_run` reads one from its plan."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from transformers import PretrainedConfig

from cuda_memory.gpus import GIGA, Device
from cuda_memory.units import GIB, MIB, readable_size
from lean_finetune.config.schema import Bucket, Params
from lean_finetune.memory.advice.margins import Margin, margin_of
from lean_finetune.memory.advice.plan_memory import PlanMemory, replay_plan
from lean_finetune.memory.devices import (
    attention_on,
    experts_on,
    linear_attention_on,
    precision_on,
)
from lean_finetune.memory.predict.assumed_rows import TEXT_ROW, FullRow
from lean_finetune.memory.predict.explanation import Explanation, predict_explained
from lean_finetune.memory.predict.other_phases import load_and_save
from lean_finetune.memory.predict.peak import Prediction, predict
from lean_finetune.memory.predict.process_memory import disk_state_bytes, host_shortage, host_state_bytes
from lean_finetune.memory.predict.traced_step import TracedModel, TracedSteps
from lean_finetune.memory.trace.cuda_kernels import Target, target_of
from lean_finetune.memory.trace.fake_batches import TEXT_ALONE, FakeBatches
from lean_finetune.memory.trace.setting import Setting
from lean_finetune.model.allocator_settings import segments_from_environment
from lean_finetune.model.beside.whole_config import masks_rows
from lean_finetune.model.model_config import attention_window, refuse_context_parallel
from lean_finetune.model.precision import resolved
from lean_finetune.plan.planned_rows import PlannedRows
from lean_finetune.rows.attachment import Attachment, measures_of


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """What is trained, on which device, and how a step is split into micro-batches.

    Advice varies `setting`, `bucket` and the sizes that follow from them; `params` stay those of the user.
    """

    params: Params
    device: Device
    config: PretrainedConfig
    setting: Setting
    stored: torch.dtype
    """Type of the weights in the model's files."""
    bucket: Bucket
    steps: TracedSteps
    """The micro-batches that set the peak."""
    longest: int
    """Padded tokens of the longest row."""
    tokens_per_step: float
    """Mean tokens per step with padding, on one GPU."""
    micro_batches_per_step: float
    """On one GPU."""
    planned: PlannedRows | None = None
    """None if every micro-batch is full of the longest rows."""
    nodes: int = 1
    """run.nodes where a figure may depend on it: no stage tracks that parameter."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Why `gpu` and `precision` were chosen."""
    fakes: FakeBatches = TEXT_ALONE
    """Makes the micro-batches of traces."""
    full_row: FullRow = TEXT_ROW
    """What each row carries, if every micro-batch is full of the same rows."""

    @cached_property
    def target(self) -> Target:
        """The rules of the device."""
        return target_of(self.device)

    @property
    def model(self) -> TracedModel:
        """What is traced."""
        return TracedModel(self.config, self.setting, self.target, self.fakes)

    @property
    def usable_bytes(self) -> int:
        """Memory of the device for tensors."""
        return self.device.usable_bytes(self.params.estimate.headroom_percent)

    @property
    def margin(self) -> Margin | None:
        """How much more than predicted the run may need; None if the headroom covers that."""
        return margin_of(self.setting, self.device)

    @property
    def fitting_bytes(self) -> int:
        """The largest predicted peak with which the run fits."""
        return self.usable_bytes if self.margin is None else self.margin.most_bytes(self.usable_bytes)

    @property
    def limit_text(self) -> str | None:
        """What decides instead of the usable memory; None without a margin."""
        if self.margin is None:
            return None
        limit, usable = readable_size(self.fitting_bytes), readable_size(self.usable_bytes)
        return f"{limit}: the {usable} usable leave room for {self.margin.text}"

    @property
    def host_ram_bytes(self) -> int | None:
        """hardware.host_ram_gib in bytes."""
        gib = self.params.hardware.host_ram_gib
        return None if gib is None else int(gib * GIB)

    @property
    def disk_bytes_per_second(self) -> float:
        """hardware.disk_gb_per_second in bytes."""
        return self.params.hardware.disk_gb_per_second * GIGA

    @property
    def in_flight(self) -> int:
        """Most micro-batches between forward and backward at the same time."""
        return min(self.setting.layout.pipeline, math.ceil(self.micro_batches_per_step))

    @property
    def attached(self) -> tuple[Attachment, ...]:
        """What the rows carry besides tokens."""
        planned = () if self.planned is None else self.planned.plan.attached
        return self.full_row.attached or planned

    @property
    def most(self) -> dict[str, int]:
        """`Plan.most`."""
        if self.planned is not None:
            return self.planned.plan.most
        rows = max(shape.rows for step in self.steps for shape in step)
        return {measure.limit: rows * int(measure.values.max()) for measure in measures_of(self.attached)}

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest micro-batch."""
        if self.planned is not None:
            return int(self.planned.own_plan.padded_tokens.max())
        return max(shape.rows * shape.length for step in self.steps for shape in step)

    @property
    def beyond_window(self) -> bool:
        """Whether rows are longer than the window of windowed layers, or have masks of their own."""
        return self.longest >= (attention_window(self.config) or math.inf) or masks_rows(self.config)

    @property
    def attention(self) -> str:
        """Attention kernels on the device."""
        masked = self.beyond_window and self.bucket.mode != "packed"
        return attention_on(self.device, self.config, self.setting.train, masked=masked)

    @property
    def experts(self) -> str | None:
        """How the device multiplies rows by their experts; None without experts."""
        return experts_on(self.device, self.config, self.setting.train)

    @property
    def linear_attention(self) -> str | None:
        """What computes linear attention and state-space layers; None without any."""
        return linear_attention_on(self.device, self.config, self.setting.train)

    @property
    def expandable(self) -> bool:
        """Whether the allocator's segments expand."""
        segments = segments_from_environment()
        return self.params.train.expandable_segments if segments is None else segments

    def predict(self) -> Prediction:
        """Peaks by phase. Takes several seconds.

        Raises:
            UserError: GPUs cannot share the model's attention in this way.
        """
        refuse_context_parallel(self.config, self.setting.layout.context)
        return predict(self.model, self.steps)

    def explain(self) -> tuple[Prediction, Explanation]:
        """`predict`, with what the peak consists of."""
        return predict_explained(self.model, self.steps)

    def load_bytes(self, prediction: Prediction) -> int:
        """Peak of loading the weights on the device."""
        update = prediction.by_phase["optimizer"]
        return load_and_save(self.model, self.stored, update)[0].bytes

    def host_bytes(self, prediction: Prediction) -> Iterator[tuple[str, str, int]]:
        """What the run stores outside of the device: (what, where, bytes)."""
        if prediction.offloaded_bytes:
            where = {"cpu": "in host memory", "disk": "on disk"}[self.setting.train.offload_activations]
            yield "activations", where, prediction.offloaded_bytes
        if optimizer_bytes := host_state_bytes(self.config, self.setting):
            away = self.setting.train.offload == "parameters"
            yield "weights" if away else "optimizer", "in host memory", optimizer_bytes
        if disk_bytes := disk_state_bytes(self.config, self.setting):
            yield "optimizer", "on disk", disk_bytes

    def shortage(self, offloaded_bytes: int) -> str | None:
        """What the host lacks beside `offloaded_bytes` of activations; None if it suffices or is not known."""
        if self.device.kind != "cuda":
            return None
        return host_shortage(
            self.host_ram_bytes,
            self.config,
            self.setting,
            self.stored,
            batch_tokens=self.most_tokens,
            offloaded_bytes=offloaded_bytes,
            nodes=self.nodes,
        )

    def replay(self, prediction: Prediction) -> tuple[PlanMemory | None, str | None]:
        """Predict what the plan reserves on a GPU, and say how much of it was replayed; a CPU reserves nothing."""
        if self.device.kind != "cuda" or self.planned is None:
            return None, None
        return replay_plan(
            self.planned.own_plan,
            self.planned.lengths,
            self.model,
            prediction,
            expandable=self.expandable,
            device=self.device,
        )


def setting_on(device: Device, p: Params, *, accumulates_gradients: bool) -> tuple[Setting, str]:
    """The setting of a run, with the precision that train.precision means on the device; and why."""
    precision, reason = precision_on(device, p.train.precision)
    setting = Setting(
        train=resolved(p, precision),
        gpus=p.hardware.num_gpus,
        offload_buffer_bytes=p.run.offload_buffer_mib * MIB,
        accumulates_gradients=accumulates_gradients,
    )
    return setting, reason
