"""Settings, small models and random batches that several benchmarks train with."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig

from lean_finetune.config.field_types import Method, Precision
from lean_finetune.memory.predict.setting import Setting
from lean_finetune.model.attention.kernels import JoinedRows
from lean_finetune.model.model_spec import ModelSpec
from lean_finetune.step.activation_offload import ActivationOffload, make_offload
from lean_finetune.step.batches import IGNORED, Batch, BatchShape, join_rows
from lean_finetune.step.loss_scaling import LossScaler
from lean_finetune.step.run_optimizer import build_optimizer
from lean_finetune.step.training_step import Phase, StepResult, StepSpec, training_step

SCRATCH = Path("scratch")
LR = 1e-5


def model_spec(method: Method, precision: Precision = "bf16", *, rank: int = 16, **more: Any) -> ModelSpec:
    """A model with checkpointing and LoRA on all linear layers, alpha twice the rank; `more` sets other fields."""
    fields = {
        "grad_ckpt": True,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "lora_targets": ("all-linear",),
        "seed": 1,
    }
    return ModelSpec(method=method, precision=precision, lora_rank=rank, **{**fields, **more})


def llama(
    hidden: int,
    intermediate: int,
    *,
    layers: int,
    heads: int,
    kv_heads: int,
    vocabulary: int = 128256,
    tied: bool = False,
    **more: Any,
) -> LlamaConfig:
    """A Llama of these sizes; `more` sets other fields."""
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        **more,
    )


def padded(rows: int, length: int, supervised: int) -> BatchShape:
    """The shape of a micro-batch of padded rows."""
    return BatchShape(rows=rows, length=length, supervised=supervised, joined_lengths=None)


def joined(lengths: Sequence[int], supervised: int) -> BatchShape:
    """The shape of a micro-batch of joined rows; the last length is padding."""
    return BatchShape(rows=1, length=sum(lengths), supervised=supervised, joined_lengths=tuple(lengths))


def random_batch(shape: BatchShape, vocabulary: int, device: torch.device | None = None) -> Batch:
    """A batch of random tokens, whose first `supervised` positions are trained."""
    input_ids_BT = torch.randint(vocabulary, (shape.rows, shape.length))
    index_N = torch.arange(shape.supervised)
    targets_BT = torch.full_like(input_ids_BT, IGNORED)
    targets_BT.view(-1)[index_N] = input_ids_BT.view(-1)[index_N]
    rows = None if shape.joined_lengths is None else join_rows(shape.joined_lengths, shape.length)
    if rows is not None:  # Copies, since memory meters do not count numpy's memory on a CPU.
        rows = JoinedRows(lengths=rows.lengths, offsets=rows.offsets.clone(), positions_BT=rows.positions_BT.clone())
    batch = Batch(input_ids_BT=input_ids_BT, targets_BT=targets_BT, supervised_index_N=index_N, joined_rows=rows)
    return batch if device is None else batch.to(device)


@dataclass(frozen=True, kw_only=True, eq=False)
class Trainer:
    """A model with its optimizer, as stage train has them before its first step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    setting: Setting
    step_spec: StepSpec
    scaler: LossScaler | None
    offload: ActivationOffload | None

    @classmethod
    def of(
        cls, model: nn.Module, setting: Setting, device: torch.device, *, scratch: Path = SCRATCH, **optim: Any
    ) -> "Trainer":
        """Make the optimizer of a model that is on its device; `optim` replaces fields of its OptimSpec."""
        step_spec = StepSpec(
            loss_chunk=setting.loss_chunk,
            max_grad_norm=setting.max_grad_norm,
            foreach=device.type == "cuda",
            optimizer_in_backward=setting.optimizer_in_backward,
        )
        return cls(
            model=model,
            optimizer=build_optimizer(model, replace(setting.optim_spec, **{"lr": LR, **optim})),
            setting=setting,
            step_spec=step_spec,
            scaler=LossScaler() if setting.model.scales_loss else None,
            offload=make_offload(setting.offload_activations, setting.compress_activations, device, scratch),
        )

    def step(self, batches: Iterable[Batch], supervised_tokens: int, phase: Phase) -> StepResult:
        """Run one optimizer step; `supervised_tokens` divides the loss."""
        return training_step(
            self.model,
            self.optimizer,
            batches,
            supervised_tokens=supervised_tokens,
            model_spec=self.setting.model,
            spec=self.step_spec,
            phase=phase,
            guard=lambda losses, norm: None,
            scaler=self.scaler,
            offload=self.offload,
        )
