"""The settings that estimate, train and evaluate build a model from: weights, adapters, number format."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from lean_finetune.config.adapter_starts import ADAPTER_STARTS
from lean_finetune.config.field_types import (
    ALL_LINEAR,
    AnyPrecision,
    AttentionName,
    FusedKernels,
    GradCkptPolicy,
    LoraExperts,
    LoraInit,
    Method,
    Precision,
    QuantType,
    Router,
)
from lean_finetune.core.atomic_files import read_json
from lean_finetune.core.errors import UserError

if TYPE_CHECKING:
    from lean_finetune.config.schema import Params

DTYPES = {"bf16": torch.bfloat16, "pure_bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


BASE_WEIGHTS = "base_weights.json"
"""File beside an adapter: the `WeightsSpec` of its base in training."""


@dataclass(frozen=True, kw_only=True)
class WeightsSpec:
    """Number format and quantisation of the base: what the user of a saved model must know about its training.

    Defaults are for tests; `from_params` sets every field.
    """

    method: Method
    precision: Precision
    """Resolved for the device: never `auto`."""
    quant_type: QuantType = "nf4"
    double_quant: bool = True

    @classmethod
    def from_params(cls, params: "Params", precision: Precision) -> "WeightsSpec":
        """Read train.method and train.quant; `precision` is train.precision resolved for the device."""
        train = params.train
        return cls(
            method=train.method,
            precision=precision,
            quant_type=train.quant.type,
            double_quant=train.quant.double,
        )

    @property
    def adapted(self) -> bool:
        """Whether adapters are trained and the base is frozen."""
        return self.method != "full"

    @property
    def dtype(self) -> torch.dtype:
        """Type of the base weights: fp32 if method `full` trains in fp16, which cannot represent small updates."""
        return torch.float32 if self.precision == "fp16" and not self.adapted else DTYPES[self.precision]

    @property
    def adapter_dtype(self) -> torch.dtype:
        """Type of the adapters."""
        return torch.bfloat16 if self.precision == "pure_bf16" else torch.float32

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """Autocast type for products of trained fp32 tensors; None if all tensors have one type."""
        if self.precision == "fp16" or (self.precision == "bf16" and self.adapted):
            return DTYPES[self.precision]
        return None

    @property
    def scales_loss(self) -> bool:
        """Whether fp16 gradients need loss scaling."""
        return self.precision == "fp16"

    @property
    def needs_native_bf16(self) -> bool:
        """Whether the device must compute in bf16."""
        return self.precision in ("bf16", "pure_bf16")

    def autocast(self, device_type: str) -> Any:
        """Context of the forward pass."""
        dtype = self.autocast_dtype
        return torch.autocast(device_type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)


@dataclass(frozen=True, kw_only=True)
class ModelSpec(WeightsSpec):
    """Everything that decides which tensors a model has, and which of them are trained."""

    grad_ckpt: bool
    grad_ckpt_policy: GradCkptPolicy = "full"
    grad_ckpt_every: int = 2
    """Read with policy every_n."""
    sequence_tiles: int | None = None
    """Tiles along the sequence in which MLPs and norms run; None = all tokens at once."""
    attention: AttentionName = "auto"
    """Value of train.attention; the device decides the kernels (lean_finetune.model.attention_choice)."""
    fused_kernels: FusedKernels = "none"
    lora_rank: int
    lora_alpha: int
    lora_dropout: float
    lora_targets: tuple[str, ...]
    lora_rslora: bool = False
    lora_dora: bool = False
    lora_init: LoraInit = "default"
    lora_experts: LoraExperts = "none"
    lora_expert_rank: int = 1
    """Read with lora_experts all."""
    router: Router = "frozen"
    router_aux_loss: float = 0.0
    """Weight of the loss that balances the experts."""
    seed: int

    @classmethod
    def from_params(cls, params: "Params", precision: Precision) -> "ModelSpec":
        """Read the `train` section and the seed; `precision` is train.precision resolved for the device."""
        train, lora = params.train, params.train.lora
        return cls(
            **vars(WeightsSpec.from_params(params, precision)),
            grad_ckpt=train.grad_ckpt,
            sequence_tiles=train.sequence_tiles,
            attention=train.attention,
            fused_kernels=train.fused_kernels,
            grad_ckpt_policy=train.grad_ckpt_policy,
            grad_ckpt_every=train.grad_ckpt_every,
            lora_rank=lora.rank,
            lora_alpha=lora.alpha,
            lora_dropout=lora.dropout,
            lora_targets=tuple(lora.targets),
            lora_rslora=lora.rslora,
            lora_dora=lora.dora,
            lora_init=lora.init,
            lora_experts=lora.experts,
            lora_expert_rank=lora.expert_rank,
            router=train.router,
            router_aux_loss=train.router_aux_loss,
            seed=params.seed,
        )

    @property
    def recomputed_every(self) -> int:
        """With `grad_ckpt`, every how many layers one is recomputed, from the first on."""
        return self.grad_ckpt_every if self.grad_ckpt_policy == "every_n" else 1

    @property
    def keeps_first_adapters(self) -> bool:
        """Whether the first adapters stay in host memory, to save an adapter for the original weights."""
        return ADAPTER_STARTS[self.lora_init].changes_frozen_weights

    @property
    def peft_targets(self) -> str | list[str]:
        """The adapter targets as peft takes them."""
        return ALL_LINEAR if self.lora_targets == (ALL_LINEAR,) else list(self.lora_targets)


def choose_precision(
    choice: AnyPrecision, *, kind: Literal["cpu", "cuda"], native_bf16: bool, name: str
) -> tuple[Precision, str]:
    """The precision, and the reason.

    Args:
        choice: train.precision.
        kind: device type.
        native_bf16: whether the device computes in bf16.
        name: of the device, for the reason.

    Raises:
        UserError: the device does not compute in this type.
    """
    if choice != "auto":
        if choice in ("bf16", "pure_bf16") and not native_bf16:
            raise UserError(
                f"train.precision: bf16 needs compute capability 8.0 (Ampere) or later; got {choice} for {name}; set "
                "train.precision to fp16 (the loss is scaled, trained parameters are fp32)"
            )
        return choice, "as set"
    if kind == "cpu":
        return "fp32", f"{name} gains nothing from 16 bits"
    if native_bf16:
        return "bf16", f"{name} computes in bf16"
    return "fp16", f"{name} has no native bf16"


def precision_of(params: "Params", verdict: Path) -> Precision:
    """The precision of a run: train.precision, or for `auto` the choice that stage estimate wrote into its verdict."""
    choice = params.train.precision
    return read_json(verdict)["precision"] if choice == "auto" else choice
