"""Memory switches of several GPUs: sharding, and context, tensor and pipeline parallelism."""

from collections.abc import Iterable, Mapping
from functools import partial

from lean_finetune.config.field_types import SPLIT_WEIGHTS, Sharding
from lean_finetune.config.parallel_layout import Dimension
from lean_finetune.memory.switches.switch import SAME, Support, Switch, Values
from lean_finetune.memory.trace.setting import Setting

LIGHTER_SHARDING: Mapping[Sharding, tuple[Sharding, ...]] = {
    "none": (),
    "ddp": ("zero1", "zero2", "zero3"),
    "zero1": ("zero2", "zero3"),
    "zero2": ("zero3",),
    "zero3": (),
    "hsdp": ("zero3",),
}
"""Modes with less memory per GPU than a mode, the most similar first."""
COMMUNICATION_TIME: Mapping[Sharding, float] = {"zero1": 1.02, "zero2": 1.05, "zero3": 1.10, "hsdp": 1.08}
"""Assumed factor on the time of a step: weights are communicated too, mostly while layers compute."""
NODE_DIVISORS = (2, 4, 8)
"""Sizes of train.tensor_parallel that advice tries."""
EXCHANGE_TIME = 1.15
"""Assumed factor on the time of a step: tokens and heads are exchanged before and after attention of each layer."""
STAGES_TIME = 1.10
"""Assumed factor on the time of a step, besides the pipeline's bubble: stages are never equally long."""
MOST_STAGES = 4
"""Each stage is traced, so no more are tried."""


def _lighter_sharding(setting: Setting, support: Support) -> Iterable[Values]:
    """Modes with smaller shards; at last, weights and gradients in host memory too."""
    values: Values = {}
    train = setting.train
    for mode in LIGHTER_SHARDING[setting.mode]:
        if mode != "zero1" or not train.adapted:  # Optimizer state of adapters is too small to be worth sharding.
            values = {"train.sharding": mode, "train.shard_group_gpus": None}
            yield values
    if support.cuda and setting.gpus > 1 and train.offload != "parameters":
        yield {**values, "train.offload": "parameters", "train.offload_to": "cpu"}
        if support.host_ram_known and not train.adapted:
            yield {**values, "train.offload": "parameters", "train.offload_to": "disk"}


def _context_parallel(setting: Setting, support: Support) -> Iterable[Values]:
    """The tokens of each row on two GPUs, or on the eight GPUs of a usual node."""
    sizes = sorted({2, min(NODE_DIVISORS[-1], setting.gpus)})
    return ({"train.context_parallel": size} for size in sizes if size > setting.layout.context)


def _words_of_layout(dimension: Dimension, setting: Setting) -> Mapping[str, str]:
    """Words on a dimension of the mesh of GPUs."""
    count = getattr(setting.layout, dimension)
    return {dimension: f"{dimension} parallel over {count} GPUs"} if count > 1 else {}


def _communication_time(setting: Setting, more_micro_batches: float) -> float:
    """Assumed time of a step relative to ddp: the links between GPUs are unknown."""
    mode = setting.mode
    # Sharded weights are gathered for each micro-batch.
    times = more_micro_batches if mode in SPLIT_WEIGHTS else 1.0
    return 1 + times * (COMMUNICATION_TIME.get(mode, 1.0) - 1)


def _smaller_parts(setting: Setting, support: Support) -> Iterable[Values]:
    """More GPUs for each matmul; if these are all GPUs, none share weights by train.sharding."""
    for size in (size for size in NODE_DIVISORS if size > setting.layout.tensor):
        alone: Values = {"train.sharding": "none", "train.shard_group_gpus": None} if size == setting.gpus else {}
        yield {"train.tensor_parallel": size, **alone}


def _divided_layers(setting: Setting, support: Support) -> Iterable[Values]:
    """A stage on each GPU."""
    if 1 < setting.gpus <= MOST_STAGES:
        yield {"train.pipeline_stages": setting.gpus, "train.sharding": "none", "train.shard_group_gpus": None}


PARALLEL_SWITCHES = [
    Switch(
        name="sharding",
        parameters=("train.sharding", "train.shard_group_gpus"),
        lighter=_lighter_sharding,
        words=lambda setting: {} if (mode := setting.train.sharding) == "none" else {"sharding": mode},
        effect=SAME,
        ease=9,
        other_memory="not less",
        time=_communication_time,
    ),
    Switch(
        name="stages",
        parameters=("train.pipeline_stages",),
        lighter=_divided_layers,
        words=partial(_words_of_layout, "pipeline"),
        effect=SAME,
        ease=10,
        time=lambda setting, more: STAGES_TIME if setting.layout.pipeline > 1 else 1.0,
    ),
    Switch(
        name="tensor_parallel",
        parameters=("train.tensor_parallel",),
        lighter=_smaller_parts,
        words=partial(_words_of_layout, "tensor"),
        effect=SAME,
        ease=10,
        excludes=frozenset({"sharding", "method"}),
    ),
    Switch(
        name="context_parallel",
        parameters=("train.context_parallel",),
        lighter=_context_parallel,
        words=partial(_words_of_layout, "context"),
        effect=SAME,
        ease=10,
        changes_states=False,
        time=lambda setting, more: EXCHANGE_TIME if setting.layout.context > 1 else 1.0,
    ),
]
