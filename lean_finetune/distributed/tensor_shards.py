"""Tensor parallelism: the plan of shards, the sharded modules, and the sharded model."""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from peft.tuners.lora import LoraLayer
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel

from lean_finetune.core.errors import UserError
from lean_finetune.core.optional_bitsandbytes import bnb
from lean_finetune.distributed.replicated import sum_gradients
from lean_finetune.distributed.weight_broadcast import DIVIDED
from lean_finetune.model.experts.grouped_matmul import BLOCK_WEIGHTS
from lean_finetune.model.model_config import layer_settings
from lean_finetune.patches.of_models import VOCABULARY_SHARD
from lean_finetune.step.head_loss import VocabularyShard
from lean_finetune.step.loss import causal_lm
from lean_finetune.step.parallel_model import (
    NamedParameters,
    ParallelModel,
    Result,
    ShardSlice,
    WholeTensor,
    named_trained,
)

OUTPUTS, INPUTS = "colwise", "rowwise"
"""A process has a part of a layer's outputs (rows of its weight) or of its inputs (columns of its weight)."""
WHOLE = "replicated_with_grad_allreduce"
"""Every process has the complete weight, and applies it to its own heads: norms of queries and keys."""
HEADS = ("num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """The modules of a model that tensor parallelism changes; a linear layer with an adapter counts as one module."""

    outputs: tuple[nn.Module, ...]
    """Each process computes a part of their outputs. The head, split by tokens, is not among them."""
    inputs: tuple[nn.Module, ...]
    """Each process computes with a part of their inputs; the outputs of all processes are summed."""
    blocks: tuple[nn.Module, ...]
    """The modules around them (attention, MLP): complete inputs and outputs, parts in between."""


def tensor_plan(lm: PreTrainedModel, size: int) -> TensorPlan:
    """The plan of a model, with or without adapters, for `size` processes.

    Raises:
        UserError: the family or these sizes cannot be sharded so.
    """
    styles = _styles(lm.config)
    _refuse_sizes(lm.config, size)
    decoder = lm.get_decoder()
    found: dict[str, list[nn.Module]] = {OUTPUTS: [], INPUTS: [], WHOLE: []}
    blocks: dict[str, nn.Module] = {}
    for path, module in decoder.named_modules():
        style = styles.get(re.sub(r"\.\d+\.", ".*.", path))
        if style is None:
            continue
        found[style].append(module)
        block = path.rpartition(".")[0]
        blocks[block] = decoder.get_submodule(block)
        if style != WHOLE:
            _refuse_layer(path, module, style, size, lm.config.model_type)
    return TensorPlan(outputs=tuple(found[OUTPUTS]), inputs=tuple(found[INPUTS]), blocks=tuple(blocks.values()))


def base_layer(module: nn.Module) -> nn.Module:
    """The linear layer itself, without its adapter."""
    return module.get_base_layer() if isinstance(module, LoraLayer) else module


def _styles(config: PretrainedConfig) -> dict[str, str]:
    """The style of each module's path in the decoder, with `*` for a layer's number."""
    family, styles = config.model_type, getattr(config.get_text_config(), "base_model_tp_plan", None)
    if not styles:
        raise _refused(family, "transformers has no plan for it")
    if other := sorted(set(styles.values()) - {OUTPUTS, INPUTS, WHOLE}):
        what = "it has experts" if any(".experts" in path for path in styles) else f"its plan has {', '.join(other)}"
        raise _refused(family, f"{what}, which is not supported")
    return styles


def _refuse_sizes(config: PretrainedConfig, size: int) -> None:
    """Refuse heads that cannot be sharded."""
    for name in HEADS:
        for count in layer_settings(config, name):
            if count is not None and count % size:
                raise UserError(
                    f"train.tensor_parallel: must divide the model's {name}={count}, since a process computes whole "
                    f"heads; got {size}; choose a divisor, or train.sharding=zero3"
                )


def _refuse_layer(path: str, module: nn.Module, style: str, size: int, family: str) -> None:
    """Refuse a layer whose outputs or inputs cannot be sharded."""
    layer = base_layer(module)
    if not isinstance(layer, nn.Linear):
        raise _refused(family, f"{path} is a {type(layer).__name__}, not a linear layer")
    width = layer.out_features if style == OUTPUTS else layer.in_features
    if width % size:
        raise UserError(
            f"train.tensor_parallel: must divide the {width} {'outputs' if style == OUTPUTS else 'inputs'} of {path}; "
            f"got {size}; choose a divisor, or train.sharding=zero3"
        )


def _refused(family: str, reason: str) -> UserError:
    return UserError(
        f"train.tensor_parallel: cannot divide the layers of {family}: {reason}; set it to 1, and use "
        "train.sharding=zero3 where the model does not fit"
    )


# Shard a model's weights over tensor-parallel processes (Shoeybi et al. 2019, arXiv 1909.08053).
#
# Within a block (attention, MLP) a process computes with its own heads and channels. Its inputs and its output are the
# same in all processes: the output is a sum over them, and so is the gradient of its input. Therefore a weight of a
# block that is not divided (an adapter's A before divided outputs, its B after divided inputs, the norms of queries
# and keys) gets a part of its gradient in each process.
#
# A part is a plain tensor, so adapters, 4-bit weights, FSDP2 and all optimizers work on it unchanged.


@dataclass(frozen=True, kw_only=True)
class Part:
    """The range of a weight that a process has."""

    dim: int
    first: int
    count: int
    full_shape: tuple[int, ...]

    @classmethod
    def of(cls, shape: tuple[int, ...], dim: int, index: int, size: int) -> "Part":
        """The part of process `index` of `size`; the last parts may be smaller."""
        each = -(-shape[dim] // size)
        first = min(index * each, shape[dim])
        return cls(dim=dim, first=first, count=min(each, shape[dim] - first), full_shape=shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of this range."""
        return (*self.full_shape[: self.dim], self.count, *self.full_shape[self.dim + 1 :])

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of this range of a complete tensor."""
        return tensor.narrow(self.dim, self.first, self.count).clone(memory_format=torch.contiguous_format)


class TensorShards:
    """The parts of a model's weights that one of several processes has."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, index: int, size: int):
        """Change `model`, which still has all weights, to compute with parts; `index` is this process of `size`.

        Raises:
            UserError: the model cannot be sharded so.
        """
        lm = causal_lm(model)
        plan = tensor_plan(lm, size)
        self.group, self.index, self._size = group, index, size
        self._layers = dict(divided_layers(lm, plan))
        self._done: set[int] = set()
        dims = {id(p): dim for layer, dim in self._layers.items() for p in divided_parameters(layer, dim)}
        self.parts = {
            name: Part.of(tuple(p.shape), dims[id(p)], index, size)
            for name, p in model.named_parameters(remove_duplicate=False)
            if id(p) in dims
        }
        """The part of each sharded parameter, by its names in the model."""
        blocks = (*plan.blocks, lm.get_output_embeddings())
        inside = {id(parameter) for block in blocks for parameter in block.parameters()}
        self.partial = {name for name, p in named_trained(model) if id(p) in inside and name not in self.parts}
        """Trained parameters that are not sharded: each process computes a part of their gradient."""
        # Selective checkpointing saves the outputs of matmuls, which a sum in place would change.
        recompute = (getattr(module, "_gradient_checkpointing_func", None) for module in model.modules())
        saved = any("context_fn" in getattr(function, "keywords", {}) for function in recompute)
        for module in plan.inputs:
            _refuse_trained_bias(module)
            module.register_forward_hook(
                lambda module, args, output: _SumOfOutputs.apply(output.clone() if saved else output, group)
            )
        for block in plan.blocks:
            block.register_forward_pre_hook(_summing_gradients(group), with_kwargs=True)
        embedding: Any = lm.get_input_embeddings()
        head: Any = lm.get_output_embeddings()
        rows = Part.of(tuple(embedding.weight.shape), 0, index, size)
        _look_up_own_rows(embedding, rows, group)
        head.vocabulary_shard = VocabularyShard(group=group, first=rows.first)

    def divide(self, module: nn.Module) -> nn.Module:
        """Replace the weights below `module` by this process's parts, on its device; returns the module."""
        for layer in module.modules():
            if (dim := self._layers.pop(layer, None)) is None:
                continue
            if isinstance(layer, bnb.nn.Linear4bit):
                _divide_4bit(layer, dim, self.index, self._size)
            for parameter in divided_parameters(layer, dim):
                if id(parameter) not in self._done:
                    self._done.add(id(parameter))
                    part = Part.of(tuple(parameter.shape), dim, self.index, self._size)
                    parameter.data = part.take(parameter.data)
            if dim == 1 and self.index:  # The process with index 0 adds the bias to the sum.
                layer.register_parameter("bias", None)
        setattr(module, DIVIDED, True)
        return module

    def gather(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The complete tensor of a parameter, from this process's part; all processes call this."""
        if (part := self.parts.get(name)) is None:
            return tensor
        full = tensor.new_zeros(part.full_shape)
        full.narrow(part.dim, part.first, part.count).copy_(tensor)
        dist.all_reduce(full, group=self.group)  # The others add 0.
        return full


def divided_shapes(lm: PreTrainedModel, size: int) -> dict[int, tuple[int, ...]]:
    """The shapes of the first process's parts, by the id of the parameter.

    Raises:
        UserError: the model cannot be sharded so.
    """
    return {
        id(parameter): Part.of(tuple(parameter.shape), dim, 0, size).shape
        for layer, dim in divided_layers(lm, tensor_plan(lm, size))
        for parameter in divided_parameters(layer, dim)
    }


def divided_layers(lm: PreTrainedModel, plan: TensorPlan) -> Iterator[tuple[nn.Module, int]]:
    """Every layer whose weight is sharded, and the dimension; adapters by their own two layers."""
    outputs, inputs = (*plan.outputs, lm.get_output_embeddings()), plan.inputs
    for modules, dim, adapter in ((outputs, 0, "lora_B"), (inputs, 1, "lora_A")):
        for module in modules:
            yield base_layer(module), dim
            if isinstance(module, LoraLayer):
                yield from ((layer, dim) for layer in getattr(module, adapter).values())
    yield lm.get_input_embeddings(), 0


def divided_parameters(layer: nn.Module, dim: int) -> Iterator[nn.Parameter]:
    """The parameters of a layer that are sharded along `dim`; a 4-bit weight is packed, and not among them."""
    for name, parameter in layer.named_parameters(recurse=False):
        if parameter.ndim > dim and not (name == "weight" and isinstance(layer, bnb.nn.Linear4bit)):
            yield parameter


def _divide_4bit(layer: Any, dim: int, index: int, size: int) -> None:
    """Replace a packed weight by a part of it, with the same values.

    Scales that are quantised themselves have blocks over the complete weight; the scales of a part become fp32.

    Raises:
        UserError: a block of values with one scale would belong to two processes.
    """
    state = layer.quant_state
    shape = torch.Size(Part.of(tuple(state.shape), dim, index, size).shape)
    if state.shape[1] % BLOCK_WEIGHTS or shape[1] % BLOCK_WEIGHTS:
        raise UserError(
            f"train.tensor_parallel: 4-bit weights have a scale for {BLOCK_WEIGHTS} inputs, which must divide the "
            f"{shape[1]} inputs that a process has of {state.shape[1]}; got {size}; lower it, or use train.method=lora"
        )
    scales = (
        bnb.functional.dequantize_blockwise(state.absmax, state.state2) + state.offset if state.nested else state.absmax
    )

    def part_of(values: torch.Tensor) -> torch.Tensor:
        """The part of a tensor with one value for some inputs of an output."""
        rows = values.view(state.shape[0], -1)
        return Part.of(tuple(rows.shape), dim, index, size).take(rows).flatten()

    layer.weight.data = part_of(layer.weight.data).view(-1, 1)
    layer.quant_state = layer.weight.quant_state = bnb.functional.QuantState(
        absmax=part_of(scales.float()),
        shape=shape,
        code=state.code,
        dtype=state.dtype,
        blocksize=state.blocksize,
        quant_type=state.quant_type,
    )


def _refuse_trained_bias(module: nn.Module) -> None:
    """Refuse to train the bias of a layer whose outputs are summed: only the process that adds it gets its gradient."""
    layer: Any = base_layer(module)
    if layer.bias is not None and layer.bias.requires_grad:
        raise UserError(
            "train.tensor_parallel: cannot train the biases of layers whose outputs are summed over GPUs, as this "
            "model has; got train.method=full; use train.method=lora, or train.sharding=zero3"
        )


def _summing_gradients(group: dist.ProcessGroup) -> Callable[..., Any]:
    """A hook before a block's forward: the gradient of its input is the sum over all processes."""

    def hook(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (_SumOfGradients.apply(args[0], group), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": _SumOfGradients.apply(kwargs["hidden_states"], group)}

    return hook


def _look_up_own_rows(embedding: Any, rows: Part, group: dist.ProcessGroup) -> None:
    """Change an embedding to look up the tokens of its rows, 0 for others, and sum over all processes."""
    forward, padding = embedding.forward, embedding.padding_idx
    own_padding = padding is not None and rows.first <= padding < rows.first + rows.count
    embedding.padding_idx = padding - rows.first if own_padding else None

    def look_up(input_ids: torch.Tensor) -> torch.Tensor:
        own_ids = input_ids - rows.first
        others = (own_ids < 0) | (own_ids >= rows.count)
        hidden = forward(own_ids.masked_fill_(others, 0)).masked_fill(others[..., None], 0.0)
        summed: torch.Tensor = _SumOfOutputs.apply(hidden, group)
        return summed

    VOCABULARY_SHARD.give_method(embedding, look_up)


class _SumOfOutputs(torch.autograd.Function):
    """The sum over all processes, in place; the gradient of each part equals the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.mark_dirty(part)
        dist.all_reduce(part, group=group)
        return part

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _SumOfGradients(torch.autograd.Function):
    """The input itself; its gradient is the sum over all processes.

    It is summed in place: the layers that use the input are linear, so no other tensor aliases its gradient.
    """

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


# Tensor parallelism (train.tensor_parallel) around any way of sharing weights (train.sharding).


class TensorParallelModel(ParallelModel):
    """A `ParallelModel` in which each process has parts of weights; `inner` shards or replicates these parts."""

    def __init__(self, inner: ParallelModel, shards: TensorShards):
        """`inner` shards or replicates this process's parts among the processes that have the same parts."""
        super().__init__(inner.model, rank=inner.rank, size=inner.size, layout=inner.layout)
        self._inner, self._shards, self.local_shard = inner, shards, inner.local_shard

    def run(self, compute: Callable[[nn.Module], Result]) -> Result:
        """See ParallelModel."""
        return self._inner.run(compute)

    @contextmanager
    def gradient_sync(self, *, last: bool) -> Iterator[None]:
        """See ParallelModel."""
        with self._inner.gradient_sync(last=last):
            yield
        # Once a step is enough: sums over micro-batches and over processes may be taken in either order.
        if last:
            trained = self._inner.trained_parameters()
            sum_gradients([(n, p) for n, p in trained if n in self._shards.partial and p.numel()], self._shards.group)

    def trained_parameters(self) -> NamedParameters:
        """See ParallelModel."""
        return self._inner.trained_parameters()

    def slices(self) -> list[ShardSlice]:
        """See ParallelModel: a sharded parameter is saved under a name of this part."""
        first = self.place.tensor == 0
        return [
            replace(piece, part=f"@{self.place.tensor}/{self.layout.tensor}")
            if name in self._shards.parts
            else replace(piece, saved_here=piece.saved_here and first)
            for (name, _), piece in zip(self.trained_parameters(), self._inner.slices(), strict=True)
        ]

    def gradient_norm(self, gradients: Iterable[torch.Tensor], *, foreach: bool) -> torch.Tensor:
        """See ParallelModel: gradients of undivided weights count once."""
        own = {id(p.grad) for name, p in self.trained_parameters() if name in self._shards.parts}
        parts: dict[bool, list[torch.Tensor]] = {True: [], False: []}
        for gradient in gradients:
            parts[id(gradient) in own].append(gradient)
        squared = self._inner.gradient_norm(parts[True], foreach=foreach).float().square()
        dist.all_reduce(squared, group=self._shards.group)
        if any(name not in self._shards.parts for name, _ in self.trained_parameters()):
            squared += self._inner.gradient_norm(parts[False], foreach=foreach).float().square()
        return squared.sqrt()

    def end_step(self, *, updated: bool) -> None:
        """See ParallelModel."""
        self._inner.end_step(updated=updated)

    def whole(self, name: str, tensor: torch.Tensor) -> torch.Tensor | WholeTensor:
        """See ParallelModel."""
        if (part := self._shards.parts.get(name)) is None:
            return tensor

        def read() -> torch.Tensor:
            return self._shards.gather(name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)

        return WholeTensor(dtype=tensor.dtype, shape=part.full_shape, read=read)

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See ParallelModel."""
        return ((name, self._shards.gather(name, part)) for name, part in self._inner.full_parameters())
