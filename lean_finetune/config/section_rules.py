"""Rules between the sections `data`, `bucket`, `evaluate` and `run` of params.yaml, and about saved activations."""

import json
from collections.abc import Iterator

from cuda_memory.units import round_up
from lean_finetune.config.data_schema import HELDOUT_SOURCE, Data
from lean_finetune.config.field_types import HUB_PREFIX
from lean_finetune.config.schema import Params, Rule, needs
from lean_finetune.core.errors import UserError, shortened


def padded_max_length(params: Params) -> int:
    """Tokens of the longest row with padding."""
    return round_up(params.data.max_length, params.bucket.pad_multiple)


def _longest_sequence(params: Params) -> int:
    """Most tokens of a sequence that layers compute."""
    return params.bucket.max_tokens if params.bucket.mode == "packed" else padded_max_length(params)


ACTIVATION_RULES = [
    needs("train.grad_ckpt_policy", "full", "train.grad_ckpt", True),
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
    needs("bucket.constant_shape", False, "bucket.mode", "packed"),
    Rule(
        "evaluate.max_tokens",
        lambda p: p.evaluate.max_tokens is not None and p.evaluate.max_tokens < padded_max_length(p),
        "must have room for a row of data.max_length={data.max_length} (padded to a multiple of "
        "{bucket.pad_multiple}); got {evaluate.max_tokens}; raise it or lower data.max_length",
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
        "run.oom_recovery",
        lambda p: p.run.oom_recovery == "split" and p.hardware.num_gpus > 1,
        "split repeats a step, while other GPUs wait for its gradients; got split with "
        "hardware.num_gpus={hardware.num_gpus}; set it to none",
    ),
    Rule(
        "run.oom_recovery",
        lambda p: p.run.oom_recovery == "split" and p.train.optimizer_in_backward,
        "split repeats a step, but train.optimizer_in_backward=true has already changed the weights; got split; set "
        "it to none, or train.optimizer_in_backward=false",
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
            "evaluate.loss_rows": (params.evaluate.loss_rows, None),
            "evaluate.generate_rows": (params.evaluate.generate_rows, 0),
            "evaluate.merged": (params.evaluate.merged, False),
        }
    given = {key: values for key, values in unused.items() if values[0] != values[1]}
    if given:
        shown = ", ".join(f"{key}={json.dumps(value)}" for key, (value, _) in given.items())
        remedy = " ".join(f"-S {key}={json.dumps(off)}" for key, (_, off) in given.items())
        without = "" if data.heldout_source else f" and no {HELDOUT_SOURCE}"
        raise UserError(f"data.heldout_fraction: 0{without} leaves no rows for {shown}; also set {remedy}")
