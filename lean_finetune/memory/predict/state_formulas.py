"""What training holds from step to step, by arithmetic alone: the closed form beside the trace.

Weights, quantisation state, adapters, gradients and optimizer state follow from the shapes of a model's parameters and
a few rules, each with its source. The trace counts the same bytes tensor by tensor; that both agree is tested, and the
lines made here say why a category is as large as it is.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.pytorch_utils import Conv1D

from lean_finetune.config.field_types import OffloadState, OptimizerName
from lean_finetune.config.schema import ALL_LINEAR
from lean_finetune.memory.predict.optimizer_states import optimizer_tensors
from lean_finetune.memory.trace.memory_trace import ADAPTERS, GRADIENTS, OPTIMIZER, QUANTISATION_STATE, WEIGHTS
from lean_finetune.model.empty_model import meta_model
from lean_finetune.model.model_spec import ModelSpec
from lean_finetune.model.quantize import BLOCK_WEIGHTS, BYTE_LEVELS, LEVELS_4BIT, NESTED_BLOCK_VALUES
from lean_finetune.step.host_transfer import STAGING_BYTES

FP32_BYTES = 4
PAGED = "paged_optimizer"
"""Category of optimizer state in managed memory: no part of what the device's allocator holds."""
ON_HOST = "host_optimizer"
"""Category of optimizer state in the host's memory (train.offload), of weights too: no part of it either."""
NF4_BITS = 4
PACKED_BITS: Mapping[str, int] = {"qlora": NF4_BITS, "int8_lora": 8}
"""Bits of a frozen weight, by method."""
DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True, kw_only=True)
class ParameterShape:
    """A parameter, tied ones once."""

    name: str
    shape: tuple[int, ...]
    linear: bool
    """The weight of a linear layer other than the head: what is quantised, and what "all-linear" adapts."""

    @property
    def values(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class ModelShapes:
    """All that a model's states depend on."""

    parameters: tuple[ParameterShape, ...]
    buffer_bytes: tuple[int, ...]
    """Sizes of the tensors that are no parameters: tables of rotary frequencies."""

    @property
    def values(self) -> int:
        """Numbers in all parameters: what a model's size is quoted in."""
        return sum(parameter.values for parameter in self.parameters)


@dataclass(frozen=True, kw_only=True)
class Line:
    """Tensors of one kind and category."""

    category: str
    what: str
    """For people: what the tensors are and how large each value is."""
    tensor_bytes: tuple[int, ...]
    """Size of each tensor."""
    divides: bool = True
    """Whether GPUs that share what is of its category hold a part each; else each holds all."""

    def total_bytes(self, granularity_bytes: int, parts: int = 1) -> int:
        """Their sum, of each tensor one of so many parts, rounded up to a multiple of `granularity_bytes`.

        A count of steps is one value, which no part lacks.
        """
        parts = parts if self.divides else 1
        rounded = (-(-size // (parts if size > FP32_BYTES else 1)) for size in self.tensor_bytes)
        return sum(-(-size // granularity_bytes) * granularity_bytes for size in rounded)


def model_shapes(config: PretrainedConfig) -> ModelShapes:
    """Shapes of a model's parameters, without memory for them."""
    model = meta_model(config)
    head = model.get_output_embeddings()
    layers = [m for m in model.modules() if isinstance(m, (nn.Linear, Conv1D)) and m is not head]
    linear = {id(layer.weight) for layer in layers}
    turned = {id(layer.weight) for layer in layers if isinstance(layer, Conv1D)}  # GPT-2's are inputs × outputs.
    parameters = tuple(
        ParameterShape(
            name=name,
            shape=tuple(parameter.shape[::-1] if id(parameter) in turned else parameter.shape),
            linear=id(parameter) in linear,
        )
        for name, parameter in model.named_parameters()
    )
    buffers = tuple(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    return ModelShapes(parameters=parameters, buffer_bytes=buffers)


def state_lines(
    shapes: ModelShapes,
    spec: ModelSpec,
    optimizer: OptimizerName,
    *,
    cuda: bool,
    master_weights: bool,
    offload: OffloadState = "none",
    optimizer_in_backward: bool = False,
) -> tuple[Line, ...]:
    """Everything the device's allocator holds at the end of backward, by kind of tensor; none without tensors.

    Paged state is managed memory on CUDA and stands apart, see `paged_lines`; so does the host's, see `host_lines`.
    """
    if offload == "parameters":
        stay = [*_quantisation_lines(shapes, spec), _buffers(shapes)]
        return tuple(line for line in stay if line.tensor_bytes)
    lines = [*_weight_lines(shapes, spec), *_quantisation_lines(shapes, spec)]
    element_bytes = spec.dtype.itemsize
    trained, element_bytes = _trained(shapes, spec)
    sizes = [math.prod(shape) * element_bytes for shape in trained]
    if spec.method != "full":
        kind = "DoRA" if spec.lora_dora else "LoRA"
        name = "fp32" if element_bytes == FP32_BYTES else "bf16"
        lines.append(_line(ADAPTERS, f"{kind} of rank {spec.lora_rank}, {name}", sizes))
        if spec.keeps_first_adapters and not cuda:
            start = (math.prod(shape) * FP32_BYTES for shape in trained)
            lines.append(_line(ADAPTERS, "adapters at the start, fp32", start))
    if not optimizer_in_backward:
        lines.append(_line(GRADIENTS, f"one per trained value, {element_bytes} bytes", sizes))
    if offload == "none":
        if master_weights:
            copies = (math.prod(shape) * FP32_BYTES for shape in trained)
            lines.append(_line(OPTIMIZER, "master weights, fp32", copies))
        kept = optimizer_tensors(trained, FP32_BYTES if master_weights else element_bytes, optimizer, cuda=cuda)
        lines += [_line(OPTIMIZER, each.what, each.tensor_bytes) for each in kept if not each.paged]
    return tuple(line for line in lines if line.tensor_bytes)


def host_lines(
    shapes: ModelShapes,
    spec: ModelSpec,
    optimizer: OptimizerName,
    *,
    master_weights: bool,
    offload: OffloadState = "optimizer",
) -> tuple[Line, ...]:
    """What train.offload keeps in the host's memory."""
    if offload == "parameters":
        # All that a device would hold but what stays on it, updated by the host.
        held = state_lines(shapes, spec, optimizer, cuda=False, master_weights=master_weights)
        stay = state_lines(shapes, spec, optimizer, cuda=False, master_weights=master_weights, offload=offload)
        return tuple(replace(line, category=ON_HOST) for line in held if line not in stay)
    trained, element_bytes = _trained(shapes, spec)
    copy_bytes = FP32_BYTES if master_weights else element_bytes
    values = [math.prod(shape) for shape in trained]
    name = "fp32" if copy_bytes == FP32_BYTES else "bf16"
    return (
        _line(ON_HOST, f"copies of the weights, {name}", (count * copy_bytes for count in values)),
        *(
            _line(ON_HOST, each.what, each.tensor_bytes)
            for each in optimizer_tensors(trained, copy_bytes, optimizer, cuda=False)
            if each.tensor_bytes
        ),
        _line(ON_HOST, f"room for the largest gradient, {name}", (max(values) * copy_bytes,)),
        _line(ON_HOST, "buffer on the way, page-locked", (min(STAGING_BYTES, max(values) * element_bytes),)),
    )


def trained_values(shapes: ModelShapes, spec: ModelSpec) -> int:
    """Numbers that are trained."""
    return sum(math.prod(shape) for shape in _trained(shapes, spec)[0])


def paged_lines(
    shapes: ModelShapes, spec: ModelSpec, optimizer: OptimizerName, *, cuda: bool, master_weights: bool
) -> tuple[Line, ...]:
    """Optimizer state in managed memory: on the device while there is room, else on the host."""
    trained, element_bytes = _trained(shapes, spec)
    kept = optimizer_tensors(trained, FP32_BYTES if master_weights else element_bytes, optimizer, cuda=cuda)
    return tuple(_line(PAGED, each.what, each.tensor_bytes) for each in kept if each.paged and each.tensor_bytes)


def _trained(shapes: ModelShapes, spec: ModelSpec) -> tuple[list[tuple[int, ...]], int]:
    """Shapes of the trained tensors, and bytes of a value of theirs."""
    if spec.method == "full":
        return [parameter.shape for parameter in shapes.parameters], spec.dtype.itemsize
    return list(_adapter_shapes(shapes, spec)), spec.adapter_dtype.itemsize


def state_bytes(lines: Iterable[Line], *, granularity_bytes: int) -> Mapping[str, int]:
    """Bytes of each category."""
    totals: dict[str, int] = {}
    for line in lines:
        totals[line.category] = totals.get(line.category, 0) + line.total_bytes(granularity_bytes)
    return totals


def _line(category: str, what: str, sizes: Iterable[int]) -> Line:
    """A line from the sizes of its tensors."""
    return Line(category=category, what=what, tensor_bytes=tuple(sizes))


def _buffers(shapes: ModelShapes) -> Line:
    """What is no parameter."""
    return Line(category=WEIGHTS, what="buffers", tensor_bytes=shapes.buffer_bytes, divides=False)


def _weight_lines(shapes: ModelShapes, spec: ModelSpec) -> Iterator[Line]:
    """Parameters in the type of `train.precision`, packed ones at half a byte or a byte."""
    bits = PACKED_BITS.get(spec.method)
    packed = [p for p in shapes.parameters if p.linear and bits is not None]
    plain = [p for p in shapes.parameters if not (p.linear and bits is not None)]
    element_bytes = spec.dtype.itemsize
    name = DTYPE_NAMES[spec.dtype]
    yield _line(WEIGHTS, f"{name}, {element_bytes} bytes a value", (p.values * element_bytes for p in plain))
    if bits is not None:
        what = f"{spec.quant_type.upper()}, half a byte a value" if bits == NF4_BITS else "int8, a byte a value"
        yield _line(WEIGHTS, what, (-(-p.values * bits // 8) for p in packed))
    yield _buffers(shapes)


def _quantisation_lines(shapes: ModelShapes, spec: ModelSpec) -> Iterator[Line]:
    """Scales of 4 bits (Dettmers et al. 2023, arXiv 2305.14314, section 3) and of 8 (2022, arXiv 2208.07339)."""
    if spec.method == "int8_lora":
        rows = (p.shape[0] * FP32_BYTES for p in shapes.parameters if p.linear)
        yield _line(QUANTISATION_STATE, "scales, fp32 per row of a weight", rows)
    if spec.method != "qlora":
        return
    blocks = [-(-p.values // BLOCK_WEIGHTS) for p in shapes.parameters if p.linear]
    if not spec.double_quant:
        scales = f"scales, fp32 per {BLOCK_WEIGHTS} values"
        yield _line(QUANTISATION_STATE, scales, (count * FP32_BYTES for count in blocks))
        yield _line(QUANTISATION_STATE, "code books, fp32", (LEVELS_4BIT * FP32_BYTES for _ in blocks))
        return
    nested = [-(-count // NESTED_BLOCK_VALUES) for count in blocks]
    yield _line(QUANTISATION_STATE, f"scales, a byte per {BLOCK_WEIGHTS} values", blocks)
    scales = f"scales of scales, fp32 per {NESTED_BLOCK_VALUES} scales"
    yield _line(QUANTISATION_STATE, scales, (count * FP32_BYTES for count in nested))
    books = (levels * FP32_BYTES for levels in (LEVELS_4BIT, BYTE_LEVELS, 1) for _ in blocks)
    yield _line(QUANTISATION_STATE, "code books and an offset per layer, fp32", books)


def _adapter_shapes(shapes: ModelShapes, spec: ModelSpec) -> Iterator[tuple[int, ...]]:
    """Shapes of A (rank × inputs), B (outputs × rank) of each adapted layer (Hu et al. 2021, arXiv 2106.09685)."""
    for parameter in adapted_weights(shapes, spec):
        outputs, inputs = parameter.shape
        yield spec.lora_rank, inputs
        yield outputs, spec.lora_rank
        if spec.lora_dora:  # The length of each row of the weight (Liu et al. 2024, arXiv 2402.09353).
            yield (outputs,)


def adapted_weights(shapes: ModelShapes, spec: ModelSpec) -> Iterator[ParameterShape]:
    """The weights of the layers that get an adapter; the head, which is not packed, where it is named."""
    for parameter in shapes.parameters:
        layer = parameter.name.removesuffix(".weight")
        named = any(layer == target or layer.endswith(f".{target}") for target in spec.lora_targets)
        if named or (parameter.linear and spec.lora_targets == (ALL_LINEAR,)):
            yield parameter


@dataclass(frozen=True, kw_only=True)
class BytesPerValue:
    """Bytes that full training holds per parameter under a scheme of mixed precision."""

    weights: int
    master: int
    """A copy of the weights that the update is made on; 0 where there is none."""
    gradients: int
    moments: int
    """Both together."""

    @property
    def prepared(self) -> int:
        """Before the first step, where the optimizer makes its moments in it."""
        return self.weights + self.master

    @property
    def after_backward(self) -> int:
        """With gradients."""
        return self.prepared + self.gradients

    @property
    def in_update(self) -> int:
        """With gradients and moments: what every later step holds."""
        return self.after_backward + self.moments


PURE_BF16 = BytesPerValue(weights=2, master=0, gradients=2, moments=4)
"""Weights, gradients and moments all bf16."""
BF16_WITH_FP32_MOMENTS = BytesPerValue(weights=2, master=0, gradients=2, moments=8)
BF16_WITH_FP32_MASTER = BytesPerValue(weights=2, master=4, gradients=2, moments=8)
"""bf16 weights and gradients, fp32 master weights and moments: 16 bytes (Rajbhandari et al. 2020, arXiv 1910.02054)."""
PURE_FP32 = BytesPerValue(weights=4, master=0, gradients=4, moments=8)
