"""The memory switch that divides layers among the GPUs instead of rows (train.pipeline_stages)."""

from collections.abc import Iterable

from lean_finetune.config.parallel_layout import ParallelLayout
from lean_finetune.memory.advice.switch import SAME, Support, Switch, Values, replace_attribute
from lean_finetune.memory.predict.setting import Setting

STAGES_TIME = 1.10
"""Assumed factor on the time of a step, besides the pipeline's bubble: stages are never equally long."""
MOST_STAGES = 4
"""Each stage is traced, so no more are tried."""


def _divided_layers(setting: Setting, support: Support) -> Iterable[Values]:
    """A stage on each GPU, where all GPUs have different rows."""
    sharing, model = setting.sharing, setting.model
    if sharing is None or sharing.spec.layout is None or not 1 < sharing.layout.data == sharing.gpus <= MOST_STAGES:
        return
    untried = setting.compress_activations != "none" or model.sequence_tiles is not None
    if untried or model.fused_kernels != "none" or model.method == "int8_lora" or model.keeps_first_adapters:
        return
    if setting.offload != "parameters":
        yield {"train.pipeline_stages": sharing.gpus, "train.sharding": "none", "train.shard_group_gpus": None}


def with_stages(setting: Setting, stages: int) -> Setting:
    """The setting on several GPUs with a stage on each."""
    changed: Setting = replace_attribute(setting, "sharing.spec.layout", ParallelLayout(data=1, pipeline=stages))
    return changed


def _time(setting: Setting, more_micro_batches: float) -> float:
    """Factor on the time of a token of one GPU: so many GPUs have the same rows."""
    stages = setting.pipeline_stages
    return STAGES_TIME * stages if stages > 1 else 1.0


STAGES = Switch(
    name="stages",
    parameters={"train.pipeline_stages": "pipeline_stages"},
    lighter=_divided_layers,
    effect=SAME,
    ease=10,
    excludes=frozenset({"sharding", "tensor_parallel", "context_parallel", "compression", "tiles", "fused_kernels"}),
    time=_time,
)
