"""Hugging Face's Trainer gives the same result on the same rows in the same order."""

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from lean_finetune.step.batches import IGNORED
from lean_finetune.step.run_optimizer import peak_lr
from tests.small_model import spec_of
from tests.step.common import rows, run, split

STEPS = 20
OPTIM = spec_of(optimizer="adamw", lr=2e-3, weight_decay=0.1, schedule="constant", warmup_fraction=0.0)


class InOrder(Trainer):
    """The Trainer without shuffling, which records its losses."""

    losses: list[float]

    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        data: Any = self.train_dataset
        return SequentialSampler(data)

    def compute_loss(self, *arguments: Any, **named: Any) -> Any:
        loss: Any = super().compute_loss(*arguments, **named)
        self.losses.append(loss.item())
        return loss


def padded(examples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Rows as a batch, padded on the right with 0 and ignored labels, with an attention mask."""
    pads = {"input_ids": 0, "labels": IGNORED, "attention_mask": 0}
    return {
        key: torch.nn.utils.rnn.pad_sequence([one[key] for one in examples], batch_first=True, padding_value=pad)
        for key, pad in pads.items()
    }


def example(ids: Any, spans: Any) -> dict[str, torch.Tensor]:
    """A row in the Trainer's format."""
    input_ids = torch.from_numpy(ids.astype("int64"))
    labels = torch.full_like(input_ids, IGNORED)
    for start, end in spans:
        labels[start:end] = input_ids[start:end]
    return {"input_ids": input_ids, "labels": labels, "attention_mask": torch.ones_like(input_ids)}


def test_transformers_trainer_gives_the_same_losses_and_weights(small_llama: Path, tmp_path: Path):
    """Padding by mask, mean loss, clipping, decay: each a place where two loops part. Only rounding may.

    The Trainer runs the eight rows as one batch, ours as two micro-batches, so sums are rounded in another order;
    Adam's division by small second moments then widens that from 1e-7 to some 1e-5 over the steps.
    """
    results, weights = run(small_llama, split([3, 5]), steps=STEPS, optim=OPTIM, method="full")
    ours = [result.loss.item() for result in results]
    model = AutoModelForCausalLM.from_pretrained(small_llama, dtype=torch.float32)
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=8,
        max_steps=STEPS,
        learning_rate=peak_lr(OPTIM),
        weight_decay=OPTIM.weight_decay,
        max_grad_norm=1.0,
        lr_scheduler_type="constant",
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    trainer = InOrder(
        model=model, args=arguments, train_dataset=[example(*row) for row in rows()], data_collator=padded
    )
    trainer.losses = []
    trainer.train()
    assert len(trainer.losses) == STEPS
    assert abs(trainer.losses[0] - ours[0]) < 1e-6
    assert max(abs(a - b) for a, b in zip(trainer.losses, ours, strict=True)) < 1e-4
    theirs = dict(model.named_parameters())
    for name, weight in weights.items():
        torch.testing.assert_close(theirs[name].detach(), weight, rtol=1e-3, atol=1e-4, msg=name)
