"""The devices a run can be held against: known GPUs, a size such as 24GiB, or what this machine has."""

import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import torch

from stages.errors import UserError

GIB = 2**30
BF16_CAPABILITY = (8, 0)
"""First compute capability with native bf16 (Ampere)."""
CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Memory limit of a container: cgroup v2, then v1."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """What the estimate has to know of a device."""

    name: str
    kind: Literal["cuda", "cpu"]
    memory_bytes: int
    """All of it, before headroom."""
    compute_capability: tuple[int, int]
    """(0, 0) for a CPU."""

    @property
    def native_bf16(self) -> bool:
        """A GPU before Ampere only imitates bf16; a CPU computes it, some faster than others."""
        return self.kind == "cpu" or self.compute_capability >= BF16_CAPABILITY


def _gpu(name: str, memory_gib: float, major: int, minor: int) -> Device:
    """A row of the table below."""
    return Device(name=name, kind="cuda", memory_bytes=int(memory_gib * GIB), compute_capability=(major, minor))


# Memory as CUDA reports it ("total capacity" in PyTorch's out-of-memory messages; the lowest where drivers differ):
# less than the nominal size.
GPUS = (
    _gpu("P4", 7.43, 6, 1),
    _gpu("P100", 15.89, 6, 0),
    _gpu("GTX-1080-Ti", 10.91, 6, 1),
    _gpu("V100-16GB", 15.77, 7, 0),
    _gpu("V100-32GB", 31.73, 7, 0),
    _gpu("T4", 14.56, 7, 5),
    _gpu("RTX-2080-Ti", 10.75, 7, 5),
    _gpu("A100-40GB", 39.38, 8, 0),
    _gpu("A100-80GB", 79.14, 8, 0),
    _gpu("A10", 22.06, 8, 6),
    _gpu("A10G", 21.98, 8, 6),
    _gpu("A6000", 47.43, 8, 6),
    _gpu("RTX-3060", 11.75, 8, 6),
    _gpu("RTX-3080", 9.77, 8, 6),
    _gpu("RTX-3090", 23.68, 8, 6),
    _gpu("L4", 22.03, 8, 9),
    _gpu("L40S", 44.39, 8, 9),
    _gpu("RTX-4080", 15.69, 8, 9),
    _gpu("RTX-4090", 23.51, 8, 9),
    _gpu("H100", 79.10, 9, 0),
    _gpu("H200", 139.71, 9, 0),
    _gpu("B200", 178.35, 10, 0),
    _gpu("RTX-5090", 31.36, 12, 0),
)


def resolve_gpu(wanted: str) -> tuple[Device, str]:
    """The device named by `hardware.gpu`, and why it was taken.

    Args:
        wanted: `auto`, a size in GiB or GB, or a name in GPUS (case, spaces, dashes and "NVIDIA" do not matter).

    Raises:
        UserError: the name is unknown.
    """
    if wanted.strip().lower() == "auto":
        return _this_machine()
    if size := re.fullmatch(r"(\d+(?:\.\d+)?)\s*(GiB|GB)", wanted.strip(), re.IGNORECASE):
        unit = GIB if size[2].lower() == "gib" else 10**9
        device = Device(
            name=wanted.strip(),
            kind="cuda",
            memory_bytes=int(float(size[1]) * unit),
            compute_capability=BF16_CAPABILITY,
        )
        return device, "a size alone is taken for a GPU with native bf16 and flash attention"
    by_key = {_key(gpu.name): gpu for gpu in GPUS}
    key = _key(wanted)
    if key in by_key:
        return by_key[key], "named by hardware.gpu"
    near = difflib.get_close_matches(key, by_key, n=3, cutoff=0.4) or [k for k in by_key if key and key in k][:3]
    names = ", ".join(by_key[k].name for k in near) if near else ", ".join(gpu.name for gpu in GPUS)
    raise UserError(
        f"hardware.gpu: must be auto, a size such as 24GiB or a known GPU; got {wanted!r}; "
        f"{'nearest' if near else 'known'}: {names}; all: python -m stages.estimate --list-gpus"
    )


def _key(name: str) -> str:
    """A GPU's name without what people write in different ways."""
    return re.sub(r"nvidia|geforce|tesla|[^a-z0-9]", "", name.lower())


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
    limit = _container_limit()
    if limit is not None and limit < total:
        return _cpu(limit), "auto: no CUDA device here, so this container's memory limit"
    return _cpu(total), "auto: no CUDA device here, so this machine's RAM"


def _cpu(memory_bytes: int) -> Device:
    """RAM as a device."""
    return Device(name="cpu", kind="cpu", memory_bytes=memory_bytes, compute_capability=(0, 0))


def _container_limit() -> int | None:
    """The memory limit of the container, or None where there is none."""
    for path in CGROUP_LIMITS:
        if path.is_file():
            text = path.read_text().strip()
            return int(text) if text.isdigit() else None
    return None


def check_precision(device: Device, precision: str) -> None:
    """Refuse a precision the device has no arithmetic for.

    Raises:
        UserError: bf16 on a GPU before Ampere.
    """
    if precision == "bf16" and not device.native_bf16:
        major, minor = device.compute_capability
        raise UserError(
            f"train.precision: bf16 needs compute capability 8.0 (Ampere) or later; got bf16 for {device.name} "
            f"({major}.{minor}); set train.precision to fp32"
        )
