"""The known GPUs, a line each: memory, compute capability, peak speeds; and what a CUDA context takes of each."""

from dataclasses import dataclass
from typing import Literal

from lean_finetune.core.units import GIB, MIB

TERA, GIGA = 10**12, 10**9
BF16_CAPABILITY = (8, 0)
"""First compute capability with native bf16 (Ampere)."""
PCIE_3, PCIE_4, PCIE_5, NVLINK_C2C = 15.75, 31.5, 63.0, 450.0
"""GB/s in one direction, to the host: 16 lanes (PCI-SIG); GH200's link to its CPU (NVIDIA's data sheet)."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """What the CUDA context of a process takes on a GPU, outside of PyTorch's blocks."""

    bytes: int
    margin_bytes: int
    """It may take so much more."""
    basis: Literal["measured", "assumed"]
    why: str

    @property
    def most_bytes(self) -> int:
        """What is left free for it wherever memory is tested."""
        return self.bytes + self.margin_bytes


def _context(margin_mib: int, basis: Literal["measured", "assumed"], why: str) -> Context:
    """Nothing but the context of a T4 was measured: its 141 MiB stand for all, with a margin for each generation."""
    return Context(bytes=141 * MIB, margin_bytes=margin_mib * MIB, basis=basis, why=why)


NO_CONTEXT = Context(bytes=0, margin_bytes=0, basis="measured", why="a CPU has no context")
# By least compute capability, newest first: the first row that a GPU reaches is its own.
CONTEXTS: tuple[tuple[tuple[int, int], Context], ...] = (
    ((9, 0), _context(512, "assumed", "Hopper and later: that of a T4; more multiprocessors and kernels take more")),
    ((8, 0), _context(384, "assumed", "Ampere and Ada: that of a T4; more multiprocessors and kernels take more")),
    ((7, 5), _context(64, "measured", "a T4 with PyTorch's kernels; the margin is for other drivers")),
    ((0, 0), _context(128, "assumed", "before Turing: that of a T4")),
)


def context_of(capability: tuple[int, int]) -> Context:
    """The context on a GPU of this compute capability."""
    return next(context for least, context in CONTEXTS if capability >= least)


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Peaks of a GPU by its data sheet: dense tensor-core rates with fp32 sums, without sparsity."""

    half_flops: float
    """FLOP/s in bf16, or in fp16 where the GPU has no bf16."""
    fp32_flops: float
    """FLOP/s in fp32, as PyTorch computes it by default: without TF32."""
    bytes_per_second: float
    """Of device memory."""
    link_bytes_per_second: float
    """To the host, in one direction."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """What the estimate has to know of a device."""

    name: str
    kind: Literal["cuda", "cpu"]
    memory_bytes: int
    """All of it, before headroom."""
    compute_capability: tuple[int, int]
    """(0, 0) for a CPU."""
    speed: Speed | None = None
    """None: not known."""

    @property
    def native_bf16(self) -> bool:
        """A GPU before Ampere only imitates bf16; a CPU computes it, some faster than others."""
        return self.kind == "cpu" or self.compute_capability >= BF16_CAPABILITY

    @property
    def context(self) -> Context:
        """That of a process which trains on it."""
        return NO_CONTEXT if self.kind == "cpu" else context_of(self.compute_capability)

    def usable_bytes(self, headroom_percent: float) -> int:
        """For tensors: all but the headroom, in which a CUDA context has to have room as well."""
        headroom_bytes = self.memory_bytes * headroom_percent / 100.0
        return max(0, int(self.memory_bytes - max(headroom_bytes, self.context.most_bytes)))

    def kept_free(self, headroom_percent: float) -> str:
        """What `usable_bytes` keeps free, in words."""
        if self.context.most_bytes <= self.memory_bytes * headroom_percent / 100.0:
            return f"{headroom_percent:g}%"
        return f"{self.context.most_bytes // MIB} MiB for a CUDA context"


def _gpu(name: str, memory_gib: float, capability: tuple[int, int], *speeds: float) -> Device:
    """A row of the table below; `speeds` are TFLOP/s in bf16 and in fp32, GB/s of memory and of the link; or none."""
    speed = None
    if speeds:
        half, fp32, memory, link = speeds
        speed = Speed(
            half_flops=half * TERA,
            fp32_flops=fp32 * TERA,
            bytes_per_second=memory * GIGA,
            link_bytes_per_second=link * GIGA,
        )
    memory_bytes = int(memory_gib * GIB)
    return Device(name=name, kind="cuda", memory_bytes=memory_bytes, compute_capability=capability, speed=speed)


# GiB of memory as CUDA reports it ("total capacity" in PyTorch's out-of-memory messages; the lowest seen where drivers
# differ): less than the nominal size. A part sold under another name for export has the memory of its original.
# Speeds from the vendor's data sheets and architecture white papers (NVIDIA's Pascal, Volta, Turing, Ampere GA100 and
# GA102, Ada, Hopper, Blackwell; AMD's MI300X). GeForce halves the tensor-core rate where sums are fp32, which is what
# training uses. SXM where a name has several forms. P4 and GTX-1080-Ti compute fp16 at a fraction of fp32: their half
# rate is that of fp32. NVIDIA publishes no dense bf16 rate of H20 in English: 148 is the figure of its sellers.
GPUS = (
    _gpu("P4", 7.43, (6, 1), 5.5, 5.5, 192, PCIE_3),
    _gpu("P100", 15.89, (6, 0), 21.2, 10.6, 732, PCIE_3),
    _gpu("GTX-1080-Ti", 10.91, (6, 1), 11.3, 11.3, 484, PCIE_3),
    _gpu("V100-16GB", 15.77, (7, 0), 125, 15.7, 900, PCIE_3),
    _gpu("V100-32GB", 31.73, (7, 0), 125, 15.7, 900, PCIE_3),
    _gpu("T4", 14.56, (7, 5), 65, 8.1, 320, PCIE_3),
    _gpu("RTX-2080-Ti", 10.75, (7, 5), 53.8, 13.4, 616, PCIE_3),
    _gpu("A30", 23.50, (8, 0), 165, 10.3, 933, PCIE_4),
    _gpu("A100-40GB", 39.38, (8, 0), 312, 19.5, 1555, PCIE_4),
    _gpu("A100-80GB", 79.14, (8, 0), 312, 19.5, 2039, PCIE_4),
    _gpu("A800", 79.14, (8, 0), 312, 19.5, 2039, PCIE_4),
    _gpu("A10", 22.06, (8, 6), 125, 31.2, 600, PCIE_4),
    _gpu("A10G", 21.98, (8, 6), 70, 35.0, 600, PCIE_4),
    _gpu("A40", 44.34, (8, 6), 149.7, 37.4, 696, PCIE_4),
    _gpu("A6000", 47.43, (8, 6), 154.8, 38.7, 768, PCIE_4),
    _gpu("RTX-3060", 11.75, (8, 6), 25.5, 12.7, 360, PCIE_4),
    _gpu("RTX-3070", 7.60, (8, 6), 40.6, 20.3, 448, PCIE_4),
    _gpu("RTX-3080", 9.77, (8, 6), 59.5, 29.8, 760, PCIE_4),
    _gpu("RTX-3090", 23.68, (8, 6), 71, 35.6, 936, PCIE_4),
    _gpu("L4", 22.03, (8, 9), 121, 30.3, 300, PCIE_4),
    _gpu("L40", 44.39, (8, 9), 181, 90.5, 864, PCIE_4),
    _gpu("L40S", 44.39, (8, 9), 362, 91.6, 864, PCIE_4),
    _gpu("RTX-4060-Ti-16GB", 15.57, (8, 9), 44.1, 22.1, 288, PCIE_4 / 2),  # 8 lanes.
    _gpu("RTX-4070", 11.62, (8, 9), 58.3, 29.1, 504, PCIE_4),
    _gpu("RTX-4070-Ti", 11.62, (8, 9), 80.2, 40.1, 504, PCIE_4),
    _gpu("RTX-4080", 15.69, (8, 9), 97.5, 48.7, 717, PCIE_4),
    _gpu("RTX-4090", 23.51, (8, 9), 165.2, 82.6, 1008, PCIE_4),
    _gpu("RTX-4090-D", 23.51, (8, 9), 147.1, 73.5, 1008, PCIE_4),
    _gpu("RTX-6000-Ada", 47.37, (8, 9), 364.2, 91.1, 960, PCIE_4),
    _gpu("H20", 95.00, (9, 0), 148, 44, 4000, PCIE_5),
    _gpu("H100", 79.10, (9, 0), 989, 67, 3350, PCIE_5),
    _gpu("H800", 79.10, (9, 0), 989, 67, 3350, PCIE_5),
    _gpu("GH200", 94.50, (9, 0), 989, 67, 4000, NVLINK_C2C),
    _gpu("H200", 139.71, (9, 0), 989, 67, 4800, PCIE_5),
    _gpu("MI300X", 191.69, (9, 4), 1307, 163.4, 5300, PCIE_5),
    _gpu("B200", 178.35, (10, 0), 2250, 75, 8000, PCIE_5),
    _gpu("B300", 267.69, (10, 3)),
    _gpu("RTX-5070-Ti", 15.45, (12, 0), 87.9, 43.9, 896, PCIE_5),
    _gpu("RTX-5080", 15.45, (12, 0), 112.6, 56.3, 960, PCIE_5),
    _gpu("RTX-5090", 31.36, (12, 0), 209.5, 104.8, 1792, PCIE_5),
    _gpu("RTX-PRO-6000", 94.97, (12, 0), 503.8, 125, 1792, PCIE_5),
)
# What drivers print where it is more than a name above and what `devices` drops; the memory is that row's.
ALIASES = {
    "RTX-A6000": "A6000",
    "A800-80GB": "A800",
    "H100-80GB": "H100",
    "P100-16GB": "P100",
    "GH200 480GB": "GH200",  # Of its CPU; the GPU has 96 GB.
    "B300 SXM6 AC": "B300",
    "RTX 6000 Ada Generation": "RTX-6000-Ada",
    "RTX PRO 6000 Blackwell Workstation Edition": "RTX-PRO-6000",
    "RTX PRO 6000 Blackwell Max-Q Workstation Edition": "RTX-PRO-6000",
    "RTX PRO 6000 Blackwell Server Edition": "RTX-PRO-6000",
    "AMD Instinct MI300X": "MI300X",
}
