"""Settings, small models and random batches that several benchmarks train with."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig

from lean_finetune.config.field_types import Method, Precision
from lean_finetune.config.load import COMMON_PARAMS, load_params
from lean_finetune.config.schema import Train
from lean_finetune.memory.trace.setting import Setting
from lean_finetune.model.attention.kernels import PackedRows
from lean_finetune.rows.answers import Answers
from lean_finetune.rows.batch_part import weights_of
from lean_finetune.step.batches import IGNORED, Batch, BatchShape, pack_rows
from lean_finetune.step.offload.activation_offload import KeptActivations, make_offload
from lean_finetune.step.parallel_model import ParallelModel
from lean_finetune.step.run_checks import refuse_non_finite
from lean_finetune.step.run_optimizer import build_optimizer
from lean_finetune.step.step_loss import StepGoal
from lean_finetune.step.training_step import Phase, StepResult, training_step
from lean_finetune.step.update.loss_scaler import LossScaler, loss_scaler
from lean_finetune.train.checkpoint.training_state import restored_after_fault

SCRATCH = Path("scratch")
LR = 1e-5


def changed(train: Train, **changes: Any) -> Train:
    """The section with other values. Names of sections `lora` and `quant` have a prefix: lora_rank, quant_type."""
    values: dict[str, Any] = {}
    for name, value in changes.items():
        section, _, key = name.partition("_")
        if section in ("lora", "quant"):
            before = values.get(section, getattr(train, section))
            assert key in type(before).model_fields, name
            values[section] = before.model_copy(
                update={key: list(value) if key in ("targets", "modules_to_save", "trainable_tokens") else value}
            )
        else:
            assert name in Train.model_fields, name
            values[name] = value
    return train.model_copy(update=values)


USUAL = changed(load_params(COMMON_PARAMS).train, lr=LR, weight_decay=0.0, schedule="constant", warmup_fraction=0.0)


def train_of(method: Method, precision: Precision = "bf16", *, rank: int = 16, **more: Any) -> Train:
    """Section train with checkpointing and LoRA on all linear layers, alpha twice the rank; `more` sets others."""
    fields: dict[str, Any] = {"loss_chunk": None, "max_grad_norm": None, "lora_expert_rank": 1}
    fields |= {"method": method, "precision": precision, "lora_rank": rank, "lora_alpha": 2 * rank}
    return changed(USUAL, **{**fields, **more})


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
    return BatchShape(rows=rows, length=length, supervised=supervised, packed_lengths=None)


def joined(lengths: Sequence[int], supervised: int) -> BatchShape:
    """The shape of a micro-batch of packed rows; the last length is padding."""
    return BatchShape(rows=1, length=sum(lengths), supervised=supervised, packed_lengths=tuple(lengths))


def random_batch(shape: BatchShape, vocabulary: int, device: torch.device | None = None) -> Batch:
    """A batch of random tokens, whose first `supervised` positions are trained."""
    input_ids_BT = torch.randint(vocabulary, (shape.rows, shape.length))
    index_N = torch.arange(shape.supervised)
    targets_BT = torch.full_like(input_ids_BT, IGNORED)
    targets_BT.view(-1)[index_N] = input_ids_BT.view(-1)[index_N]
    rows = None if shape.packed_lengths is None else pack_rows(shape.packed_lengths, shape.length)
    if rows is not None:  # Copies, since memory meters do not count numpy's memory on a CPU.
        rows = PackedRows(lengths=rows.lengths, offsets=rows.offsets.clone(), positions_BT=rows.positions_BT.clone())
    parts = shape.empty_parts("cpu")
    if (weights_N := weights_of(parts)) is not None:
        weights_N.fill_(1)
    for answers in (part for part in parts if isinstance(part, Answers)):
        for values_R in (answers.reference_R, answers.better_R):
            if values_R is not None:
                values_R.fill_(1)
        answers.tokens_R.copy_(torch.tensor(answers.counts))
    batch = Batch(
        input_ids_BT=input_ids_BT,
        targets_BT=targets_BT,
        supervised_index_N=index_N,
        packed_rows=rows,
        parts=parts,
    )
    return batch if device is None else batch.to(device)


@dataclass(frozen=True, kw_only=True, eq=False)
class Trainer:
    """A model with its optimizer, as stage train has them before its first step."""

    parallel: ParallelModel
    """One process; it finds the model's modules and trained parameters once, as that of a run does."""
    optimizer: torch.optim.Optimizer
    train: Train
    device: torch.device
    scaler: LossScaler
    offload: KeptActivations

    @property
    def model(self) -> nn.Module:
        """The model with its adapters."""
        return self.parallel.model

    @classmethod
    def of(
        cls, model: nn.Module, setting: Setting, device: torch.device, *, scratch: Path = SCRATCH, **changes: Any
    ) -> "Trainer":
        """Make the optimizer of a model that is on its device; `changes` replace parameters of the setting."""
        train = changed(setting.train, **changes)
        return cls(
            parallel=ParallelModel(model),
            optimizer=build_optimizer(model, train),
            train=train,
            device=device,
            scaler=loss_scaler(train),
            offload=make_offload(train.offload_activations, train.compress_activations, device, scratch),
        )

    def step(
        self, batches: Iterable[Batch], supervised_tokens: int, phase: Phase, before: Iterable[Batch] = ()
    ) -> StepResult:
        """Run one optimizer step as the training loop does; objectives have the values of a trace.

        `supervised_tokens` divides the loss of tokens.
        """
        with restored_after_fault(self.device):
            return training_step(
                self.parallel,
                self.optimizer,
                batches,
                before=before,
                micro_batches=1,
                goal=StepGoal.of_any_rows(self.train, supervised_tokens),
                train=self.train,
                foreach=self.device.type == "cuda",
                phase=phase,
                guard=lambda losses, norm: refuse_non_finite(losses, norm, 0, []),
                scaler=self.scaler,
                offload=self.offload,
            )
