"""Rules between sections of params.yaml, of activations and of several GPUs; those of `train` are in schema.py."""

import json
import math
from collections.abc import Callable, Iterator
from operator import attrgetter

from cuda_memory.units import round_up
from lean_finetune.config.adapter_starts import ADAPTER_STARTS
from lean_finetune.config.data_schema import HELDOUT_SOURCE, Data
from lean_finetune.config.field_types import HUB_PREFIX, SPLIT_WEIGHTS, Sharding
from lean_finetune.config.rule import OFF, Rule, needs, turn_off
from lean_finetune.config.schema import Params
from lean_finetune.core.errors import UserError, shortened


def padded_max_length(params: Params) -> int:
    """Tokens of the longest row with padding."""
    return round_up(params.data.max_length, params.bucket.pad_multiple)


def _longest_sequence(params: Params) -> int:
    """Most tokens of a sequence that layers compute."""
    return params.bucket.max_tokens if params.bucket.mode == "packed" else padded_max_length(params)


ACTIVATION_RULES = [
    needs("train.grad_ckpt_policy", "train.grad_ckpt", True),
    needs("train.grad_ckpt_layers", "train.grad_ckpt_policy", "first_n"),
    Rule(
        "train.grad_ckpt_layers",
        lambda p: p.train.grad_ckpt_policy == "first_n" and p.train.grad_ckpt_layers is None,
        "train.grad_ckpt_policy=first_n needs a number of layers; it is blank; set it, or use full",
    ),
    Rule(
        "train.grad_ckpt_policy",
        lambda p: p.train.grad_ckpt_policy == "first_n" and p.train.pipeline_stages > 1,
        "first_n would let the last stages of a pipeline take more memory than the first ones; got first_n with "
        "train.pipeline_stages={train.pipeline_stages}; use full or every_n",
    ),
    Rule(
        "train.grad_ckpt_policy",
        lambda p: p.train.grad_ckpt_policy == "selective" and p.train.method == "int8_lora",
        "selective cannot see bitsandbytes' 8-bit matmuls; got selective with train.method=int8_lora; use full or "
        "every_n",
    ),
    Rule(
        "train.sequence_tiles",
        lambda p: (
            p.train.sequence_tiles is not None
            and (p.train.offload_activations, p.train.compress_activations) != ("none", "none")
            and not (p.train.grad_ckpt and p.train.grad_ckpt_policy == "full")
        ),
        "with train.offload_activations or compress_activations needs train.grad_ckpt=true and grad_ckpt_policy=full, "
        "else each tile would store its input for all tokens; got {train.sequence_tiles}; leave it blank, or recompute "
        "all layers",
    ),
    Rule(
        "train.sequence_tiles",
        lambda p: (p.train.sequence_tiles or 0) > _longest_sequence(p),
        lambda p: (
            f"must be at most the tokens of the longest sequence, {_longest_sequence(p)}; got "
            "{train.sequence_tiles}; lower it, or leave it blank"
        ),
    ),
]
"""What `train` says about activations that layers save for backward."""

SECTION_RULES = [
    Rule(
        "bucket.max_tokens",
        lambda p: p.bucket.max_tokens < padded_max_length(p),
        "a micro-batch must have room for a row of data.max_length={data.max_length} (padded to a multiple of "
        "{bucket.pad_multiple}); got {bucket.max_tokens}; raise bucket.max_tokens or lower data.max_length",
    ),
    needs("bucket.constant_shape", "bucket.mode", "packed"),
    Rule(
        "train.keep",
        lambda p: p.train.keep == "best" and p.train.heldout_every_steps is None,
        "best is that of the held-out figures of train.heldout_every_steps, which is blank; got best; set it, or last",
    ),
    Rule(
        "train.stop_after_no_gain",
        lambda p: p.train.stop_after_no_gain is not None and p.train.heldout_every_steps is None,
        "counts the held-out figures of train.heldout_every_steps, which is blank; got {train.stop_after_no_gain}; set "
        "that, or leave it blank",
    ),
    Rule(
        "train.best_by",
        lambda p: p.train.best_by != "loss" and p.train.keep == "last" and p.train.stop_after_no_gain is None,
        "has an effect only with train.keep=best or train.stop_after_no_gain; got {train.best_by}; set one of them, or "
        "use loss",
    ),
    Rule(
        "evaluate.max_tokens",
        lambda p: p.evaluate.max_tokens is not None and p.evaluate.max_tokens < padded_max_length(p),
        "must have room for a row of data.max_length={data.max_length} (padded to a multiple of "
        "{bucket.pad_multiple}); got {evaluate.max_tokens}; raise it or lower data.max_length",
    ),
    Rule(
        "data.image_min_pixels",
        lambda p: (p.data.image_min_pixels or 0) > (p.data.image_max_pixels or math.inf),
        "must not be over data.image_max_pixels={data.image_max_pixels}; got {data.image_min_pixels}; change one of "
        "them",
    ),
    Rule(
        "evaluate.merged",
        lambda p: p.evaluate.merged and not p.train.merge,
        "needs the merged model; got true with train.merge=false; set train.merge to true",
    ),
    Rule(
        "evaluate.task_rows",
        lambda p: p.evaluate.task_rows is not None and not p.evaluate.tasks,
        "limits the rows of evaluate.tasks, and there are none; got {evaluate.task_rows}; leave it blank",
    ),
    Rule(
        "evaluate.apply_chat_template",
        lambda p: p.evaluate.apply_chat_template != "auto" and not p.evaluate.tasks,
        "is for the prompts of evaluate.tasks, and there are none; got {evaluate.apply_chat_template}; set it to auto",
    ),
    Rule(
        "run.nodes",
        lambda p: p.hardware.num_gpus % p.run.nodes != 0,
        "must be a divisor of hardware.num_gpus={hardware.num_gpus}, which counts the GPUs of all nodes; got "
        "{run.nodes}; set hardware.num_gpus to nodes x GPUs of each",
    ),
    Rule(
        "run.node_rank",
        lambda p: p.run.nodes == 1 and (p.run.node_rank, p.run.rendezvous) != (None, None),
        "and run.rendezvous have an effect only with run.nodes above 1; got {run.node_rank} and {run.rendezvous}; "
        "leave both blank, or set run.nodes",
    ),
    Rule(
        "run.max_restarts",
        lambda p: p.run.max_restarts > 0 and p.hardware.num_gpus == 1,
        "restarts processes that torchrun starts, for several GPUs; got {run.max_restarts} with hardware.num_gpus=1; "
        "set it to 0",
    ),
    Rule(
        "run.trackers",
        lambda p: len(set(p.run.trackers)) < len(p.run.trackers),
        "must name each tracker once; got {run.trackers}; remove the repeated one",
    ),
    Rule(
        "data.heldout_fraction",
        lambda p: p.data.heldout_source is not None and p.data.heldout_fraction > 0,
        f"must be 0 with {HELDOUT_SOURCE}, whose rows are held out instead; got {{data.heldout_fraction}}; set "
        "data.heldout_fraction=0",
    ),
]


def check_sources(data: Data) -> None:
    """Refuse settings that a source cannot have. Stage pin_data checks `split`, which needs the files.

    Raises UserError if a named column is also ignored, a local source has a Hub revision, or a held-out one has a
    weight.
    """
    sources = data.named_sources()
    columns = [data.columns, *(source.columns for _, source in sources)]
    named = {column for mapping in columns for column in (mapping or {}).values() if isinstance(column, str)}
    for column in data.ignore_columns or []:
        if column in named:
            raise UserError(f"data.ignore_columns: {column!r} is also named in data.columns; remove it there or here")
    for key, value, paths in _hub_settings(data):
        if value is not None and not any(path.startswith(HUB_PREFIX) for path in paths):
            shown = ", ".join(map(repr, paths[:3]))
            raise UserError(
                f"{key}: needs a Hub source ({HUB_PREFIX}org/name); got {shortened(repr(value))} with {shown}; "
                "leave it blank"
            )
    for key, source in sources:
        if key.startswith(HELDOUT_SOURCE) and source.weight != 1.0:
            section = key.rpartition(".")[0]
            raise UserError(f"{section}.weight: held-out rows are not trained; got {source.weight}; remove it")


def _hub_settings(data: Data) -> Iterator[tuple[str, str | None, list[str]]]:
    """Dotted key and value of every setting that only the Hub knows, with the sources that it applies to."""
    sources = data.named_sources()
    for name in ("revision", "config"):
        for key, source in sources:
            yield f"{key.rpartition('.')[0]}.{name}", getattr(source, name), [source.source]
        yield f"data.{name}", getattr(data, name), [source.source for _, source in sources]


def check_heldout_readers(params: Params) -> None:
    """Refuse settings that need held-out rows where no rows are held out, all of them in one message.

    Raises UserError with the overrides that turn them off.
    """
    data = params.data
    if data.heldout_fraction > 0:
        return
    unused: dict[str, tuple[object, object]] = {"data.heldout_seed": (data.heldout_seed, 0)}
    if data.heldout_source is None:
        unused |= {
            "train.heldout_every_steps": (params.train.heldout_every_steps, None),
            "evaluate.generate_rows": (params.evaluate.generate_rows, 0),
            "evaluate.merged": (params.evaluate.merged, False),
        }
    given = {key: values for key, values in unused.items() if values[0] != values[1]}
    if given:
        shown = ", ".join(f"{key}={json.dumps(value)}" for key, (value, _) in given.items())
        remedy = " ".join(f"-S {key}={json.dumps(off)}" for key, (_, off) in given.items())
        without = "" if data.heldout_source else f" and no {HELDOUT_SOURCE}"
        raise UserError(f"data.heldout_fraction: 0{without} leaves no rows for {shown}; also set {remedy}")


# Rules of params.yaml for runs on several GPUs: one row for each pair of settings that does not work.

GATHERED_LAYERS: frozenset[Sharding] = frozenset({"zero3", "hsdp"})
"""Modes in which a layer's full weights exist only while it computes."""


def _indivisible(params: "Params") -> bool:
    """Whether hsdp cannot divide the GPUs into groups of shard_group_gpus."""
    gpus, group = params.layout.sharing, params.train.shard_group_gpus
    return params.train.sharding == "hsdp" and group is not None and (gpus % group != 0 or not 1 < group < gpus)


def _too_few_groups(params: "Params") -> bool:
    """Whether hsdp cannot divide the GPUs into equal groups of any size."""
    gpus, train = params.layout.sharing, params.train
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
        lambda p: p.layout.sharing == 1 and p.train.sharding != "none",
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
            lambda p, key=key, fine=(OFF[key], *fine): (  # type: ignore[misc]
                attrgetter(key)(p) not in fine and p.layout.data < p.hardware.num_gpus
            ),
            f"was tried only where all GPUs take different rows (train.sharding); got {{{key}}} with rows or layers "
            f"divided among GPUs; {turn_off(key)}",
        )
        for key, *fine in (
            ("train.compress_activations",),
            ("train.sequence_tiles",),
            ("train.fused_kernels", "auto"),
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
        lambda p: p.train.pipeline_stages > 1 and not p.train.pipeline_stages == p.hardware.num_gpus == p.layout.size,
        "works with one GPU for each stage, which has complete rows; got {train.pipeline_stages} with "
        "hardware.num_gpus={hardware.num_gpus}, train.context_parallel={train.context_parallel}, "
        "train.tensor_parallel={train.tensor_parallel}; set num_gpus to the stages and the others to 1, or "
        "train.pipeline_stages=1 with train.sharding=zero3",
    ),
    Rule(
        "train.sharding",
        lambda p: p.train.pipeline_stages > 1 and p.train.sharding != "none",
        "the stages of a pipeline share no weights; got {train.sharding} with "
        "train.pipeline_stages={train.pipeline_stages}; set it to none, or train.pipeline_stages=1",
    ),
    Rule(
        "train.pipeline_stages",
        lambda p: p.train.pipeline_stages > 1 and p.train.method == "int8_lora",
        "cannot send 8-bit weights, which bitsandbytes stores outside of parameters; got {train.pipeline_stages} with "
        "train.method=int8_lora; use train.method=qlora, or train.sharding=ddp instead",
    ),
    Rule(
        "train.pipeline_stages",
        lambda p: p.train.pipeline_stages > 1 and ADAPTER_STARTS[p.train.lora.init].changes_frozen_weights,
        "works with adapters that start without a change of the frozen weights; got {train.pipeline_stages} with "
        "train.lora.init={train.lora.init}; set train.lora.init=default, or use train.sharding=zero3 instead",
    ),
    Rule(
        "train.sharding",
        lambda p: p.layout.sharing > 1 and p.train.sharding == "none",
        "several GPUs need a way to share the run; got none with hardware.num_gpus={hardware.num_gpus}; set it to ddp "
        "(a full copy on every GPU) or zero3 (a shard on each), or set hardware.num_gpus=1",
    ),
    Rule(
        "train.sharding",
        lambda p: p.layout.sharing == 1 and p.train.sharding != "none",
        "has an effect only with hardware.num_gpus above 1; got {train.sharding} with 1; set it to none, or raise "
        "hardware.num_gpus",
    ),
    needs("train.shard_group_gpus", "train.sharding", "hsdp"),
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
]
