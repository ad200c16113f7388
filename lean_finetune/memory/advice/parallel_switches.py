"""Memory switches of several GPUs: sharding, and rows, products and layers divided among them."""

from collections.abc import Iterable, Mapping

from lean_finetune.config.field_types import Sharding
from lean_finetune.config.optimizers import OPTIMIZERS
from lean_finetune.config.parallel_layout import ParallelLayout
from lean_finetune.config.sharding_rules import GATHERED_LAYERS, SPLIT_WEIGHTS
from lean_finetune.memory.advice.switch import SAME, Support, Switch, Values, replace_attribute
from lean_finetune.memory.predict.setting import Setting

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
DIVISIBLE: frozenset[Sharding] = frozenset({"ddp", "zero2", "zero3"})
"""Modes of train.sharding that work with tensor parallelism."""
NODE_DIVISORS = (2, 4, 8)
"""Sizes of train.tensor_parallel that advice tries."""
EXCHANGE_TIME = 1.15
"""Assumed factor on the time of a step: tokens and heads are exchanged before and after attention of each layer."""
STAGES_TIME = 1.10
"""Assumed factor on the time of a step, besides the pipeline's bubble: stages are never equally long."""
MOST_STAGES = 4
"""Each stage is traced, so no more are tried."""
SHARED: Mapping[str, str] = {
    "train.sharding": "sharing.spec.mode",
    "train.shard_group_gpus": "sharing.spec.group_gpus",
    "train.pipeline_stages": "pipeline_stages",
    "train.tensor_parallel": "sharing.spec.layout.tensor",
    "train.context_parallel": "sharing.spec.layout.context",
}
"""Parameters whose values have a place in `Setting.sharing` too, with that place."""
UNTRIED = frozenset({"compression", "tiles", "fused_kernels"})
"""Switches that work only where all GPUs take different rows."""


def _lighter_sharding(setting: Setting, support: Support) -> Iterable[Values]:
    """Modes with smaller shards; at last, weights and gradients in host memory too."""
    if setting.sharing is None or setting.sharing.gpus == 1:
        return
    mode, values, train = setting.sharing.spec.mode, {}, setting.train
    for lighter in LIGHTER_SHARDING[mode]:
        # 8-bit weights cannot be split. Optimizer state of adapters is too small to be worth dividing.
        unsplittable = lighter in SPLIT_WEIGHTS and train.method == "int8_lora"
        if not unsplittable and not (lighter == "zero1" and (train.adapted or setting.tensor_parallel > 1)):
            mode, values = lighter, {"train.sharding": lighter, "train.shard_group_gpus": None}
            yield values
    on_device = setting.train.offload != "parameters" and not OPTIMIZERS[setting.train.optimizer].paged
    if support.cuda and mode in GATHERED_LAYERS and on_device and setting.tensor_parallel == 1:
        yield {**values, "train.offload": "parameters", "train.offload_to": "cpu"}
        if support.host_ram_known and OPTIMIZERS[setting.train.optimizer].updates_by_value and not train.adapted:
            yield {**values, "train.offload": "parameters", "train.offload_to": "disk"}


def _untried(setting: Setting) -> bool:
    """Whether a setting works only where all GPUs take different rows."""
    train = setting.train
    return (
        setting.train.compress_activations != "none"
        or train.sequence_tiles is not None
        or train.fused_kernels != "none"
    )


def _divided_rows(setting: Setting, support: Support) -> Iterable[Values]:
    """Each row divided among two GPUs, or among the eight GPUs of a usual node."""
    layout = None if setting.sharing is None else setting.sharing.spec.layout
    if layout is None or layout.tensor * layout.pipeline > 1:
        return
    if not setting.train.router_aux_loss and not _untried(setting):
        for context in sorted({2, min(NODE_DIVISORS[-1], layout.size)}):
            if context > layout.context and layout.size % context == 0:
                yield {"train.context_parallel": context}


def _exchange_time(setting: Setting, more_micro_batches: float) -> float:
    """Assumed time of a step relative to complete rows."""
    return EXCHANGE_TIME if setting.context > 1 else 1.0


def _communication_time(setting: Setting, more_micro_batches: float) -> float:
    """Assumed time of a step relative to ddp: the links between GPUs are unknown."""
    if setting.sharing is None:
        return 1.0
    mode = setting.sharing.spec.mode
    # Sharded weights are gathered for each micro-batch.
    times = more_micro_batches if mode in SPLIT_WEIGHTS else 1.0
    return 1 + times * (COMMUNICATION_TIME.get(mode, 1.0) - 1)


def _smaller_parts(setting: Setting, support: Support) -> Iterable[Values]:
    """More GPUs for each matrix product; if these are all GPUs, none share weights by train.sharding."""
    if setting.sharing is None:
        return
    layout, train = setting.sharing.spec.layout, setting.train
    if (
        layout is None
        or layout.context > 1
        or setting.train.loss_chunk is None
        or setting.train.offload == "parameters"
    ):
        return
    if (
        _untried(setting)
        or setting.sharing.spec.mode not in DIVISIBLE
        or train.method == "int8_lora"
        or train.lora.dora
    ):
        return
    for size in NODE_DIVISORS:
        if size > layout.tensor and layout.size % size == 0:
            alone: Values = {"train.sharding": "none", "train.shard_group_gpus": None} if size == layout.size else {}
            yield {"train.tensor_parallel": size, **alone}


def _divided_layers(setting: Setting, support: Support) -> Iterable[Values]:
    """A stage on each GPU, if no other setting divides rows or products."""
    sharing, train = setting.sharing, setting.train
    if sharing is None or sharing.spec.layout is None or not 1 < sharing.layout.data == sharing.gpus <= MOST_STAGES:
        return
    if _untried(setting) or train.method == "int8_lora" or train.lora.changes_frozen_weights:
        return
    if setting.train.offload != "parameters":
        yield {"train.pipeline_stages": sharing.gpus, "train.sharding": "none", "train.shard_group_gpus": None}


def with_stages(setting: Setting, stages: int) -> Setting:
    """The setting with its GPUs as stages of a pipeline."""
    changed: Setting = replace_attribute(setting, "sharing.spec.layout", ParallelLayout(data=1, pipeline=stages))
    return changed


def _pipeline_time(setting: Setting, more_micro_batches: float) -> float:
    """Factor on a GPU's time per token: all stages process the same rows."""
    stages = setting.pipeline_stages
    return STAGES_TIME * stages if stages > 1 else 1.0


PARALLEL_SWITCHES = [
    Switch(
        name="sharding",
        parameters=("train.sharding", "train.shard_group_gpus"),
        lighter=_lighter_sharding,
        effect=SAME,
        ease=9,
        other_memory="not less",
        time=_communication_time,
    ),
    Switch(
        name="stages",
        parameters=("train.pipeline_stages",),
        lighter=_divided_layers,
        effect=SAME,
        ease=10,
        excludes=frozenset({"sharding", "tensor_parallel", "context_parallel"}) | UNTRIED,
        time=_pipeline_time,
    ),
    Switch(
        name="tensor_parallel",
        parameters=("train.tensor_parallel",),
        lighter=_smaller_parts,
        effect=SAME,
        ease=10,
        excludes=frozenset({"sharding", "method"}) | UNTRIED,
        time=lambda setting, more: float(setting.tensor_parallel),  # This many GPUs process the same rows.
    ),
    Switch(
        name="context_parallel",
        parameters=("train.context_parallel",),
        lighter=_divided_rows,
        effect=SAME,
        ease=10,
        excludes=frozenset({"tensor_parallel"}) | UNTRIED,
        changes_states=False,
        time=_exchange_time,
    ),
]
