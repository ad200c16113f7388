"""A run whose memory is predicted. `fit` makes one with full rows, stage estimate reads one from its plan."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig

from cuda_memory.gpus import GIGA, Device
from cuda_memory.units import GIB, MIB, readable_size
from lean_finetune.config.declared_params import declared_part
from lean_finetune.config.schema import Bucket, Params
from lean_finetune.islands.attachments import read_attached
from lean_finetune.memory.advice.margins import Margin, margin_of
from lean_finetune.memory.advice.plan_memory import PlanMemory, replay_plan
from lean_finetune.memory.devices import (
    attention_on,
    experts_on,
    linear_attention_on,
    precision_on,
    resolve_gpu,
)
from lean_finetune.memory.predict.assumed_rows import TEXT_ROW, FullRow
from lean_finetune.memory.predict.other_phases import load_and_save, stored_dtype
from lean_finetune.memory.predict.peak import Explanation, Prediction, predict, predict_explained
from lean_finetune.memory.predict.process_memory import disk_state_bytes, host_shortage, host_state_bytes
from lean_finetune.memory.predict.traced_step import TracedModel, TracedSteps, steps_in_flight, traced_steps
from lean_finetune.memory.trace.cuda_kernels import Target, target_of
from lean_finetune.memory.trace.fake_batches import TEXT_ALONE, FakeBatches
from lean_finetune.memory.trace.known_images import fakes_of
from lean_finetune.memory.trace.setting import Setting
from lean_finetune.model import fused_kernels
from lean_finetune.model.adapters import layers_without_adapters
from lean_finetune.model.allocator_settings import environment_notes, segments_from_environment
from lean_finetune.model.attention_choice import materializes_scores
from lean_finetune.model.beside.whole_config import masks_rows
from lean_finetune.model.empty_model import left_out_text, meta_model
from lean_finetune.model.joined_adapters.join import apart_note
from lean_finetune.model.model_config import attention_window, chunk_tokens, refuse_context_parallel
from lean_finetune.model.precision import resolved
from lean_finetune.plan.batch_plan import Plan, longest_row, read_plan, refuse_other_objective
from lean_finetune.plan.micro_batches import limits_of
from lean_finetune.plan.optimizer_steps import RowIndex, read_index
from lean_finetune.plan.planner import PlanSettings
from lean_finetune.plan.row_checks import refuse_other_tokens
from lean_finetune.plan.step_tokens import planned_step_tokens
from lean_finetune.rows.attachment import Attachment, measures_of
from lean_finetune.run.assets import Assets
from lean_finetune.step.token_rows import read_lengths
from lean_finetune.step.unsupported import refuse_unsupported

CPU_KERNELS = (
    "on a CPU in 16 bits the process takes up to 1 GiB for kernels of new batch shapes, beside the predicted tensors "
    "(docs/out-of-memory.md)"
)


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedRows:
    """The rows of a run, and the plan of their micro-batches."""

    plan: Plan
    """Micro-batches of all GPUs."""
    lengths: np.ndarray
    """Tokens of every training row."""
    index: Path | RowIndex
    """Of the training rows; its file, which advice reads where it plans anew."""
    settings: PlanSettings
    """Settings of the plan."""

    @property
    def own_plan(self) -> Plan:
        """The micro-batches of one GPU."""
        return self.plan.of_rank(0) if self.plan.ranks > 1 else self.plan

    @property
    def accumulates_gradients(self) -> bool:
        """Whether a GPU has more than one micro-batch in some step."""
        return bool((np.diff(self.plan.step_bounds) > self.plan.ranks).any())


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
    def _beyond_window(self) -> bool:
        """Whether rows are longer than the window of windowed layers, or have masks of their own."""
        return self.longest >= (attention_window(self.config) or math.inf) or masks_rows(self.config)

    @property
    def attention(self) -> str:
        """Attention kernels on the device."""
        masked = self._beyond_window and self.bucket.mode != "packed"
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
    def not_loaded(self) -> str | None:
        """Parts of a multimodal model that are neither loaded nor counted; None without any."""
        return left_out_text(meta_model(self.config))

    @property
    def expandable(self) -> bool:
        """Whether the allocator's segments expand."""
        segments = segments_from_environment()
        return self.params.train.expandable_segments if segments is None else segments

    def notes(self) -> list[str]:
        """Settings of the environment that differ from those predicted, kernels that are not traced, code of peft."""
        train = self.params.train
        kernels = CPU_KERNELS if self.device.kind == "cpu" and self.setting.train.precision != "fp32" else None
        notes = environment_notes(train.expandable_segments) if self.device.kind == "cuda" else ()
        return [*notes, *filter(None, [kernels, fused_kernels.memory_note(train.fused_kernels), apart_note(train)])]

    def layers_note(self) -> str | None:
        """Layers that `all-linear` leaves out; None without any."""
        names = layers_without_adapters(meta_model(self.config), self.setting.train)
        left_out = f"all-linear leaves out {', '.join(names)}: no effect, or named like experts (docs/models.md)"
        return left_out if names else None

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

    def with_plan(self, planned: PlannedRows) -> "Run":
        """The run with another plan, and with the sizes that follow from it.

        Raises:
            UserError: rows or steps do not suit the model or a switch.
        """
        attached = tuple(one.trained_by(self.setting.train) for one in planned.plan.attached)
        planned = replace(planned, plan=replace(planned.plan, attached=attached))
        plan, lengths = planned.own_plan, planned.lengths
        setting = replace(self.setting, accumulates_gradients=planned.accumulates_gradients)
        longest, count = longest_row(planned.plan, lengths), len(plan.steps)
        refuse_unsupported(
            setting.train,
            self.config,
            device_type=self.device.kind,
            longest=longest,
            packed=planned.plan.flat,
            micro_batches=np.diff(plan.step_bounds),
            enforce=self.params.estimate.enforce,
        )
        run = replace(
            self,
            planned=planned,
            setting=setting,
            longest=longest,
            tokens_per_step=float(plan.padded_tokens.sum()) / count / setting.layout.context,
            micro_batches_per_step=len(plan) / count,
        )
        return replace(run, steps=run._planned_steps(planned))

    def _planned_steps(self, planned: PlannedRows) -> TracedSteps:
        """The micro-batches of a plan that can set the peak."""
        kinds: dict[str, Any] = {
            "tiled": self.device.kind == "cuda",
            "windowed": materializes_scores(self.config, self.setting.train.attention) or self._beyond_window,
            "chunk": chunk_tokens(self.config),
        }
        if (stages := self.setting.layout.pipeline) > 1:
            return steps_in_flight(planned.plan, planned.lengths, stages, **kinds)
        return traced_steps(planned.plan, planned.lengths, **kinds)

    def replanned(self, changed: "Run") -> "Run":
        """The changed run of advice with the plan that stage bucket would make for it.

        Raises:
            UserError: a row does not fit in a micro-batch, or steps do not suit a switch.
        """
        assert self.planned is not None
        setting, settings = changed.setting, self.planned.settings
        if _plan_key(changed) == _plan_key(self):
            return replace(self, setting=setting).with_plan(self.planned)
        index = self.planned.index
        if isinstance(index, Path):
            index = read_index(index, settings.weights)
        if changed.longest < self.longest:
            index = index.shortened(changed.longest)
        layout = setting.layout
        refuse_context_parallel(self.config, layout.context)
        micro_batches = replace(
            settings.micro_batches,
            mode=changed.bucket.mode,
            max_tokens=changed.bucket.max_tokens,
            fixed_rows=changed.bucket.fixed_rows,
            limits=limits_of(changed.bucket),
            pad_multiple=math.lcm(settings.micro_batches.pad_multiple, layout.context),
            ranks=layout.data,
        )
        settings = replace(settings, micro_batches=micro_batches, tokens_per_step=setting.train.step_tokens)
        planned = replace(self.planned, plan=settings.plan(index), lengths=index.lengths, settings=settings)
        return replace(self, setting=setting, bucket=changed.bucket).with_plan(planned)


def _plan_key(run: Run) -> tuple[object, ...]:
    """What decides the rows of a GPU's micro-batches."""
    return run.bucket, run.longest, run.setting.train.step_tokens, run.setting.layout


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


def read_run(p: Params, plan_path: Path, index: Path, assets: Assets) -> Run:
    """Read a planned run: the plan of stage bucket, the index of the training rows.

    Raises:
        UserError: the device is unknown, or cannot run the setting; the files do not belong together.
    """
    # As in train: CPU kernels have buffers per thread.
    torch.set_num_threads(p.run.cpu_threads or torch.get_num_threads())
    device, device_reason = resolve_gpu(p.hardware.gpu)
    plan, lengths, attached = read_plan(plan_path), read_lengths(index), read_attached(index)
    refuse_other_tokens(plan, lengths)
    refuse_other_objective(plan, p.train.row_kind)
    plan = replace(plan, attached=attached)
    step_tokens = planned_step_tokens(plan_path, p.train)
    settings = PlanSettings.from_params(p, step_tokens)
    planned = PlannedRows(plan=plan, lengths=lengths, index=index, settings=settings)
    setting, precision_reason = setting_on(device, p, accumulates_gradients=planned.accumulates_gradients)
    setting = replace(setting, train=assets.with_token_ids(setting.train)).with_train(tokens_per_step=step_tokens)
    config = assets.config_to_predict(setting.train, attached)
    assets.refuse_other_adapter(setting.train, config)
    declared_part(p.hardware)  # Counts as read on every device; on a GPU the host's RAM and disk matter too.
    run = Run(
        params=p,
        device=device,
        config=config,
        setting=setting,
        stored=stored_dtype(config),
        bucket=declared_part(p.bucket),
        steps=(),
        longest=0,
        tokens_per_step=0.0,
        micro_batches_per_step=0.0,
        reasons={"gpu": device_reason, "precision": precision_reason},
        fakes=fakes_of(attached, assets.directory, config),
    )
    return run.with_plan(planned)
