"""Resolve `hardware.gpu` to a device: a known GPU, a memory size such as 24GiB, or this machine's GPU or RAM."""

import difflib
import re

import psutil
import torch
from transformers import PretrainedConfig

from lean_finetune.config.field_types import AnyPrecision, Precision
from lean_finetune.core.errors import UserError
from lean_finetune.core.memory_limits import host_limit_bytes
from lean_finetune.core.units import GIB, MIB
from lean_finetune.memory.gpus import BF16_CAPABILITY, GPUS, Device, context_of
from lean_finetune.model.attention_choice import choose_attention
from lean_finetune.model.empty_model import meta_model
from lean_finetune.model.experts.experts_forward import has_experts
from lean_finetune.model.experts.grouped_products import has_grouped_kernel
from lean_finetune.model.model_spec import ModelSpec
from lean_finetune.model.precision import choose_precision

SIZE_UNITS = {"gib": GIB, "gb": 10**9, "mib": MIB}
MAX_SIZE_GIB = 100_000
"""More than any device has: a larger size is a typing error."""
MAX_SHOWN_CHARACTERS = 40
"""Length at which a wrong value is shortened in messages."""


def resolve_gpu(value: str) -> tuple[Device, str]:
    """The device that `hardware.gpu` names, and why it was chosen.

    `value` is `auto`, a size in GiB, GB or MiB, or the name of a GPU in `GPUS`. A name may be spelled as `nvidia-smi`
    prints it: case, spaces, dashes, "NVIDIA", form factor ("PCIe") and memory type are ignored.

    Raises:
        UserError: the name is unknown or ambiguous, or the size is out of range.
    """
    if value.strip().lower() == "auto":
        return _this_machine()
    if size := re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(GiB|GB|MiB)", value.strip(), re.IGNORECASE | re.ASCII):
        device = _of_size(value.strip(), float(size[1]) * SIZE_UNITS[size[2].lower()])
        return device, "a size alone is taken for a GPU with native bf16 and flash attention"
    key = _normalised(value)
    for gpu in GPUS:
        if key in map(_normalised, (gpu.name, *gpu.aliases)):
            return gpu, "named by hardware.gpu"
    relation, names = _candidates(key)
    raise UserError(
        f"hardware.gpu: must be auto, a size such as 24GiB or a known GPU; got {_shortened(value)}; "
        f"{relation}: {', '.join(names)}; all: lean-finetune fit --list-gpus"
    )


def _of_size(value: str, size_bytes: float) -> Device:
    """A GPU of which only the memory is known; refuses a size that is out of range (it may be infinite)."""
    context_bytes = context_of(BF16_CAPABILITY).max_bytes
    if not context_bytes < size_bytes <= MAX_SIZE_GIB * GIB or len(value) > MAX_SHOWN_CHARACTERS:
        raise UserError(
            f"hardware.gpu: a size must be above the {context_bytes // MIB} MiB of a CUDA context and at most "
            f"{MAX_SIZE_GIB} GiB, in {MAX_SHOWN_CHARACTERS} characters; got {_shortened(value)}; "
            "give the memory of the GPU, such as 24GiB"
        )
    return Device(name=value, kind="cuda", memory_bytes=int(size_bytes), compute_capability=BF16_CAPABILITY)


def _candidates(key: str) -> tuple[str, list[str]]:
    """Names that an unknown `key` may stand for, and how they relate to it; all names if none is similar."""
    names = {_normalised(gpu.name): gpu.name for gpu in GPUS}
    containing = [known for known in names if key and key in known]
    prefixed = [known for known in containing if known.startswith(key)]
    if found := prefixed or containing:
        return "could be", [names[known] for known in found]
    if similar := difflib.get_close_matches(key, names, n=3, cutoff=0.4):
        return "nearest", [names[known] for known in similar]
    return "known", list(names.values())


def _normalised(name: str) -> str:
    """A GPU's name without maker, brand, form factor, memory type and separators.

    Non-ASCII letters and digits stay, so a look-alike name matches no known GPU.
    """
    return re.sub(r"nvidia|geforce|tesla|sxm[0-9]?|pcie|hbm[0-9]?e?|[\W_]", "", name.lower())


def _shortened(value: str) -> str:
    """A wrong value for a message: one short line."""
    return repr(value if len(value) <= MAX_SHOWN_CHARACTERS else f"{value[:MAX_SHOWN_CHARACTERS]}…")


def _this_machine() -> tuple[Device, str]:
    """This machine's first CUDA device, else its RAM (or the container's memory limit)."""
    if torch.cuda.is_available():
        found = torch.cuda.get_device_properties(0)
        capability, memory_bytes = (found.major, found.minor), found.total_memory
        device = Device(name=found.name, kind="cuda", memory_bytes=memory_bytes, compute_capability=capability)
        return device, "auto: the CUDA device of this machine"
    limit_bytes = host_limit_bytes()
    limited = limit_bytes < psutil.virtual_memory().total
    memory = "this container's memory limit" if limited else "this machine's RAM"
    return cpu_device(limit_bytes), f"auto: no CUDA device here, so {memory}"


def cpu_device(memory_bytes: int) -> Device:
    """A CPU with this much RAM."""
    return Device(name="cpu", kind="cpu", memory_bytes=memory_bytes, compute_capability=(0, 0))


def attention_on(device: Device, config: PretrainedConfig, spec: ModelSpec, *, masked: bool) -> str:
    """The attention kernels that run on a device, and why; `masked` as in `choose_attention`.

    Raises:
        UserError: the device lacks what train.attention requires.
    """
    kernels, reason = choose_attention(
        config, spec, kind=device.kind, capability=device.compute_capability, masked=masked
    )
    return f"{kernels}: {reason}"


def experts_on(device: Device, config: PretrainedConfig, spec: ModelSpec) -> str | None:
    """How a device multiplies rows by their experts; None for a model without experts."""
    if not has_experts(meta_model(config)):
        return None
    if spec.method in ("qlora", "int8_lora"):
        return "one after the other, each unpacked for its rows: one expert's 16-bit weights exist at a time"
    dtype = spec.autocast_dtype or spec.dtype
    if device.kind == "cuda" and has_grouped_kernel(dtype, device.compute_capability):
        return "all in one kernel where sizes are multiples of 8; gradients of weights one after the other"
    return "one after the other: PyTorch's grouped kernel needs bf16 and compute capability 9 or 10; the same memory"


def precision_on(device: Device, requested: AnyPrecision) -> tuple[Precision, str]:
    """The precision that `train.precision` resolves to on a device, and why.

    Raises:
        UserError: bf16 on a GPU before Ampere.
    """
    return choose_precision(requested, kind=device.kind, native_bf16=device.native_bf16, name=device.name)
