"""Table of known GPUs: memory, compute capability, peak speeds and CUDA context. A new card is one row of `GPUS`."""

import difflib
import re
from dataclasses import dataclass
from typing import Literal

from cuda_memory.errors import UserError
from cuda_memory.units import GIB, MIB

SIZE_UNITS = {"gib": GIB, "gb": 10**9, "mib": MIB}
MAX_SIZE_GIB = 100_000
"""More than any device has: a larger size is a typing error."""
MAX_SHOWN_CHARACTERS = 40
"""Length at which a wrong value is shortened in messages."""

USUAL_MULTIPROCESSORS = 108
"""Those of an A100, assumed for a GPU of which only the memory is known."""

TERA, GIGA = 10**12, 10**9
BF16_CAPABILITY = (8, 0)
"""First compute capability with native bf16 (Ampere)."""
PCIE_3, PCIE_4, PCIE_5, NVLINK_C2C = 15.75, 31.5, 63.0, 450.0
"""GB/s to the host in one direction: PCIe with 16 lanes (PCI-SIG); GH200's link to its CPU (NVIDIA's data sheet)."""


Basis = Literal["measured", "assumed", "documented", "derived"]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Memory of a process outside of PyTorch's allocator, such as its CUDA context: a figure of process.json."""

    bytes: int
    margin_bytes: int
    """Uncertainty: up to this much more; 0 for exact figures."""
    basis: Basis
    why: str

    @property
    def max_bytes(self) -> int:
        """Upper bound."""
        return self.bytes + self.margin_bytes


def _context(margin_mib: int, basis: Basis, why: str) -> Figure:
    """Generations before Hopper have the 141 MiB measured on a T4, and another margin."""
    return Figure(bytes=141 * MIB, margin_bytes=margin_mib * MIB, basis=basis, why=why)


NO_CONTEXT = Figure(bytes=0, margin_bytes=0, basis="measured", why="a CPU has no context")
# By minimum compute capability, newest first; `context_of` takes the first match.
CONTEXTS: tuple[tuple[tuple[int, int], Figure], ...] = (
    ((9, 1), Figure(bytes=767 * MIB, margin_bytes=512 * MIB, basis="assumed", why="after Hopper: that of an H100")),
    (
        (9, 0),
        Figure(
            bytes=767 * MIB,
            margin_bytes=128 * MIB,
            basis="measured",
            why="an H100 with PyTorch 2.11 and CUDA 13.0 in training steps; int8 had 835 MiB, and the margin covers it",
        ),
    ),
    ((8, 0), _context(384, "assumed", "Ampere and Ada: that of a T4; more multiprocessors and kernels take more")),
    ((7, 5), _context(64, "measured", "a T4 with PyTorch's kernels; the margin is for other drivers")),
    ((0, 0), _context(128, "assumed", "before Turing: that of a T4")),
)


def context_of(capability: tuple[int, int]) -> Figure:
    """CUDA context on a GPU of this compute capability."""
    return next(context for minimum, context in CONTEXTS if capability >= minimum)


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Peak rates from a GPU's data sheet: dense tensor-core rates with fp32 accumulation, without sparsity."""

    half_flops: float
    """FLOP/s in bf16, or in fp16 where the GPU has no bf16."""
    fp32_flops: float
    """FLOP/s in fp32 as PyTorch computes it by default: without TF32."""
    bytes_per_second: float
    """Device memory bandwidth."""
    link_bytes_per_second: float
    """Bandwidth to the host, in one direction."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU, or a CPU with its RAM, as the prediction sees it."""

    name: str
    kind: Literal["cuda", "cpu"]
    memory_bytes: int
    """Total memory, before headroom."""
    compute_capability: tuple[int, int]
    """(0, 0) for a CPU."""
    multiprocessors: int = USUAL_MULTIPROCESSORS
    """Of a GPU: some kernels divide their work by it, and need memory for each part."""
    speed: Speed | None = None
    """None: unknown."""
    aliases: tuple[str, ...] = ()
    """Other names that drivers print, beyond the spellings that `named_gpu` normalises."""

    @property
    def native_bf16(self) -> bool:
        """Whether bf16 is computed in hardware; GPUs before Ampere only emulate it."""
        return self.kind == "cpu" or self.compute_capability >= BF16_CAPABILITY

    @property
    def context(self) -> Figure:
        """CUDA context of a training process."""
        return NO_CONTEXT if self.kind == "cpu" else context_of(self.compute_capability)

    def usable_bytes(self, headroom_percent: float) -> int:
        """Memory for tensors: the total less the headroom, or less the CUDA context if that is larger."""
        headroom_bytes = self.memory_bytes * headroom_percent / 100.0
        return max(0, int(self.memory_bytes - max(headroom_bytes, self.context.max_bytes)))

    def headroom_text(self, headroom_percent: float) -> str:
        """What `usable_bytes` subtracts, for messages."""
        if self.context.max_bytes <= self.memory_bytes * headroom_percent / 100.0:
            return f"{headroom_percent:g}%"
        return f"{self.context.max_bytes // MIB} MiB for a CUDA context"


def gpu_row(
    name: str,
    memory_gib: float,
    capability: tuple[int, int],
    multiprocessors: int,
    *speeds: float,
    aliases: tuple[str, ...] = (),
) -> Device:
    """A row of `GPUS`.

    `memory_gib` as CUDA reports it. `speeds`: TFLOP/s in half precision and in fp32, GB/s of memory and of the host
    link; none if unknown.
    """
    speed = None
    if speeds:
        half, fp32, memory, link = speeds
        speed = Speed(
            half_flops=half * TERA,
            fp32_flops=fp32 * TERA,
            bytes_per_second=memory * GIGA,
            link_bytes_per_second=link * GIGA,
        )
    return Device(
        name=name,
        kind="cuda",
        memory_bytes=int(memory_gib * GIB),
        compute_capability=capability,
        multiprocessors=multiprocessors,
        speed=speed,
        aliases=aliases,
    )


# Memory: GiB that CUDA reports ("total capacity" in PyTorch's out-of-memory messages; the lowest seen across drivers),
# which is less than the nominal size; "GH200 480GB" names its CPU memory. Export variants have their original's memory.
# Speeds: data sheets and architecture white papers (NVIDIA Pascal, Volta, Turing, Ampere GA100 and GA102, Ada, Hopper,
# Blackwell; AMD MI300X). SXM where a name has several forms. GeForce halves the tensor-core rate with fp32
# accumulation, which training uses. P4 and GTX-1080-Ti compute fp16 far slower than fp32, so their half rate is fp32's.
# NVIDIA publishes no dense bf16 rate of H20 in English: 148 comes from resellers.
# Multiprocessors: the same white papers; A10G: multi_processor_count as PyTorch prints it.
SERIES = ("rtx", "gtx")
"""May be left out of a name: `4090` is the RTX-4090."""
RTX_PRO_6000_NAMES = tuple(
    f"RTX PRO 6000 Blackwell {form} Edition" for form in ("Workstation", "Max-Q Workstation", "Server")
)
GPUS: list[Device] = [
    gpu_row("P4", 7.43, (6, 1), 20, 5.5, 5.5, 192, PCIE_3),
    gpu_row("P100", 15.89, (6, 0), 56, 21.2, 10.6, 732, PCIE_3, aliases=("P100-16GB",)),
    gpu_row("GTX-1080-Ti", 10.91, (6, 1), 28, 11.3, 11.3, 484, PCIE_3),
    gpu_row("V100-16GB", 15.77, (7, 0), 80, 125, 15.7, 900, PCIE_3),
    gpu_row("V100-32GB", 31.73, (7, 0), 80, 125, 15.7, 900, PCIE_3),
    gpu_row("T4", 14.56, (7, 5), 40, 65, 8.1, 320, PCIE_3),
    gpu_row("RTX-2080-Ti", 10.75, (7, 5), 68, 53.8, 13.4, 616, PCIE_3),
    gpu_row("A30", 23.50, (8, 0), 56, 165, 10.3, 933, PCIE_4),
    gpu_row("A100-40GB", 39.38, (8, 0), 108, 312, 19.5, 1555, PCIE_4),
    gpu_row("A100-80GB", 79.14, (8, 0), 108, 312, 19.5, 2039, PCIE_4),
    gpu_row("A800", 79.14, (8, 0), 108, 312, 19.5, 2039, PCIE_4, aliases=("A800-80GB",)),
    gpu_row("A10", 22.06, (8, 6), 72, 125, 31.2, 600, PCIE_4),
    gpu_row("A10G", 21.98, (8, 6), 80, 70, 35.0, 600, PCIE_4),
    gpu_row("A40", 44.34, (8, 6), 84, 149.7, 37.4, 696, PCIE_4),
    gpu_row("A6000", 47.43, (8, 6), 84, 154.8, 38.7, 768, PCIE_4, aliases=("RTX-A6000",)),
    gpu_row("RTX-3060", 11.75, (8, 6), 28, 25.5, 12.7, 360, PCIE_4),
    gpu_row("RTX-3070", 7.60, (8, 6), 46, 40.6, 20.3, 448, PCIE_4),
    gpu_row("RTX-3080", 9.77, (8, 6), 68, 59.5, 29.8, 760, PCIE_4),
    gpu_row("RTX-3090", 23.68, (8, 6), 82, 71, 35.6, 936, PCIE_4),
    gpu_row("L4", 22.03, (8, 9), 58, 121, 30.3, 300, PCIE_4),
    gpu_row("L40", 44.39, (8, 9), 142, 181, 90.5, 864, PCIE_4),
    gpu_row("L40S", 44.39, (8, 9), 142, 362, 91.6, 864, PCIE_4),
    gpu_row("RTX-4060-Ti-16GB", 15.57, (8, 9), 34, 44.1, 22.1, 288, PCIE_4 / 2),  # 8 lanes.
    gpu_row("RTX-4070", 11.62, (8, 9), 46, 58.3, 29.1, 504, PCIE_4),
    gpu_row("RTX-4070-Ti", 11.62, (8, 9), 60, 80.2, 40.1, 504, PCIE_4),
    gpu_row("RTX-4080", 15.69, (8, 9), 76, 97.5, 48.7, 717, PCIE_4),
    gpu_row("RTX-4090", 23.51, (8, 9), 128, 165.2, 82.6, 1008, PCIE_4),
    gpu_row("RTX-4090-D", 23.51, (8, 9), 114, 147.1, 73.5, 1008, PCIE_4),
    gpu_row("RTX-6000-Ada", 47.37, (8, 9), 142, 364.2, 91.1, 960, PCIE_4, aliases=("RTX 6000 Ada Generation",)),
    gpu_row("H20", 95.00, (9, 0), 78, 148, 44, 4000, PCIE_5),
    gpu_row("H100", 79.10, (9, 0), 132, 989, 67, 3350, PCIE_5, aliases=("H100-80GB",)),
    gpu_row("H800", 79.10, (9, 0), 132, 989, 67, 3350, PCIE_5),
    gpu_row("GH200", 94.50, (9, 0), 132, 989, 67, 4000, NVLINK_C2C, aliases=("GH200 480GB",)),
    gpu_row("H200", 139.71, (9, 0), 132, 989, 67, 4800, PCIE_5),
    gpu_row("MI300X", 191.69, (9, 4), 304, 1307, 163.4, 5300, PCIE_5, aliases=("AMD Instinct MI300X",)),
    gpu_row("B200", 178.35, (10, 0), 148, 2250, 75, 8000, PCIE_5),
    gpu_row("B300", 267.69, (10, 3), 148, aliases=("B300 SXM6 AC",)),
    gpu_row("RTX-5070-Ti", 15.45, (12, 0), 70, 87.9, 43.9, 896, PCIE_5),
    gpu_row("RTX-5080", 15.45, (12, 0), 84, 112.6, 56.3, 960, PCIE_5),
    gpu_row("RTX-5090", 31.36, (12, 0), 170, 209.5, 104.8, 1792, PCIE_5),
    gpu_row("RTX-PRO-6000", 94.97, (12, 0), 188, 503.8, 125, 1792, PCIE_5, aliases=RTX_PRO_6000_NAMES),
]


def gpu_names(context: object, parameter: object, incomplete: str) -> list[str]:
    """Known GPUs, for the completion of an option by click."""
    return [gpu.name for gpu in GPUS if gpu.name.lower().startswith(incomplete.lower())]


def named_gpu(value: str, *, option: str = "--gpu", forms: str = "a size", more: str = "") -> tuple[Device, str]:
    """The GPU of a name or a size, and why.

    A name may be spelled as `nvidia-smi` prints it: case, spaces, dashes, "NVIDIA", form factor ("PCIe") and memory
    type are ignored. `4090` stands for `RTX-4090`.

    Args:
        value: the name, or a size in GiB, GB or MiB.
        option: what has this value, for messages.
        forms: what else than a name it may be, for messages.
        more: the end of a message about an unknown name.

    Raises:
        UserError: the name is unknown or ambiguous, or the size is out of range.
    """
    if size := re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(GiB|GB|MiB)", value.strip(), re.IGNORECASE | re.ASCII):
        device = _of_size(value.strip(), float(size[1]) * SIZE_UNITS[size[2].lower()], option)
        return device, "a size alone is taken for a GPU with native bf16 and flash attention"
    key = _normalised(value)
    for spelled in (key, *(f"{series}{key}" for series in SERIES)):
        for gpu in GPUS:
            if spelled in map(_normalised, (gpu.name, *gpu.aliases)):
                return gpu, f"named by {option}"
    relation, names = _candidates(key)
    raise UserError(
        f"{option}: must be {forms} such as 24GiB or a known GPU; got {_shortened(value)}; "
        f"{relation}: {', '.join(names)}{more}"
    )


def _of_size(value: str, size_bytes: float, option: str) -> Device:
    """A GPU of which only the memory is known; refuses a size that is out of range (it may be infinite)."""
    context_bytes = context_of(BF16_CAPABILITY).max_bytes
    if not context_bytes < size_bytes <= MAX_SIZE_GIB * GIB or len(value) > MAX_SHOWN_CHARACTERS:
        raise UserError(
            f"{option}: a size must be above the {context_bytes // MIB} MiB of a CUDA context and at most "
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
