"""The devices a run can be held against: known GPUs, a size such as 24GiB, or what this machine has."""

import difflib
import re

import psutil
import torch
from transformers import PretrainedConfig

from lean_finetune.config.field_types import AnyPrecision, Precision
from lean_finetune.core.errors import UserError
from lean_finetune.core.memory_limits import memory_limits
from lean_finetune.core.units import GIB, MIB
from lean_finetune.memory.gpus import ALIASES, BF16_CAPABILITY, GPUS, Device, context_of
from lean_finetune.model.attention_choice import choose_attention
from lean_finetune.model.model_spec import ModelSpec
from lean_finetune.model.precision import choose_precision

SIZE_UNITS = {"gib": GIB, "gb": 10**9, "mib": MIB}
MOST_GIB = 100_000
"""More than any device has: a larger size is a slip of the hand."""
LONGEST_SHOWN = 40
"""Characters of a wrong value that are told back."""


def resolve_gpu(wanted: str) -> tuple[Device, str]:
    """The device named by `hardware.gpu`, and why it was taken.

    Args:
        wanted: `auto`, a size in GiB, GB or MiB, or a name in GPUS, also as `nvidia-smi` prints it (case, spaces,
            dashes, "NVIDIA", form such as "PCIe" and memory type do not matter).

    Raises:
        UserError: the name is unknown or fits several, or no device is of that size.
    """
    if wanted.strip().lower() == "auto":
        return _this_machine()
    if size := re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(GiB|GB|MiB)", wanted.strip(), re.IGNORECASE | re.ASCII):
        device = _of_size(wanted.strip(), float(size[1]) * SIZE_UNITS[size[2].lower()])
        return device, "a size alone is taken for a GPU with native bf16 and flash attention"
    by_key = {_key(gpu.name): gpu for gpu in GPUS}
    known = by_key | {_key(alias): by_key[_key(name)] for alias, name in ALIASES.items()}
    key = _key(wanted)
    if key in known:
        return known[key], "named by hardware.gpu"
    relation, names = _candidates(key, {key: gpu.name for key, gpu in by_key.items()})
    raise UserError(
        f"hardware.gpu: must be auto, a size such as 24GiB or a known GPU; got {_shown(wanted)}; "
        f"{relation}: {', '.join(names)}; all: lean-finetune fit --list-gpus"
    )


def _of_size(wanted: str, size_bytes: float) -> Device:
    """A GPU of which only the memory is known.

    Raises:
        UserError: no device has so little or so much (the size may be infinite), or it is too long to be told.
    """
    context_bytes = context_of(BF16_CAPABILITY).most_bytes
    if not context_bytes < size_bytes <= MOST_GIB * GIB or len(wanted) > LONGEST_SHOWN:
        raise UserError(
            f"hardware.gpu: a size must be above the {context_bytes // MIB} MiB of a CUDA context and at most "
            f"{MOST_GIB} GiB, in {LONGEST_SHOWN} characters; got {_shown(wanted)}; "
            "give the memory of the GPU, such as 24GiB"
        )
    return Device(name=wanted, kind="cuda", memory_bytes=int(size_bytes), compute_capability=BF16_CAPABILITY)


def _candidates(key: str, names: dict[str, str]) -> tuple[str, list[str]]:
    """The names, by key, that an unknown `key` may stand for, and how they relate to it; all where none is near."""
    if key:
        begun = [name for known, name in names.items() if known.startswith(key)]
        held = [name for known, name in names.items() if key in known]
        if begun or held:
            return "could be", begun or held
        if near := difflib.get_close_matches(key, names, n=3, cutoff=0.4):
            return "nearest", [names[known] for known in near]
    return "known", list(names.values())


def _key(name: str) -> str:
    """A GPU's name without what is written in different ways: maker, brand, form, type of memory, separators.

    Letters and digits beyond ASCII stay: no known name has them, so that a look-alike is refused.
    """
    return re.sub(r"nvidia|geforce|tesla|sxm[0-9]?|pcie|hbm[0-9]?e?|[\W_]", "", name.lower())


def _shown(wanted: str) -> str:
    """A wrong value as it is told back: one line, however long it is."""
    return repr(wanted if len(wanted) <= LONGEST_SHOWN else f"{wanted[:LONGEST_SHOWN]}…")


def _this_machine() -> tuple[Device, str]:
    """The CUDA device here, else this machine's RAM."""
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        device = Device(
            name=properties.name,
            kind="cuda",
            memory_bytes=properties.total_memory,
            compute_capability=(properties.major, properties.minor),
        )
        return device, "auto: the CUDA device of this machine"
    total = psutil.virtual_memory().total
    limit_bytes = min((limit.limit_bytes for limit in memory_limits()), default=total)
    if limit_bytes < total:
        return _cpu(limit_bytes), "auto: no CUDA device here, so this container's memory limit"
    return _cpu(total), "auto: no CUDA device here, so this machine's RAM"


def _cpu(memory_bytes: int) -> Device:
    """RAM as a device."""
    return Device(name="cpu", kind="cpu", memory_bytes=memory_bytes, compute_capability=(0, 0))


def attention_on(device: Device, config: PretrainedConfig, spec: ModelSpec, *, masked: bool) -> str:
    """The kernels of attention on a device, and why; `masked` as in lean_finetune.model.attention_choice.

    Raises:
        UserError: what train.attention asks for cannot run there.
    """
    kernels, reason = choose_attention(
        config, spec, kind=device.kind, capability=device.compute_capability, masked=masked
    )
    return f"{kernels}: {reason}"


def precision_on(device: Device, asked: AnyPrecision) -> tuple[Precision, str]:
    """What train.precision means on a device, and why.

    Raises:
        UserError: bf16 on a GPU before Ampere.
    """
    return choose_precision(asked, kind=device.kind, native_bf16=device.native_bf16, name=device.name)
