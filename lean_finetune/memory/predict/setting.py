"""The parameters of a run that its memory depends on, besides the shapes of its micro-batches."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from transformers import PretrainedConfig

from cuda_memory.units import MIB
from lean_finetune.config.field_types import (
    CompressActivations,
    OffloadActivations,
    OffloadState,
    OffloadTo,
    OptimizerName,
    Precision,
)
from lean_finetune.memory.trace.fake_distributed import Sharing
from lean_finetune.model.model_spec import ModelSpec
from lean_finetune.step.run_optimizer import OptimSpec

if TYPE_CHECKING:
    from lean_finetune.config.schema import Params


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a model is trained, as far as memory is concerned."""

    model: ModelSpec
    optimizer: OptimizerName
    loss_chunk: int | None
    max_grad_norm: float | None
    master_weights: bool = False
    offload_activations: OffloadActivations = "none"
    compress_activations: CompressActivations = "none"
    offload: OffloadState = "none"
    offload_to: OffloadTo = "cpu"
    """Changes the host's memory only; a trace is the same."""
    offload_buffer_bytes: int = 0
    """Host memory that state on disk passes through."""
    optimizer_in_backward: bool = False
    sharing: Sharing | None = None
    """How several GPUs share the run; None = one GPU."""

    @classmethod
    def from_params(cls, params: "Params", precision: Precision, *, accumulates_gradients: bool) -> "Setting":
        """Read `train`, `seed` and `hardware.num_gpus`.

        `precision` is what train.precision resolves to on the device. `accumulates_gradients`: over several
        micro-batches on one GPU.
        """
        train = params.train
        return cls(
            model=ModelSpec.from_params(params, precision),
            optimizer=train.optimizer,
            loss_chunk=train.loss_chunk,
            max_grad_norm=train.max_grad_norm,
            master_weights=train.master_weights,
            offload_activations=train.offload_activations,
            compress_activations=train.compress_activations,
            offload=train.offload,
            offload_to=train.offload_to,
            offload_buffer_bytes=params.run.offload_buffer_mib * MIB,
            optimizer_in_backward=train.optimizer_in_backward,
            sharing=Sharing.from_params(params, accumulates_gradients=accumulates_gradients),
        )

    def holders_of(self, category: str) -> int:
        """Number of GPUs that divide a category of state after backward; 1 for one GPU."""
        return 1 if self.sharing is None else self.sharing.holders_of(category)

    @property
    def tensor_parallel(self) -> int:
        """Number of GPUs that compute each product together."""
        return 1 if self.sharing is None else self.sharing.layout.tensor

    @property
    def context(self) -> int:
        """Number of GPUs that divide each row's tokens."""
        return 1 if self.sharing is None else self.sharing.layout.context

    @property
    def pipeline_stages(self) -> int:
        """Number of stages of a pipeline; 1 without one."""
        return 1 if self.sharing is None else self.sharing.layout.pipeline

    @property
    def all_layers_reason(self) -> str | None:
        """Why extrapolation from fewer layers is impossible for any model; None where it is possible."""
        frees = self.master_weights or self.offload != "none"
        if self.sharing is None or self.sharing.spec.mode != "zero1" or not frees:
            return None
        return "zero1's update gives up the gradients of what it owns one by one"

    def for_fewer_layers(self, config: PretrainedConfig) -> "Setting":
        """The setting for traces of this model with fewer layers than `config` has.

        Raises:
            UserError: the GPUs cannot share the model so.
        """
        sharing = self.sharing and self.sharing.for_fewer_layers(config, self.model)
        return replace(self, sharing=sharing)

    @property
    def optim_spec(self) -> OptimSpec:
        """The optimizer. Its state depends on its name alone, so the numbers of its update are arbitrary."""
        return OptimSpec(
            name=self.optimizer,
            lr=1.0,
            weight_decay=0.0,
            schedule="constant",
            warmup_fraction=0.0,
            master_weights=self.master_weights,
            offload=self.offload,
        )
