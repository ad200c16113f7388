"""What estimate, train and evaluate must build alike: the model, its adapters and its number format."""

from dataclasses import dataclass
from typing import Any, Literal

import torch

from stages.params import ALL_LINEAR, Params


@dataclass(frozen=True, kw_only=True)
class WeightsSpec:
    """How the base's weights are held and computed with: all that a saved model's user must know of its training."""

    method: Literal["full", "lora", "qlora"]
    precision: Literal["bf16", "fp32"]

    @classmethod
    def from_params(cls, params: Params) -> "WeightsSpec":
        """Read train.method and train.precision, nothing else."""
        return cls(method=params.train.method, precision=params.train.precision)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the frozen weights, of full weights, and of the arithmetic."""
        return {"bf16": torch.bfloat16, "fp32": torch.float32}[self.precision]

    def autocast(self, device_type: str) -> Any:
        """Context of the forward pass: fp32 adapters on bf16 weights compute in bf16; full bf16 needs no casts."""
        mixed = self.precision == "bf16" and self.method != "full"
        return torch.autocast(device_type, dtype=torch.bfloat16, enabled=mixed)


@dataclass(frozen=True, kw_only=True)
class ModelSpec(WeightsSpec):
    """Everything that decides which tensors a model has and which of them are trained."""

    grad_ckpt: bool
    lora_rank: int
    lora_alpha: int
    lora_dropout: float
    lora_targets: tuple[str, ...]
    seed: int

    @classmethod
    def from_params(cls, params: Params) -> "ModelSpec":
        """Read the `train` section and the seed."""
        train, lora = params.train, params.train.lora
        return cls(
            method=train.method,
            precision=train.precision,
            grad_ckpt=train.grad_ckpt,
            lora_rank=lora.rank,
            lora_alpha=lora.alpha,
            lora_dropout=lora.dropout,
            lora_targets=tuple(lora.targets),
            seed=params.seed,
        )

    @property
    def peft_targets(self) -> str | list[str]:
        """The adapter targets in the form peft takes."""
        return ALL_LINEAR if self.lora_targets == (ALL_LINEAR,) else list(self.lora_targets)
