"""What the memory of a run depends on, besides the shapes of its micro-batches."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from transformers import PretrainedConfig

from cuda_memory.units import MIB
from lean_finetune.config.field_types import Precision
from lean_finetune.config.train_schema import Train
from lean_finetune.memory.trace.fake_distributed import Sharing
from lean_finetune.model.precision import resolved

if TYPE_CHECKING:
    from lean_finetune.config.schema import Params


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a model is trained, as far as memory is concerned."""

    train: Train
    """Section `train`, with the precision on the device."""
    offload_buffer_bytes: int = 0
    """run.offload_buffer_mib: host memory that state on disk passes through."""
    sharing: Sharing | None = None
    """How several GPUs share the run; None = one GPU."""

    @classmethod
    def from_params(cls, params: "Params", precision: Precision, *, accumulates_gradients: bool) -> "Setting":
        """The setting of a run whose train.precision resolves to `precision` on the device.

        `accumulates_gradients`: over several micro-batches on one GPU.
        """
        return cls(
            train=resolved(params, precision),
            offload_buffer_bytes=params.run.offload_buffer_mib * MIB,
            sharing=Sharing.from_params(params, accumulates_gradients=accumulates_gradients),
        )

    def with_train(self, **changes: Any) -> "Setting":
        """The setting with other values of parameters of section `train`."""
        return replace(self, train=self.train.model_copy(update=changes))

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
        frees = self.train.master_weights or self.train.offload != "none"
        if self.sharing is None or self.sharing.spec.mode != "zero1" or not frees:
            return None
        return "zero1's update gives up the gradients of what it owns one by one"

    def for_fewer_layers(self, config: PretrainedConfig) -> "Setting":
        """The setting for traces of this model with fewer layers than `config` has.

        Raises:
            UserError: the GPUs cannot share the model so.
        """
        sharing = self.sharing and self.sharing.for_fewer_layers(config, self.train)
        return replace(self, sharing=sharing)
