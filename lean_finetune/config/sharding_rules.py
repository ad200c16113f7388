"""Rules of params.yaml for runs on several GPUs: one row for each pair of settings that does not work."""

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING

from lean_finetune.config.adapter_starts import ADAPTER_STARTS
from lean_finetune.config.field_types import Sharding
from lean_finetune.config.schema import Rule, needs

if TYPE_CHECKING:
    from lean_finetune.config.schema import Params

SPLIT_WEIGHTS: frozenset[Sharding] = frozenset({"zero2", "zero3", "hsdp"})
"""Modes in which every GPU stores a shard of each weight."""
GATHERED_LAYERS: frozenset[Sharding] = frozenset({"zero3", "hsdp"})
"""Modes in which a layer's full weights exist only while it computes."""


def _sharing(params: "Params") -> int:
    """Number of GPUs that share weights by train.sharding."""
    return params.layout.sharing


def _indivisible(params: "Params") -> bool:
    """Whether hsdp cannot divide the GPUs into groups of shard_group_gpus."""
    gpus, group = _sharing(params), params.train.shard_group_gpus
    return params.train.sharding == "hsdp" and group is not None and (gpus % group != 0 or not 1 < group < gpus)


def _too_few_groups(params: "Params") -> bool:
    """Whether hsdp cannot divide the GPUs into equal groups of any size."""
    gpus, train = _sharing(params), params.train
    return (
        train.sharding == "hsdp" and train.shard_group_gpus is None and all(gpus % size != 0 for size in range(2, gpus))
    )


def _excluded_by_tensor(excluded: Callable[["Params"], bool], reason: str, remedy: str) -> Rule:
    """The rule that train.tensor_parallel above 1 excludes a setting."""
    return Rule(
        "train.tensor_parallel",
        lambda p: p.train.tensor_parallel > 1 and excluded(p),
        f"{reason}; got {{train.tensor_parallel}}; {remedy}, or set train.tensor_parallel=1",
    )


def _pipelined(params: "Params") -> bool:
    return params.train.pipeline_stages > 1


SHARDING_RULES = [
    _excluded_by_tensor(
        lambda p: p.hardware.num_gpus % p.train.tensor_parallel != 0,
        "must be a divisor of hardware.num_gpus={hardware.num_gpus}",
        "change one of them",
    ),
    _excluded_by_tensor(
        lambda p: p.train.context_parallel > 1,
        "does not work with train.context_parallel={train.context_parallel} yet",
        "set train.context_parallel=1",
    ),
    _excluded_by_tensor(
        lambda p: p.train.sharding in ("zero1", "hsdp"),
        "works with train.sharding none, ddp, zero2 and zero3, not with {train.sharding}",
        "use zero3",
    ),
    _excluded_by_tensor(
        lambda p: _sharing(p) == 1 and p.train.sharding != "none",
        "of all GPUs leaves none to share weights by train.sharding={train.sharding}",
        "set train.sharding=none, raise hardware.num_gpus",
    ),
    _excluded_by_tensor(
        lambda p: p.train.method == "int8_lora",
        "cannot divide 8-bit weights, whose products scale each token by its largest input",
        "use train.method=qlora or lora",
    ),
    _excluded_by_tensor(
        lambda p: p.train.lora.dora,
        "cannot divide DoRA's norms over all inputs of a layer",
        "set train.lora.dora=false",
    ),
    _excluded_by_tensor(
        lambda p: p.train.loss_chunk is None,
        "divides the logits too, which needs the chunked loss",
        "set train.loss_chunk=512",
    ),
    _excluded_by_tensor(
        lambda p: p.train.offload == "parameters",
        "sums gradients on the GPUs, where train.offload=parameters does not keep them",
        "use train.offload=optimizer",
    ),
    Rule(
        "train.context_parallel",
        lambda p: p.hardware.num_gpus % p.train.context_parallel != 0,
        "must be a divisor of hardware.num_gpus={hardware.num_gpus}; got {train.context_parallel}; change one of them",
    ),
    Rule(
        "train.context_parallel",
        lambda p: p.train.context_parallel > 1 and p.train.router_aux_loss > 0,
        "excludes train.router_aux_loss, which balances the tokens of complete rows; got {train.context_parallel} with "
        "{train.router_aux_loss}; set train.router_aux_loss=0, or train.context_parallel=1",
    ),
    *(
        Rule(
            key,
            lambda p, key=key, off=off: (  # type: ignore[misc]
                attrgetter(key)(p) != off and p.layout.data < p.hardware.num_gpus
            ),
            f"was tried only where all GPUs take different rows (train.sharding); got {{{key}}} with rows or layers "
            f"divided among GPUs; {remedy}",
        )
        for key, off, remedy in (
            ("train.compress_activations", "none", "set it to none"),
            ("train.sequence_tiles", None, "leave it blank"),
            ("train.fused_kernels", "none", "set it to none"),
        )
    ),
    Rule(
        "bucket.max_tokens",
        lambda p: p.bucket.constant_shape and p.bucket.max_tokens % p.train.context_parallel != 0,
        "must be a multiple of train.context_parallel={train.context_parallel} with bucket.constant_shape=true, so "
        "that each GPU has an equal part; got {bucket.max_tokens}; change it",
    ),
    Rule(
        "train.pipeline_stages",
        lambda p: _pipelined(p) and not p.train.pipeline_stages == p.hardware.num_gpus == p.layout.size,
        "works with one GPU for each stage, which has complete rows; got {train.pipeline_stages} with "
        "hardware.num_gpus={hardware.num_gpus}, train.context_parallel={train.context_parallel}, "
        "train.tensor_parallel={train.tensor_parallel}; set num_gpus to the stages and the others to 1, or "
        "train.pipeline_stages=1 with train.sharding=zero3",
    ),
    Rule(
        "train.sharding",
        lambda p: _pipelined(p) and p.train.sharding != "none",
        "the stages of a pipeline share no weights; got {train.sharding} with "
        "train.pipeline_stages={train.pipeline_stages}; set it to none, or train.pipeline_stages=1",
    ),
    Rule(
        "train.pipeline_stages",
        lambda p: _pipelined(p) and p.train.method == "int8_lora",
        "cannot send 8-bit weights, which bitsandbytes stores outside of parameters; got {train.pipeline_stages} with "
        "train.method=int8_lora; use train.method=qlora, or train.sharding=ddp instead",
    ),
    Rule(
        "train.pipeline_stages",
        lambda p: _pipelined(p) and ADAPTER_STARTS[p.train.lora.init].changes_frozen_weights,
        "works with adapters that start without a change of the frozen weights; got {train.pipeline_stages} with "
        "train.lora.init={train.lora.init}; set train.lora.init=default, or use train.sharding=zero3 instead",
    ),
    Rule(
        "train.sharding",
        lambda p: _sharing(p) > 1 and p.train.sharding == "none",
        "several GPUs need a way to share the run; got none with hardware.num_gpus={hardware.num_gpus}; set it to ddp "
        "(a full copy on every GPU) or zero3 (a shard on each), or set hardware.num_gpus=1",
    ),
    Rule(
        "train.sharding",
        lambda p: _sharing(p) == 1 and p.train.sharding != "none",
        "has an effect only with hardware.num_gpus above 1; got {train.sharding} with 1; set it to none, or raise "
        "hardware.num_gpus",
    ),
    needs("train.shard_group_gpus", None, "train.sharding", "hsdp"),
    Rule(
        "train.shard_group_gpus",
        _indivisible,
        "must be a divisor of hardware.num_gpus={hardware.num_gpus}, above 1 and below it; got "
        "{train.shard_group_gpus}; change it, or use train.sharding=zero3 (one group of all) or ddp (groups of one)",
    ),
    Rule(
        "train.sharding",
        _too_few_groups,
        "hsdp needs at least two groups of two GPUs; got hsdp with hardware.num_gpus={hardware.num_gpus}; use zero3 "
        "(one group of all) or ddp (groups of one), or change hardware.num_gpus",
    ),
    Rule(
        "train.sharding",
        lambda p: p.train.sharding in SPLIT_WEIGHTS and p.train.method == "int8_lora",
        "cannot split 8-bit weights, which bitsandbytes stores outside of parameters; got {train.sharding} with "
        "train.method=int8_lora; use ddp or zero1, or train.method=qlora",
    ),
    Rule(
        "train.offload",
        lambda p: (
            p.train.offload == "parameters" and p.hardware.num_gpus > 1 and p.train.sharding not in GATHERED_LAYERS
        ),
        "parameters needs zero3 or hsdp on several GPUs, which fetch the weights of one layer at a time; got "
        "parameters with train.sharding={train.sharding}; set train.sharding=zero3, or use optimizer",
    ),
    Rule(
        "train.offload",
        lambda p: p.train.offload == "parameters" and p.train.method == "int8_lora",
        "parameters cannot move 8-bit weights, which bitsandbytes stores outside of parameters; got parameters with "
        "train.method=int8_lora; use none or optimizer, or train.method=qlora",
    ),
    Rule(
        "train.offload",
        lambda p: p.train.offload == "parameters" and p.run.oom_recovery == "split",
        "parameters leaves layers fetched where a step runs out of memory, so it cannot be repeated; got parameters "
        "with run.oom_recovery=split; set run.oom_recovery=none",
    ),
]
