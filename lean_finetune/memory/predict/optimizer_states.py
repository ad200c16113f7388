"""Closed forms of optimizer state: sizes of each optimizer's tensors, and what they are."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from lean_finetune.config.field_types import OptimizerName
from lean_finetune.config.optimizers import OPTIMIZERS, OptimizerEntry
from lean_finetune.memory.trace.memory_trace import OPTIMIZER
from lean_finetune.model.experts.grouped_products import BYTE_LEVELS
from lean_finetune.step.optimizers import is_paged

FP32_BYTES = 4
STATE_BLOCK_VALUES = 256
"""Values per fp32 scale of 8-bit moments (bitsandbytes' Optimizer2State)."""
SMALLEST_8BIT_VALUES = 4096
"""Tensors with fewer values have fp32 moments (bitsandbytes' min_8bit_size)."""
CODE_BOOKS = 2
"""Of signed and of unsigned 8-bit values."""

PAGED = "paged_optimizer"
"""Category of optimizer state in CUDA managed memory, outside of the device's allocator."""

STEP_COUNTS, CODE_BOOK_TABLES = "a step count per tensor, fp32", "code books, fp32"
IN_RAM = {STEP_COUNTS, CODE_BOOK_TABLES}
"""Descriptions of state that stays in memory where the rest is on disk."""

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Line:
    """Tensors of one kind and category."""

    category: str
    what: str
    """Description for users: what the tensors are and how large each value is."""
    tensor_bytes: tuple[int, ...]
    """Size of each tensor."""
    divides: bool = True
    """Whether sharding divides these tensors among GPUs; else every GPU has all of them."""

    @classmethod
    def of(cls, category: str, what: str, sizes: Iterable[int]) -> "Line":
        """Tensors of these sizes."""
        return cls(category=category, what=what, tensor_bytes=tuple(sizes))

    def total_bytes(self, granularity_bytes: int, parts: int = 1) -> int:
        """Bytes on one of `parts` GPUs, each tensor rounded up to a multiple of `granularity_bytes`.

        Step counts (one fp32 value) are on every GPU.
        """
        parts = parts if self.divides else 1
        sizes = (-(-size // (parts if size > FP32_BYTES else 1)) for size in self.tensor_bytes)
        return sum(-(-size // granularity_bytes) * granularity_bytes for size in sizes)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A trained tensor, a process's part of it, or a copy that is updated."""

    name: str = ""
    shape: Shape
    value_bytes: int
    """4, or 2 for bf16."""

    @property
    def values(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Its size."""
        return self.values * self.value_bytes


def updated_tensors(trained: Sequence[Trained], *, masters: bool) -> Sequence[Trained]:
    """The trained tensors, or their fp32 copies if there are `masters`."""
    return [replace(tensor, value_bytes=FP32_BYTES) for tensor in trained] if masters else trained


def by_type(category: str, what: str, tensors: Sequence[Trained], times: Sequence[int] = (1,)) -> Iterator[Line]:
    """A line for each type of these tensors: tensors of `times` as many values. `what` may have {type} and {size}."""
    for size, name in ((FP32_BYTES, "fp32"), (FP32_BYTES // 2, "bf16")):
        if chosen := [tensor.bytes for tensor in tensors if tensor.value_bytes == size]:
            yield Line.of(category, what.format(type=name, size=size), (n * part for n in chosen for part in times))


def optimizer_tensors(trained: Sequence[Trained], name: OptimizerName, *, cuda: bool) -> Iterator[Line]:
    """State tensors, by category OPTIMIZER or PAGED, for parameters of these shapes and types."""
    kind = OPTIMIZERS[name]
    if kind.factored:
        yield from _factored([tensor.shape for tensor in trained])
    elif kind.state_bits == 8:
        yield from _moments_8bit([tensor.values for tensor in trained], kind, name, cuda)
    elif kind.state:
        yield from _moments(trained, kind, name, cuda)


def _moments(trained: Sequence[Trained], kind: OptimizerEntry, name: OptimizerName, cuda: bool) -> Iterator[Line]:
    """Moments in fp32 or in the parameter's own type, and PyTorch's fp32 count of steps per tensor."""
    if kind.state_bits is not None:
        trained = [replace(tensor, value_bytes=kind.state_bits // 8) for tensor in trained]
    what = f"{_count(kind)}, {{size}} bytes each per trained value"
    for category in (OPTIMIZER, PAGED):
        chosen = [one for one in trained if is_paged(name, one.values, cuda=cuda) == (category == PAGED)]
        yield from by_type(category, what, chosen, tuple(kind.state.values()))
    if kind.step_count == "device" or (kind.step_count == "host" and not cuda):
        yield Line.of(OPTIMIZER, STEP_COUNTS, (FP32_BYTES for _ in trained))


def _moments_8bit(values: Sequence[int], kind: OptimizerEntry, name: OptimizerName, cuda: bool) -> Iterator[Line]:
    """Moments of one byte with block scales (Dettmers et al. 2021, arXiv 2110.02861); small tensors have fp32."""
    large = [n for n in values if n >= SMALLEST_8BIT_VALUES]
    small = [n for n in values if n < SMALLEST_8BIT_VALUES]
    parts = tuple(kind.state.values())
    what = f"{_count(kind)}, a byte each per trained value"
    for category in (OPTIMIZER, PAGED):
        chosen = [n for n in large if is_paged(name, n, cuda=cuda) == (category == PAGED)]
        yield Line.of(category, what, (n * part for n in chosen for part in parts))
    scales = (-(-n // STATE_BLOCK_VALUES) * FP32_BYTES * part for n in large for part in parts)
    yield Line.of(OPTIMIZER, f"their scales, fp32 per {STATE_BLOCK_VALUES} values", scales)
    tensors = f"{_count(kind)}, fp32, of tensors below {SMALLEST_8BIT_VALUES} values"
    yield Line.of(OPTIMIZER, tensors, (n * FP32_BYTES * part for n in small for part in parts))
    books = min(CODE_BOOKS, len(parts)) * bool(large) if cuda else CODE_BOOKS
    yield Line.of(OPTIMIZER, CODE_BOOK_TABLES, (BYTE_LEVELS * FP32_BYTES for _ in range(books)))


def _factored(trained: Sequence[Shape]) -> Iterator[Line]:
    """Adafactor: a value per row and one per column of a matrix, one per value of a vector."""
    matrices = [shape for shape in trained if len(shape) >= 2]
    sums = (n * FP32_BYTES for shape in matrices for n in (math.prod(shape[:-1]), math.prod(shape[:-2] + shape[-1:])))
    yield Line.of(OPTIMIZER, "mean squares of rows and of columns, fp32", sums)
    yield Line.of(
        OPTIMIZER, "mean squares of vectors, fp32", (shape[0] * FP32_BYTES for shape in trained if len(shape) < 2)
    )
    yield Line.of(OPTIMIZER, "a size per tensor", (FP32_BYTES for _ in trained))


def _count(kind: OptimizerEntry) -> str:
    """The number of moments, in words."""
    moments = kind.values_per_trained_value
    number = {1: "one", 2: "two", 3: "three"}.get(moments, str(moments))
    return f"{number} moment{'s' * (moments > 1)}"
