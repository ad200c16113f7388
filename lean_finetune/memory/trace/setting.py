"""How a model is trained, as far as memory is concerned."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from lean_finetune.config.field_types import SPLIT_WEIGHTS, Sharding
from lean_finetune.config.parallel_layout import ParallelLayout
from lean_finetune.config.rule import off_values
from lean_finetune.config.schema import Train
from lean_finetune.memory.trace.memory_trace import ADAPTERS, GRADIENTS, OPTIMIZER, WEIGHTS

SHARDED = {WEIGHTS, ADAPTERS, GRADIENTS, OPTIMIZER}
"""Categories that FSDP2 shards across GPUs; scales of quantised weights are replicated."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a model is trained. How its GPUs share the run follows from `train` and their number."""

    train: Train
    """Section `train`, with the precision on the device."""
    gpus: int = 1
    offload_buffer_bytes: int = 0
    """run.offload_buffer_mib: host memory that state on disk passes through."""
    accumulates_gradients: bool = False
    """Whether a GPU accumulates gradients over several micro-batches."""
    stage_layers: tuple[int, ...] | None = None
    """Number of layers of each stage of a pipeline; None = not decided yet, or no pipeline."""
    stage: int | None = None
    """The stage of a pipeline that is traced; None for all."""
    local_shapes: tuple[tuple[torch.Size, torch.dtype], ...] | None = None
    """Mode zero1, for traces of fewer layers: shapes and types that the fullest GPU of the whole model updates."""

    def with_train(self, **changes: Any) -> "Setting":
        """The setting with other values of parameters of section `train`."""
        assert changes.keys() <= Train.model_fields.keys(), changes
        return replace(self, train=self.train.model_copy(update=changes))

    @property
    def layout(self) -> ParallelLayout:
        """The mesh of the GPUs."""
        return self.train.layout(self.gpus)

    @property
    def mode(self) -> Sharding:
        """How the GPUs share weights and gradients."""
        return self.train.sharding_on(self.gpus)

    @property
    def distributed(self) -> bool:
        """Whether the run has a process group: several GPUs, or one that fetches its layers from the host as zero3."""
        return self.gpus > 1 or self.train.offload == "parameters"

    @property
    def shards_of_weights(self) -> int:
        """Number of GPUs that together store one copy of the weights; of a pipeline, not in equal parts."""
        if self.layout.pipeline > 1:
            return self.gpus
        return self.train.shard_group_gpus or self.layout.sharing if self.mode in SPLIT_WEIGHTS else 1

    def shards_of(self, category: str) -> int:
        """Number of shards of a category of state after backward; of a pipeline, not in equal parts."""
        if self.layout.pipeline > 1:
            return self.gpus
        if self.mode == "zero1":
            return self.gpus if category == OPTIMIZER else 1
        return self.shards_of_weights if category in SHARDED else 1

    @property
    def all_layers_reason(self) -> str | None:
        """Why extrapolation from fewer layers is impossible for any model; None where it is possible."""
        frees = self.train.master_weights or self.train.offload != "none"
        return (
            "zero1's update frees the gradients of its own shard one by one" if self.mode == "zero1" and frees else None
        )

    @property
    def is_pipeline(self) -> bool:
        """Whether it describes a complete pipeline, not one stage."""
        return self.layout.pipeline > 1 and self.stage is None

    def of_stage(self, stage: int, stage_layers: tuple[int, ...]) -> "Setting":
        """The setting of one stage of a pipeline."""
        return replace(self, stage=stage, stage_layers=stage_layers)

    @property
    def stages(self) -> list["Setting"]:
        """The setting of each stage of a pipeline; without one, the setting itself."""
        counts = self.stage_layers
        return [self] if counts is None else [self.of_stage(stage, counts) for stage in range(len(counts))]

    @property
    def on_one_gpu(self) -> "Setting":
        """The setting of stage evaluate, which uses one GPU and keeps all weights on it."""
        dimensions = ("context_parallel", "tensor_parallel", "pipeline_stages")
        alone = self.with_train(**off_values("sharding", "shard_group_gpus", *dimensions, "offload"))
        return replace(alone, gpus=1, stage=None, stage_layers=None)
