"""Resolve `hardware.gpu` to a device: a known GPU, a memory size such as 24GiB, or this machine's GPU or RAM."""

import sys

import psutil
import torch
from transformers import PretrainedConfig

from cuda_memory.gpus import Device
from lean_finetune.config.field_types import AnyPrecision, Precision
from lean_finetune.config.model_families import family_of
from lean_finetune.config.schema import Train
from lean_finetune.core.memory_limits import host_limit_bytes
from lean_finetune.memory.gpu_names import named_gpu
from lean_finetune.model.attention_choice import choose_attention
from lean_finetune.model.empty_model import causal_class, meta_model
from lean_finetune.model.experts.experts_forward import has_experts
from lean_finetune.model.experts.grouped_matmul import has_grouped_kernel
from lean_finetune.model.model_config import other_layers
from lean_finetune.model.precision import autocast_dtype, base_dtype, choose_precision


def resolve_gpu(value: str) -> tuple[Device, str]:
    """The device that `hardware.gpu` names, and why it was chosen.

    `value` is `auto`, a size in GiB, GB or MiB, or the name of a GPU as `cuda_memory.gpus.named_gpu` reads it.

    Raises:
        UserError: the name is unknown or ambiguous, or the size is out of range.
    """
    return _this_machine() if value.strip().lower() == "auto" else named_gpu(value)


def _this_machine() -> tuple[Device, str]:
    """This machine's first CUDA device, else its RAM (or the container's memory limit)."""
    if torch.cuda.is_available():
        found = torch.cuda.get_device_properties(0)
        capability, memory_bytes = (found.major, found.minor), found.total_memory
        device = Device(
            name=found.name,
            kind="cuda",
            memory_bytes=memory_bytes,
            compute_capability=capability,
            multiprocessors=found.multi_processor_count,
        )
        return device, "auto: the CUDA device of this machine"
    limit_bytes = host_limit_bytes()
    limited = limit_bytes < psutil.virtual_memory().total
    memory = "this container's memory limit" if limited else "this machine's RAM"
    return cpu_device(limit_bytes), f"auto: no CUDA device here, so {memory}"


def cpu_device(memory_bytes: int) -> Device:
    """A CPU with this much RAM."""
    return Device(name="cpu", kind="cpu", memory_bytes=memory_bytes, compute_capability=(0, 0))


def attention_on(device: Device, config: PretrainedConfig, train: Train, *, masked: bool) -> str:
    """The attention kernels that run on a device, and why; `masked` as in `choose_attention`.

    Raises:
        UserError: the device lacks what train.attention requires.
    """
    kernels, reason = choose_attention(
        config, train, kind=device.kind, capability=device.compute_capability, masked=masked
    )
    return f"{kernels}: {reason}"


def experts_on(device: Device, config: PretrainedConfig, train: Train) -> str | None:
    """How a device multiplies rows by their experts; None for a model without experts."""
    if not has_experts(meta_model(config)):
        return None
    if train.method in ("qlora", "int8_lora"):
        return "one after the other, each unpacked for its rows: one expert's 16-bit weights exist at a time"
    dtype = autocast_dtype(train) or base_dtype(train)
    if device.kind == "cuda" and has_grouped_kernel(dtype, device.compute_capability):
        return "all in one kernel where sizes are multiples of 8; gradients of weights one after the other"
    return "one after the other: PyTorch's grouped kernel needs bf16 and compute capability 9 or 10; the same memory"


TOKEN_MIXERS = {
    "torch_chunk_gated_delta_rule": "gated delta rule",
    "chunk_kimi_delta_attention": "Kimi delta attention",
    "mamba2_chunk_scan": "Mamba 2",
    "mamba_selective_scan": "Mamba",
}
"""What layers of linear attention compute, by the name of the function in a family's code."""


def linear_attention_on(device: Device, config: PretrainedConfig, train: Train) -> str | None:
    """What computes a model's linear attention or state-space layers on a device; None without such layers."""
    if not {"linear_attention", "hybrid"} & {*other_layers(config)}:
        return None
    code = vars(sys.modules[causal_class(config).__module__])
    mixer = next((text for name, text in TOKEN_MIXERS.items() if name in code), "the family's own")
    if train.fused_kernels == "fla":
        return f"{mixer} by flash-linear-attention's kernels (train.fused_kernels: fla)"
    text = f"{mixer} in PyTorch, by no other package's kernels"
    if device.kind == "cuda" and family_of(config.model_type).gated_delta_rule:
        text += "; train.fused_kernels: fla has faster ones (docs/models.md)"
    return text


def precision_on(device: Device, requested: AnyPrecision) -> tuple[Precision, str]:
    """The precision that `train.precision` resolves to on a device, and why.

    Raises:
        UserError: bf16 on a GPU before Ampere.
    """
    return choose_precision(requested, kind=device.kind, native_bf16=device.native_bf16, name=device.name)
