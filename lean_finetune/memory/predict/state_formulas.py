"""Bytes of weights, adapters, gradients and optimizer state, by arithmetic."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.quantizers_utils import should_convert_module

from lean_finetune.config.field_types import OptimizerName
from lean_finetune.config.optimizers import OPTIMIZERS, OptimizerEntry
from lean_finetune.config.schema import Train
from lean_finetune.islands.tower import TOWER
from lean_finetune.memory.trace.memory_trace import ADAPTERS, GRADIENTS, OPTIMIZER, QUANTISATION_STATE, WEIGHTS
from lean_finetune.memory.trace.setting import Setting
from lean_finetune.model.adapters import adaptable_layers, adapts_by_name
from lean_finetune.model.beside.parts import part_kinds, part_mode
from lean_finetune.model.empty_model import SCORE, kept_in_fp32, meta_model, token_layers
from lean_finetune.model.experts.experts_forward import (
    expert_modules,
    expert_parameters,
    is_transposed,
    router_parameters,
    stored_by_expert,
)
from lean_finetune.model.experts.grouped_matmul import BLOCK_WEIGHTS, BYTE_LEVELS, LEVELS_4BIT, NESTED_BLOCK_VALUES
from lean_finetune.model.files.quantized_checkpoint import kept_modules
from lean_finetune.model.precision import adapter_dtype, base_dtype
from lean_finetune.step.run_optimizer import is_paged

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
MASTER_WEIGHTS = "master weights"
IN_RAM = {STEP_COUNTS, CODE_BOOK_TABLES}
"""Descriptions of state that stays in memory where the rest is on disk."""

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class StateLine:
    """Tensors of one kind and category."""

    category: str
    what: str
    """Description for users: what the tensors are and how large each value is."""
    tensor_bytes: tuple[int, ...]
    """Size of each tensor."""
    divides: bool = True
    """Whether these tensors are sharded across GPUs; else every GPU has all of them."""

    @classmethod
    def of(cls, category: str, what: str, sizes: Iterable[int]) -> "StateLine":
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


def by_type(category: str, what: str, tensors: Sequence[Trained], times: Sequence[int] = (1,)) -> Iterator[StateLine]:
    """A line for each type of these tensors: tensors of `times` as many values. `what` may have {type} and {size}."""
    for size, name in ((FP32_BYTES, "fp32"), (FP32_BYTES // 2, "bf16")):
        if chosen := [tensor.bytes for tensor in tensors if tensor.value_bytes == size]:
            yield StateLine.of(
                category, what.format(type=name, size=size), (n * part for n in chosen for part in times)
            )


def optimizer_tensors(trained: Sequence[Trained], name: OptimizerName, *, cuda: bool) -> Iterator[StateLine]:
    """State tensors, by category OPTIMIZER or PAGED, for parameters of these shapes and types."""
    kind = OPTIMIZERS[name]
    if kind.factored:
        yield from _factored([tensor.shape for tensor in trained])
    elif kind.state_bits == 8:
        yield from _moments_8bit([tensor.values for tensor in trained], kind, name, cuda)
    elif kind.state:
        yield from _moments(trained, kind, name, cuda)


def _moments(trained: Sequence[Trained], kind: OptimizerEntry, name: OptimizerName, cuda: bool) -> Iterator[StateLine]:
    """Moments in fp32 or in the parameter's own type, and PyTorch's fp32 count of steps per tensor."""
    if kind.state_bits is not None:
        trained = [replace(tensor, value_bytes=kind.state_bits // 8) for tensor in trained]
    what = f"{_count(kind)}, {{size}} bytes each per trained value"
    for category in (OPTIMIZER, PAGED):
        chosen = [one for one in trained if is_paged(name, one.values, cuda=cuda) == (category == PAGED)]
        yield from by_type(category, what, chosen, tuple(kind.state.values()))
    if kind.step_count == "device" or (kind.step_count == "host" and not cuda):
        yield StateLine.of(OPTIMIZER, STEP_COUNTS, (FP32_BYTES for _ in trained))


def _moments_8bit(values: Sequence[int], kind: OptimizerEntry, name: OptimizerName, cuda: bool) -> Iterator[StateLine]:
    """Moments of one byte with block scales (Dettmers et al. 2021, arXiv 2110.02861); small tensors have fp32."""
    large = [n for n in values if n >= SMALLEST_8BIT_VALUES]
    small = [n for n in values if n < SMALLEST_8BIT_VALUES]
    parts = tuple(kind.state.values())
    what = f"{_count(kind)}, a byte each per trained value"
    for category in (OPTIMIZER, PAGED):
        chosen = [n for n in large if is_paged(name, n, cuda=cuda) == (category == PAGED)]
        yield StateLine.of(category, what, (n * part for n in chosen for part in parts))
    scales = (-(-n // STATE_BLOCK_VALUES) * FP32_BYTES * part for n in large for part in parts)
    yield StateLine.of(OPTIMIZER, f"their scales, fp32 per {STATE_BLOCK_VALUES} values", scales)
    tensors = f"{_count(kind)}, fp32, of tensors below {SMALLEST_8BIT_VALUES} values"
    yield StateLine.of(OPTIMIZER, tensors, (n * FP32_BYTES * part for n in small for part in parts))
    books = min(CODE_BOOKS, len(parts)) * bool(large) if cuda else CODE_BOOKS
    yield StateLine.of(OPTIMIZER, CODE_BOOK_TABLES, (BYTE_LEVELS * FP32_BYTES for _ in range(books)))


def _factored(trained: Sequence[Shape]) -> Iterator[StateLine]:
    """Adafactor: a value per row and one per column of a matrix, one per value of a vector."""
    matrices = [shape for shape in trained if len(shape) >= 2]
    sums = (n * FP32_BYTES for shape in matrices for n in (math.prod(shape[:-1]), math.prod(shape[:-2] + shape[-1:])))
    yield StateLine.of(OPTIMIZER, "mean squares of rows and of columns, fp32", sums)
    yield StateLine.of(
        OPTIMIZER, "mean squares of vectors, fp32", (shape[0] * FP32_BYTES for shape in trained if len(shape) < 2)
    )
    yield StateLine.of(OPTIMIZER, "a size per tensor", (FP32_BYTES for _ in trained))


def _count(kind: OptimizerEntry) -> str:
    """The number of moments, in words."""
    moments = kind.values_per_trained_value
    number = {1: "one", 2: "two", 3: "three"}.get(moments, str(moments))
    return f"{number} moment{'s' * (moments > 1)}"


# Closed forms of training state: bytes of weights, adapters, gradients and optimizer state, from shapes alone.
#
# They follow from the shapes of a model's parameters and a few rules, each with its source. Tests compare them with
# the trace, which counts the same bytes tensor by tensor. Their lines explain why a category is as large as it is.

PACKED_BITS: Mapping[str, int] = {"qlora": 4, "int8_lora": 8}
"""Bits of a quantised weight, by method."""
DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True, kw_only=True)
class ParameterShape:
    """Shape of a parameter; tied parameters count once."""

    name: str
    shape: tuple[int, ...]
    linear: bool
    """The weight of a linear layer that is quantised: not the head, nor a layer that packed files have in 16 bits."""
    adaptable: bool
    """The weight of a layer that `all-linear` adapts."""
    experts: int = 0
    """Number of experts whose weights this is: a projection of all experts of a layer, (E, N, K) or (E, K, N)."""
    transposed: bool = False
    """Whether the weights of experts are (E, K, N)."""
    router: bool = False
    """A parameter of a router."""
    of_tokens: bool = False
    """The weight of the embedding or of the head: a row for each token."""
    frozen: bool = False
    """The family's code never trains it: the bias by which ERNIE's routers balance their experts."""
    fp32_in: frozenset[torch.dtype] = frozenset()
    """Types of the other weights in which the family keeps this one in fp32."""
    part: str | None = None
    """The kind of the part beside decoder and head that it is in."""

    @property
    def values(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def packable(self) -> bool:
        """Whether methods qlora and int8_lora quantise it."""
        return self.linear or self.experts > 0


@dataclass(frozen=True, kw_only=True)
class ModelShapes:
    """Shapes of a model's parameters and sizes of its buffers."""

    parameters: tuple[ParameterShape, ...]
    buffer_bytes: tuple[int, ...]
    experts_per_token: int | None = None
    """Of a mixture; None if its config does not say."""
    stored_by_expert: bool = False
    """Whether the model's files have a tensor for each expert."""
    tied: bool = False
    """Whether the head's weight is the embedding's."""
    in_parts: bool = False
    """Whether shapes are a GPU's parts of tensor-parallel weights, whose 4-bit scales are not quantised."""

    @property
    def values(self) -> int:
        """Number of elements of all parameters: the size by which a model is known."""
        return sum(parameter.values for parameter in self.parameters)

    @cached_property
    def active_values(self) -> int:
        """Number of elements that a token is multiplied by: of experts, those that its router chooses."""
        chosen = self.experts_per_token
        return sum(p.values * (chosen or p.experts) // p.experts if p.experts else p.values for p in self.parameters)


def model_shapes(config: PretrainedConfig, tensor_parallel: int = 1) -> ModelShapes:
    """Shapes of a model's parameters, without allocating them; with tensor parallelism those of a GPU's parts.

    Raises:
        UserError: tensor parallelism cannot shard the model so.
    """
    model = meta_model(config)
    parts: Mapping[int, tuple[int, ...]] = {}
    if tensor_parallel > 1:  # Here: one GPU needs no code of several.
        from lean_finetune.distributed.tensor_shards import divided_shapes

        parts = divided_shapes(model, tensor_parallel)
    head = model.get_output_embeddings()
    named = [(n, m) for n, m in model.named_modules() if isinstance(m, (nn.Linear, Conv1D)) and m is not head]
    layers = [layer for _, layer in named]
    linear = {id(layer.weight) for name, layer in named if should_convert_module(name, kept_modules(config))}
    transposed = {id(layer.weight) for layer in layers if isinstance(layer, Conv1D)}  # GPT-2's are inputs × outputs.
    adaptable = {id(layer.weight) for layer in (adaptable_layers(model) if adapts_by_name(model) else layers)}
    experts = {id(getattr(m, name)): m for _, m in expert_modules(model) for name in expert_parameters(m)}
    routers = {id(parameter) for parameter in router_parameters(model).values()}
    of_tokens = {id(layer.weight) for layer in token_layers(model)}
    kept = {dtype: kept_in_fp32(model, dtype) for dtype in (torch.bfloat16, torch.float16)}
    part_of = part_kinds(model)
    parameters = tuple(
        ParameterShape(
            name=name,
            shape=parts.get(id(parameter))
            or tuple(parameter.shape[::-1] if id(parameter) in transposed else parameter.shape),
            linear=id(parameter) in linear,
            adaptable=id(parameter) in adaptable,
            experts=len(parameter) if id(parameter) in experts else 0,
            transposed=id(parameter) in experts and is_transposed(experts[id(parameter)]),
            router=id(parameter) in routers,
            of_tokens=id(parameter) in of_tokens,
            frozen=not parameter.requires_grad,
            fp32_in=frozenset(dtype for dtype, names in kept.items() if name in names),
            part=part_of.get(name),
        )
        for name, parameter in model.named_parameters()
    )
    buffers = tuple(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    return ModelShapes(
        parameters=parameters,
        buffer_bytes=buffers,
        experts_per_token=getattr(config.get_text_config(), "num_experts_per_tok", None),
        stored_by_expert=stored_by_expert(config),
        tied=head is not None and head.weight is model.get_input_embeddings().weight,
        in_parts=tensor_parallel > 1,
    )


def state_lines(
    shapes: ModelShapes, setting: Setting, *, cuda: bool, trained: Sequence[Trained] | None = None
) -> tuple[StateLine, ...]:
    """What the device's allocator holds at the end of backward, without activations; lines without tensors left out.

    Each gradient is a block. Those of adapters that compute together (train.lora.joined) are parts of one, which a
    trace counts: less by what the allocator rounds each of them up.

    Paged optimizer state is in `paged_lines`, what train.offload moves is in `process_memory.py`. `trained` are the
    trained tensors that count; None = all.
    """
    train, masters = setting.train, setting.train.master_weights
    if setting.train.offload == "parameters":
        return tuple(line for line in (*_quantisation_lines(shapes, train), _buffers(shapes)) if line.tensor_bytes)
    trained_alone = {parameter.name for parameter in trained_parts(shapes, train)}
    frozen = tuple(parameter for parameter in shapes.parameters if parameter.name not in trained_alone)
    lines = weight_lines(replace(shapes, parameters=frozen), train)
    if book := kept_book_bytes(setting, cuda=cuda):
        lines.append(StateLine.of(QUANTISATION_STATE, "the code book that those of scales are copies of", (book,)))
    trained = trained_tensors(shapes, train) if trained is None else trained
    updated = updated_tensors(trained, masters=masters)
    if train.method != "full":
        kind = "DoRA" if train.lora.dora else "LoRA"
        copies = f" and copies of {', '.join(train.lora.modules_to_save)}" if train.lora.modules_to_save else ""
        copies += "".join(f" and the {part} part" for part, mode in TOWER.modes(train).items() if mode == "full")
        copies += f" and rows of {len(train.lora.trainable_tokens)} tokens" if train.lora.trainable_tokens else ""
        lines += by_type(ADAPTERS, f"{kind} of rank {train.lora.rank}{copies}, {{type}}", trained)
        if train.lora.changes_frozen_weights and not cuda:
            adapted = {parameter.name for parameter in adapted_weights(shapes, train)}
            first = (t.values * FP32_BYTES for t in trained if t.name in adapted and len(t.shape) == 2)
            lines.append(StateLine.of(ADAPTERS, "adapters at the start, fp32", first))
    if not setting.train.optimizer_in_backward:
        lines += by_type(GRADIENTS, "one per trained value, {size} bytes", trained)
    if setting.train.offload == "none":
        if masters:
            lines += by_type(OPTIMIZER, f"{MASTER_WEIGHTS}, {{type}}", updated)
        states = optimizer_tensors(updated, setting.train.optimizer, cuda=cuda)
        lines += [line for line in states if line.category == OPTIMIZER]
    return tuple(line for line in lines if line.tensor_bytes)


def paged_lines(shapes: ModelShapes, setting: Setting, *, cuda: bool) -> tuple[StateLine, ...]:
    """Optimizer state in managed memory: on the device while there is room, else on the host."""
    updated = updated_tensors(trained_tensors(shapes, setting.train), masters=setting.train.master_weights)
    states = optimizer_tensors(updated, setting.train.optimizer, cuda=cuda)
    return tuple(line for line in states if line.category == PAGED and line.tensor_bytes)


def trained_values(shapes: ModelShapes, train: Train) -> int:
    """Number of trained values."""
    return sum(tensor.values for tensor in trained_tensors(shapes, train))


def trained_tensors(shapes: ModelShapes, train: Train) -> list[Trained]:
    """The trained tensors; an adapter's have the name of the weight that it adapts."""
    if train.method != "full":
        size = adapter_dtype(train).itemsize
        rows = [(p.name, (len(train.lora.trainable_tokens), *p.shape[1:])) for p in shapes.parameters if p.of_tokens]
        added = [
            *_adapter_shapes(shapes, train),
            *((p.name, p.shape) for p in (*copied_weights(shapes, train), *trained_parts(shapes, train))),
            *(rows if train.lora.trainable_tokens else []),
        ]
        return [Trained(name=name, shape=shape, value_bytes=size) for name, shape in added]
    trained = (
        p
        for p in shapes.parameters
        if not p.frozen and (train.router == "trained" or not p.router) and part_mode(p.part, train) != "frozen"
    )
    sizes = ((p, FP32_BYTES if base_dtype(train) in p.fp32_in else base_dtype(train).itemsize) for p in trained)
    return [Trained(name=p.name, shape=p.shape, value_bytes=size) for p, size in sizes]


def state_bytes(lines: Iterable[StateLine], *, granularity_bytes: int) -> Mapping[str, int]:
    """Bytes of each category."""
    totals: dict[str, int] = {}
    for line in lines:
        totals[line.category] = totals.get(line.category, 0) + line.total_bytes(granularity_bytes)
    return totals


def _buffers(shapes: ModelShapes) -> StateLine:
    return StateLine(category=WEIGHTS, what="buffers", tensor_bytes=shapes.buffer_bytes, divides=False)


def weight_lines(shapes: ModelShapes, train: Train) -> list[StateLine]:
    """Parameters in the type of `train.precision`, quantised ones with their scales, and buffers; without adapters."""
    bits = PACKED_BITS.get(train.method)
    plain = [p for p in shapes.parameters if bits is None or not p.packable]
    kept = [p.values * FP32_BYTES for p in plain if base_dtype(train) in p.fp32_in]
    others = [p.values * base_dtype(train).itemsize for p in plain if base_dtype(train) not in p.fp32_in]
    lines = [
        StateLine.of(WEIGHTS, f"{DTYPE_NAMES[base_dtype(train)]}, {base_dtype(train).itemsize} bytes a value", others),
        StateLine.of(WEIGHTS, "fp32, as the model's code keeps them", kept),
    ]
    if bits is not None:
        packed = [p for p in shapes.parameters if p.packable]
        what = f"{train.quant.type.upper()}, half a byte a value" if train.method == "qlora" else "int8, a byte a value"
        lines.append(StateLine.of(WEIGHTS, what, (-(-p.values * bits // 8) for p in packed)))
    return [*lines, _buffers(shapes), *_quantisation_lines(shapes, train)]


def _quantisation_lines(shapes: ModelShapes, train: Train) -> Iterator[StateLine]:
    """Scales of 4-bit weights (Dettmers 2023, arXiv 2305.14314, section 3) and 8-bit ones (2022, arXiv 2208.07339)."""
    if train.method == "int8_lora":
        packable = (p for p in shapes.parameters if p.packable)
        rows = (math.prod(p.shape[:-1] if p.experts else p.shape[:1]) * FP32_BYTES for p in packable)
        yield StateLine.of(QUANTISATION_STATE, "scales, fp32 per row of a weight", rows)
    if train.method != "qlora":
        return
    # (weights in a tensor, blocks of each, shape): all experts of a projection are in one.
    packed = [
        (p.experts or 1, -(-p.values // (p.experts or 1) // BLOCK_WEIGHTS), p) for p in shapes.parameters if p.packable
    ]
    linear = [p for _, _, p in packed if p.linear]
    if not train.quant.double or shapes.in_parts:
        scales = f"scales, fp32 per {BLOCK_WEIGHTS} values"
        yield StateLine.of(QUANTISATION_STATE, scales, (count * blocks * FP32_BYTES for count, blocks, _ in packed))
        yield StateLine.of(QUANTISATION_STATE, "code books, fp32", (LEVELS_4BIT * FP32_BYTES for _ in linear))
        return
    yield StateLine.of(
        QUANTISATION_STATE, f"scales, a byte per {BLOCK_WEIGHTS} values", (n * blocks for n, blocks, _ in packed)
    )
    scales = f"scales of scales, fp32 per {NESTED_BLOCK_VALUES} scales"
    nested = (count * -(-blocks // NESTED_BLOCK_VALUES) * FP32_BYTES for count, blocks, _ in packed)
    yield StateLine.of(QUANTISATION_STATE, scales, nested)
    books = [LEVELS_4BIT * FP32_BYTES for _ in linear] + [BYTE_LEVELS * FP32_BYTES for _ in packed]
    offsets = (count * FP32_BYTES for count, _, _ in packed)
    yield StateLine.of(QUANTISATION_STATE, "code books and an offset per weight, fp32", (*books, *offsets))


def kept_book_bytes(setting: Setting, *, cuda: bool) -> int:
    """The code book that bitsandbytes keeps where it quantised scales: on the GPU, unless several share the weights."""
    made = cuda and setting.train.method == "qlora" and setting.train.quant.double and not setting.distributed
    return BYTE_LEVELS * FP32_BYTES if made else 0


def _adapter_shapes(shapes: ModelShapes, train: Train) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names of adapted weights, with the shapes of A (rank × inputs), B (outputs × rank).

    Hu et al. 2021, arXiv 2106.09685.
    """
    for parameter in adapted_weights(shapes, train):
        if parameter.experts:
            outputs, inputs = parameter.shape[:0:-1] if parameter.transposed else parameter.shape[1:]
            yield parameter.name, (train.lora.expert_rank * parameter.experts, inputs)
            yield parameter.name, (outputs, train.lora.expert_rank * parameter.experts)
            continue
        outputs, inputs = parameter.shape
        yield parameter.name, (train.lora.rank, inputs)
        yield parameter.name, (outputs, train.lora.rank)
        if train.lora.dora:  # The length of each row of the weight (Liu et al. 2024, arXiv 2402.09353).
            yield parameter.name, (outputs,)


def copied_weights(shapes: ModelShapes, train: Train) -> Iterator[ParameterShape]:
    """Weights of which copies are trained: those of train.lora.modules_to_save, and the head of a reward model."""
    names = (*train.lora.modules_to_save, *((SCORE,) if train.scores else ()))
    for parameter in shapes.parameters:
        layer = parameter.name.rpartition(".")[0]
        if any(layer == name or layer.endswith(f".{name}") for name in names):
            yield parameter


def trained_parts(shapes: ModelShapes, train: Train) -> Iterator[ParameterShape]:
    """Weights of parts beside decoder and head that are trained themselves beside adapters, in the type of these."""
    for parameter in shapes.parameters if train.adapted else ():
        if part_mode(parameter.part, train) == "full" and TOWER.is_beside(parameter.name.rpartition(".")[0]):
            yield parameter


def adapted_weights(shapes: ModelShapes, train: Train) -> Iterator[ParameterShape]:
    """Weights of the layers that get an adapter: the head too, where train.lora.targets names it."""
    for parameter in shapes.parameters:
        if part_mode(parameter.part, train) not in (None, "lora"):
            continue
        layer = parameter.name.removesuffix(".weight")
        named = any(layer == target or layer.endswith(f".{target}") for target in train.lora.targets)
        all_linear = parameter.adaptable and train.lora.all_linear
        if named or all_linear or (parameter.experts and train.lora.experts == "all"):
            yield parameter
