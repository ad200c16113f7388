"""Builds a model of random weights on a device and runs real steps under its allocator's own count."""

import gc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers import initialization as init
from transformers.integrations import replace_with_bnb_linear
from transformers.quantizers.base import get_keys_to_not_convert

from benchmarks.gpu.cases import LAYOUTS, MODELS, GpuCase
from lean_finetune.memory.predict.peak import Setting, optim_of
from lean_finetune.model.adapters import add_adapters
from lean_finetune.model.attention import JoinedRows, training_attention
from lean_finetune.model.checkpointing import enable_checkpointing
from lean_finetune.model.model_spec import ModelSpec
from lean_finetune.model.quantize import keep_trainable_on_cpu, quantisation
from lean_finetune.step.activation_offload import Offload, make_offload
from lean_finetune.step.batches import IGNORED, Batch, BatchShape, join_rows
from lean_finetune.step.run_optimizer import build_optimizer
from lean_finetune.step.training_step import Phase, StepResult, StepSpec, training_step
from lean_finetune.train.monitor.measured_peak import Measured, make_meter

LEARNING_RATE = 1e-5
SCRATCH = Path("scratch")
SPREAD = 0.02
"""Standard deviation of the random weights: that of most models' initialisation."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What was counted."""

    peaks: Measured
    reserved_after_load_bytes: int | None
    process_bytes: int | None
    """All that the device says is taken, right after the last step."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Trained:
    """A model with its optimizer, as stage train has them."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    setting: Setting
    step_spec: StepSpec
    offload: Offload | None

    @classmethod
    def of(cls, config: PretrainedConfig, setting: Setting, device: torch.device) -> "Trained":
        """Random weights on a device."""
        model = random_model(config, setting.model, device)
        step_spec = StepSpec(
            loss_chunk=setting.loss_chunk,
            max_grad_norm=setting.max_grad_norm,
            foreach=device.type == "cuda",
            optimizer_in_backward=setting.optimizer_in_backward,
        )
        return cls(
            model=model,
            optimizer=build_optimizer(model, replace(optim_of(setting), lr=LEARNING_RATE)),
            setting=setting,
            step_spec=step_spec,
            offload=make_offload(setting.offload_activations, device, SCRATCH),
        )

    def step(self, batches: Iterable[Batch], shapes: Sequence[BatchShape], phase: Phase) -> StepResult:
        """One optimizer step over batches of these shapes."""
        return training_step(
            self.model,
            self.optimizer,
            batches,
            supervised_tokens=sum(shape.supervised for shape in shapes),
            model_spec=self.setting.model,
            spec=self.step_spec,
            phase=phase,
            guard=lambda losses, norm: None,
            offload=self.offload,
        )


def measure_case(case: GpuCase, device: torch.device) -> Run:
    """Run the steps of a case."""
    setting = case.setting
    forget(device)
    meter = make_meter(device)
    with meter.window("run"):
        with meter.phase("load"):
            trained = Trained.of(MODELS[case.model], setting, device)
            forget(device)
        loaded = torch.cuda.memory_reserved(device) if device.type == "cuda" else None
        vocabulary = MODELS[case.model].get_text_config().vocab_size
        for shapes in LAYOUTS[case.layout]:
            trained.step((random_batch(shape, vocabulary, device) for shape in shapes), shapes, meter.phase)
        process = _process_bytes(device)
    return Run(peaks=meter.result(), reserved_after_load_bytes=loaded, process_bytes=process)


def random_model(config: PretrainedConfig, spec: ModelSpec, device: torch.device) -> nn.Module:
    """What `lean_finetune.model.load_model.load_model` makes, from a configuration alone and with random weights."""
    model = base_model(config, spec, device)
    adapted = model if spec.method == "full" else add_adapters(model, spec, on_meta=False)
    enable_checkpointing(model, spec)
    return adapted.train()


def base_model(config: PretrainedConfig, spec: ModelSpec, device: torch.device) -> Any:
    """The same before adapters are added."""
    attention = training_attention(config, spec.attention)
    with torch.device(device), init.no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=spec.dtype, attn_implementation=attention)
    model.tie_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=SPREAD)
    if quantisation(spec) is not None:
        _quantize(model, spec, device)
    return model


def _quantize(model: Any, spec: ModelSpec, device: torch.device) -> None:
    """Random 4 or 8-bit weights in the layers that loading would pack."""
    replace_with_bnb_linear(model, get_keys_to_not_convert(model), quantisation(spec))
    # By these peft picks its adapters for quantised layers, as it does for a loaded model.
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = spec.method == "qlora", spec.method == "int8_lora"
    for layer in model.modules():
        if not isinstance(layer, bnb.nn.Linear4bit | bnb.nn.Linear8bitLt):
            continue
        values = torch.empty((layer.out_features, layer.in_features), dtype=spec.dtype, device=device)
        layer.weight = _packed(values.normal_(std=SPREAD), spec, device)
        if layer.bias is not None:
            bias = torch.empty(layer.out_features, dtype=spec.dtype, device=device).normal_(std=SPREAD)
            layer.bias = nn.Parameter(bias, requires_grad=False)
    keep_trainable_on_cpu(model)


def _packed(values: torch.Tensor, spec: ModelSpec, device: torch.device) -> Any:
    """A weight in 4 or 8 bits: moving it to its device packs it, in 8 bits only from the CPU."""
    weight: Any
    if spec.method == "int8_lora":
        weight = bnb.nn.Int8Params(values.cpu(), requires_grad=False, has_fp16_weights=False)
        return weight.to(device)
    weight = bnb.nn.Params4bit(
        values, requires_grad=False, compress_statistics=spec.double_quant, quant_type=spec.quant_type
    )
    return weight.to(device)


def random_batch(shape: BatchShape, vocabulary: int, device: torch.device) -> Batch:
    """Random tokens, the first `supervised` positions trained, moved as train moves them."""
    input_ids_BT = torch.randint(vocabulary, (shape.rows, shape.length))
    index_N = torch.arange(shape.supervised)
    targets_BT = torch.full_like(input_ids_BT, IGNORED)
    targets_BT.view(-1)[index_N] = input_ids_BT.view(-1)[index_N]
    rows = None if shape.joined_lengths is None else join_rows(shape.joined_lengths, shape.length)
    if rows is not None:  # numpy's memory, which no meter counts on a CPU.
        rows = JoinedRows(lengths=rows.lengths, offsets=rows.offsets.clone(), positions_BT=rows.positions_BT.clone())
    batch = Batch(input_ids_BT=input_ids_BT, targets_BT=targets_BT, supervised_index_N=index_N, joined_rows=rows)
    return batch.to(device)


def forget(device: torch.device) -> None:
    """Free what earlier cases left, libraries' workspaces too, so that every case begins alike."""
    gc.collect()
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def _process_bytes(device: torch.device) -> int | None:
    """What the driver says is taken on the device: this process alone on a machine that is ours."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return total - free
