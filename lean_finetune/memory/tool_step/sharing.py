"""How other tools share a training step among several GPUs: PyTorch's own FSDP1 on fake tensors, and DDP's buckets."""

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # noqa: F401 - gives collectives their shape functions
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PretrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from lean_finetune.config.schema import Train
from lean_finetune.core.errors import UserError
from lean_finetune.core.optional_bitsandbytes import bnb
from lean_finetune.memory.tool_step.deepspeed import Zero, zero_of
from lean_finetune.memory.tool_step.tool_step import ToolStep
from lean_finetune.memory.trace.fake_distributed import counting_resized, following_streams, set_quant_state
from lean_finetune.memory.trace.memory_trace import SHARDING, MemoryTrace
from lean_finetune.memory.trace.setting import Setting
from lean_finetune.patches.of_traces import QUANT_STATE, SAME_STORAGE

# FSDP1 joins the weights of a unit (a decoder layer; each trained matrix of an adapter; the rest) into one flat tensor,
# of which each process stores a part. Frozen and trained weights are in different units, so a flat tensor is of one
# type. The code is PyTorch's; only three things differ on fake tensors: resized storages are counted again, storages
# are compared by identity, and collectives have no values.
#
# What makes FSDP1's runs of adapters larger than a run on one GPU: a frozen unit has no gradient whose accumulation
# could trigger its release, so FSDP1 hooks the gradients of the unit's inputs. If checkpointing is around the unit (in
# transformers, before layers were GradientCheckpointingLayers), the inputs are leaves made for the recomputation. The
# hook's closure keeps each of them, and the gradient that accumulates in it, until backward ends. So at the end of
# backward all saved inputs exist still, and the gradient of every layer's input besides.

Result = TypeVar("Result")
ACCELERATED = ("TRL", "LLaMA-Factory", "Axolotl", "ms-swift")
"""Tools that share a run by accelerate."""
OTHER_FSDP = ("shard_grad_op", "hybrid_shard", "no_shard", "offload auto_wrap", "full_shard offload")
"""Values of other strategies than full_shard, in what a configuration says of FSDP."""


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """How the processes of a tool share a run."""

    kind: Literal["fsdp1", "fsdp1_no_shard", "ddp", "zero"]
    """fsdp1_no_shard: flat tensors, but every process has all weights."""
    gpus: int
    mixed_precision: bool = False
    """FSDP1 gathers 16-bit copies of its shards, and reduces gradients in 16 bits."""
    zero: Zero | None = None
    """Of DeepSpeed, which kind `zero` has."""
    recomputed_outside: bool = True
    """Checkpointing is around FSDP1's units, not inside them."""


class Shared:
    """A model in one of the processes."""

    def __init__(self, model: nn.Module, root: Fsdp1 | None = None):
        """`root`: FSDP1 around the model."""
        self.model, self._root = model, root

    def run(self, compute: Callable[[], Result]) -> Result:
        """Run the forward pass with the loss, which reads the head's weight: one call of the root module."""
        return compute() if self._root is None else self._root(compute)

    def clip(self, trained: Iterable[torch.Tensor]) -> None:
        """Limit the norm of all gradients."""
        if self._root is None:
            torch.nn.utils.clip_grad_norm_(trained, 1.0, foreach=True)
        else:
            self._root.clip_grad_norm_(1.0)


class _Root(nn.Module):
    """The module around the model: what it computes is given with each call."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[], Result]) -> Result:
        return compute()


class _Recomputed(nn.Module):
    """Checkpointing around a unit of FSDP1."""

    def __init__(self, unit: nn.Module, layer: GradientCheckpointingLayer):
        super().__init__()
        self.unit = unit
        self._checkpoint: Callable[..., Any] = layer._gradient_checkpointing_func  # type: ignore[assignment]

    def forward(self, hidden_BTD: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self._checkpoint(functools.partial(self.unit, **kwargs), hidden_BTD, *args)


@contextmanager
def shared_by(sharing: Sharing | None, model: nn.Module, trace: MemoryTrace) -> Iterator[Shared]:
    """Share a model of fake tensors as one of the processes sees it. Call before its weights are registered.

    Raises:
        UserError: FSDP1 cannot share the model.
    """
    if sharing is None or sharing.gpus == 1 or sharing.kind == "zero":
        yield Shared(model)
        return
    if sharing.kind == "ddp":
        trace.register_bytes(ddp_bucket_bytes(model.parameters()), SHARDING)
        yield Shared(model)
        return
    with ExitStack() as stack:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=sharing.gpus)
        stack.callback(dist.destroy_process_group)
        _patch(stack)
        try:
            root = _fsdp1(model, sharing)
        except ValueError as error:  # A unit has weights of several types: packed experts, for example.
            raise UserError(f"FSDP1 cannot share this model: {error}") from None
        stack.enter_context(counting_resized(trace))
        stack.enter_context(following_streams(trace))
        yield Shared(model, root)


def ddp_bucket_bytes(parameters: Iterable[torch.Tensor]) -> int:
    """DDP's buckets: a copy of all gradients, which it sums there and copies back (gradient_as_bucket_view=False)."""
    return sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)


def _patch(stack: ExitStack) -> None:
    """Patch PyTorch to compare storages that have no address, and bitsandbytes to take weights of plain tensors."""

    def identity(tensor: torch.Tensor) -> int:
        return tensor.untyped_storage()._cdata

    def same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
        return identity(a) == identity(b)

    stack.enter_context(SAME_STORAGE.during(identity, same_storage))
    stack.enter_context(QUANT_STATE.during(set_quant_state))


def _fsdp1(model: nn.Module, sharing: Sharing) -> Fsdp1:
    """The model in FSDP1 as accelerate sets it up, with transformers' or peft's units."""
    _store_4_bits_in_16(model)
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    kinds = {type(layer) for layer in layers}
    adapted = hasattr(model, "peft_config")

    def is_unit(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        """For torch's auto_wrap_policy. peft makes a unit of every trained layer without parts."""
        weight = getattr(module, "weight", None)
        leaf = adapted and not list(module.children()) and weight is not None and weight.requires_grad
        return recurse or type(module) in kinds or leaf

    half = torch.bfloat16
    mixed = MixedPrecision(param_dtype=half, reduce_dtype=half, buffer_dtype=half) if sharing.mixed_precision else None
    strategy = ShardingStrategy.FULL_SHARD if sharing.kind == "fsdp1" else ShardingStrategy.NO_SHARD
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The `NO_SHARD` sharding strategy is deprecated", FutureWarning)
        root = Fsdp1(
            _Root(model),
            auto_wrap_policy=is_unit,
            mixed_precision=mixed,
            sharding_strategy=strategy,
            backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
            limit_all_gathers=True,
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
    if sharing.recomputed_outside:
        for parent in model.modules():
            for name, unit in list(parent.named_children()):
                layer = unit.module if isinstance(unit, Fsdp1) else None
                if isinstance(layer, GradientCheckpointingLayer) and layer.gradient_checkpointing:
                    layer.gradient_checkpointing = False
                    setattr(parent, name, _Recomputed(unit, layer))
    return root


def _store_4_bits_in_16(model: nn.Module) -> None:
    """Store 4-bit weights in a 16-bit type (bnb_4bit_quant_storage): FSDP1 needs one type in a unit."""
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            packed: Any = module.weight
            module.quant_state, module.quant_storage = packed.quant_state, torch.bfloat16
            module.weight = nn.Parameter(packed.data.view(-1).view(torch.bfloat16).view(-1, 1), requires_grad=False)


def under_fsdp1(step: ToolStep, train: Train, sharing: Sharing) -> ToolStep:
    """A description of a step on one GPU, as accelerate and peft change it for FSDP1.

    Weights that are trained become fp32 under mixed precision. Frozen parts of 4-bit models stay in 16 bits, because
    a unit has one type.
    """
    if sharing.kind == "ddp":
        return step
    if sharing.kind == "zero":  # DeepSpeed converts the whole model to 16 bits.
        return replace(step, fp32_parts="none", weights="16 bits", adapters="16 bits", autocast=False)
    trained_in_fp32 = sharing.mixed_precision and not train.adapted
    return replace(step, fp32_parts="none", weights="fp32" if trained_in_fp32 else step.weights)


def sharing_of(
    tool: str, keys: Mapping[str, Any], setting: Setting, step: ToolStep, config: PretrainedConfig
) -> Sharing | str | None:
    """How a tool shares a run among the GPUs of `setting`, by its configuration; None on one, or why it is not known.

    Without FSDP or DeepSpeed in the configuration, accelerate uses DDP. The tools' transformers of 2026 recompute
    layers inside FSDP1's units.
    """
    if setting.gpus == 1:
        return None
    if tool not in ACCELERATED or max(setting.layout.tensor, setting.layout.context, setting.layout.pipeline) > 1:
        return f"how {tool} shares a step among several GPUs is not described here"
    if given := keys.get("deepspeed"):
        zero = zero_of(given, setting.gpus, config, setting.train)
        return zero if isinstance(zero, str) else Sharing(kind="zero", gpus=setting.gpus, zero=zero)
    if not (keys.get("fsdp") or keys.get("fsdp_config")) and setting.mode == "ddp":
        return Sharing(kind="ddp", gpus=setting.gpus)
    given_fsdp = " ".join(str(value) for key, value in keys.items() if key.startswith("fsdp")).lower()
    if other := next((name for name in OTHER_FSDP if name in given_fsdp), None):
        return f"FSDP with {other} is not described here"
    if any(value is True for key, value in keys.items() if key.endswith(("offload_params", "cpu_offload"))):
        return "FSDP's offload to the host is not described here"
    versions = (keys.get(name) for name in ("fsdp_version", "fsdp_config.fsdp_version", "fsdp_config.version"))
    version = next((version for version in versions if version is not None), 1)
    if str(version) not in ("1", "2"):
        return f"fsdp_version must be 1 or 2; got {version!r}"
    if str(version) == "2":
        return "FSDP2 shares weights there as here, where its step is ours"
    return Sharing(kind="fsdp1", gpus=setting.gpus, mixed_precision=step.autocast, recomputed_outside=False)
