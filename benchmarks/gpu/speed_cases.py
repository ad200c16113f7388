"""What is timed on a GPU: training steps of Llama-3.1-8B with random weights, and how their arithmetic is counted."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from benchmarks.gpu.cases import MODELS, small_llama
from lean_finetune.config.field_types import Method, OptimizerName
from lean_finetune.memory.predict.peak import Setting
from lean_finetune.model.model_spec import ModelSpec
from lean_finetune.step.batches import BatchShape

PEAK_FLOPS = 989e12
"""Dense bf16 of an H100 or H200 (data sheet): what MFU is a share of."""
LORA_RANK = 16
FLOPS_FROZEN, FLOPS_TRAINED = 4, 6
"""By weight and token: two products of 2 FLOP, and a third for the gradient of a weight that is trained."""
FLOPS_SCORES = 6
"""By layer, width and token of the row: scores and their product with values, causally half, forward and twice back."""


@dataclass(frozen=True, kw_only=True)
class SpeedCase:
    """One training step, its micro-batch the whole step, every position of a row but the last trained."""

    name: str
    model: str
    method: Method
    rows: int
    length: int
    """Tokens of each row."""
    optimizer: OptimizerName
    grad_ckpt: bool
    loss_chunk: int
    offload: bool = False
    """Activations go to pinned host memory."""

    @property
    def config(self) -> PretrainedConfig:
        """Of the model."""
        return SMALL if self.model == "small" else MODELS[self.model]

    @property
    def shape(self) -> BatchShape:
        """Of the micro-batch."""
        supervised = self.rows * (self.length - 1)
        return BatchShape(rows=self.rows, length=self.length, supervised=supervised, joined_lengths=None)

    @property
    def setting(self) -> Setting:
        """What is trained, and how."""
        return Setting(
            model=ModelSpec(
                method=self.method,
                precision="bf16",
                grad_ckpt=self.grad_ckpt,
                lora_rank=LORA_RANK,
                lora_alpha=2 * LORA_RANK,
                lora_dropout=0.0,
                lora_targets=("all-linear",),
                seed=0,
            ),
            optimizer=self.optimizer,
            loss_chunk=self.loss_chunk,
            max_grad_norm=1.0,
            offload_activations="cpu" if self.offload else "none",
        )


SMALL = small_llama(tied=False)
"""With which a CPU shows that the benchmark works."""
LORA_4096, QLORA_LEAST = "LoRA, 1 x 4096", "QLoRA, 2 x 2048, everything on"
_8B: dict[str, Any] = {"model": "Llama-3.1-8B", "loss_chunk": 512}
CASES = (
    SpeedCase(name=LORA_4096, method="lora", rows=1, length=4096, optimizer="adamw", grad_ckpt=False, **_8B),
    SpeedCase(
        name=QLORA_LEAST,
        model="Llama-3.1-8B",
        method="qlora",
        rows=2,
        length=2048,
        optimizer="paged_adamw_8bit",
        grad_ckpt=True,
        loss_chunk=256,
        offload=True,
    ),
    SpeedCase(
        name="QLoRA, 2 x 2048", method="qlora", rows=2, length=2048, optimizer="adamw_8bit", grad_ckpt=True, **_8B
    ),
    SpeedCase(
        name="QLoRA, 1 x 8192", method="qlora", rows=1, length=8192, optimizer="adamw_8bit", grad_ckpt=True, **_8B
    ),
    SpeedCase(
        name="full bf16, 2 x 2048", method="full", rows=2, length=2048, optimizer="adamw_8bit", grad_ckpt=True, **_8B
    ),
)
_SMALL: dict[str, Any] = {"model": "small", "rows": 2, "length": 64, "loss_chunk": 32}
SMALL_CASES = (
    SpeedCase(name="LoRA, 2 x 64", method="lora", optimizer="adamw", grad_ckpt=False, **_SMALL),
    SpeedCase(name="full bf16, 2 x 64", method="full", optimizer="adamw_8bit", grad_ckpt=True, **_SMALL),
    SpeedCase(name="QLoRA, 2 x 64", method="qlora", optimizer="adamw_8bit", grad_ckpt=True, **_SMALL),
)


def flops_per_token(model: nn.Module, case: SpeedCase) -> float:
    """Arithmetic that a token's training needs; what recomputation adds is not counted.

    Weights are those that a token is multiplied with: all but the input embedding, of which a row is looked up. Packed
    ones are counted by the shape of their layer.
    """
    frozen = trained = 0
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad:
                trained += parameter.numel()
            elif isinstance(module, nn.Linear) and name == "weight":  # bitsandbytes' layers are such ones too.
                frozen += module.in_features * module.out_features
    text = case.config.get_text_config()
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    scores = FLOPS_SCORES * text.num_hidden_layers * text.num_attention_heads * head_size * case.length
    return FLOPS_FROZEN * frozen + FLOPS_TRAINED * trained + scores


def matmul_flops(device: torch.device) -> float:
    """FLOP/s of a large bf16 product on a device, the best of several: what its clock and cooling let it do."""
    cuda = device.type == "cuda"
    size = 8192 if cuda else 256
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    best = 0.0
    for _ in range(10):
        best = max(best, 2 * size**3 / seconds_of(lambda: torch.mm(a, b), device))
    return best


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Wall seconds of some work, the device's included."""
    _wait(device)
    start = perf_counter()
    work()
    _wait(device)
    return perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def bars_of(rows: Mapping[str, Mapping[str, Any]], matmul: float) -> list[tuple[str, float, str, float]]:
    """(promise, value, rule, limit) of what is promised of these rows, by case; only of what was measured."""
    found: list[tuple[str, float, str, float]] = []
    for name, row in rows.items():
        if "tokens_per_s" not in row:
            continue
        if name == LORA_4096:
            found.append((f"{name}: tokens/s", row["tokens_per_s"], ">=", 12_473 * matmul / PEAK_FLOPS))
            found.append((f"{name}: MFU, percent", row["mfu_percent"], ">=", 41.0))
        if name == QLORA_LEAST:
            found.append((f"{name}: allocated, GiB", row["allocated_bytes"] / 2**30, "<=", 7.4))
        if row.get("reserved_bytes") is not None:
            share = row["reserved_bytes"] / row["allocated_bytes"]
            found.append((f"{name}: reserved / allocated", share, "<=", 1.05))
        if row.get("trl_tokens_per_s"):
            found.append((f"{name}: ours / TRL", row["tokens_per_s"] / row["trl_tokens_per_s"], ">=", 1.2))
    return found
