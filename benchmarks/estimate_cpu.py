"""Predicted beside counted, on the CPU: the trace against torch.profiler's events of PyTorch's own allocator.

The two sides share nothing but the step: the prediction follows storages of fake tensors, the count adds up what the
real allocator reports while a small model of random weights is loaded and trained.
"""

import gc
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Starcoder2Config,
)

from benchmarks.form import Row
from lean_finetune.memory.gpus import Device
from lean_finetune.memory.predict.peak import Setting, optim_of, predict
from lean_finetune.memory.predict.traced_shapes import TracedSteps
from lean_finetune.memory.trace.cuda_kernels import target_of
from lean_finetune.model.attention import JoinedRows
from lean_finetune.model.load_model import load_model
from lean_finetune.model.model_config import read_config
from lean_finetune.model.model_spec import ModelSpec
from lean_finetune.model.quantize import BLOCK_WEIGHTS
from lean_finetune.step.activation_offload import make_offload
from lean_finetune.step.batches import IGNORED, Batch, BatchShape, join_rows
from lean_finetune.step.loss_scaling import LossScaler
from lean_finetune.step.run_optimizer import build_optimizer
from lean_finetune.step.training_step import StepSpec, training_step
from lean_finetune.train.monitor.measured_peak import Measured, make_meter

CPU = torch.device("cpu")
CPU_TARGET = target_of(Device(name="cpu", kind="cpu", memory_bytes=2**34, compute_capability=(0, 0)))
VOCABULARY = 256
SMALL: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""What all small models have."""
WINDOW = 48
"""Tokens of a sliding window: shorter than the rows, so that masks are made."""

FAMILIES: Mapping[str, PretrainedConfig] = {
    "Llama": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "Llama, untied": LlamaConfig(**SMALL, tie_word_embeddings=False),
    "Qwen2": Qwen2Config(**SMALL),
    "Qwen3": Qwen3Config(**SMALL, head_dim=16),
    "Mistral": MistralConfig(**SMALL),
    "Mistral, window": MistralConfig(**SMALL, sliding_window=WINDOW),
    "Gemma": GemmaConfig(**SMALL, head_dim=16),
    "Gemma 2": Gemma2Config(**SMALL, head_dim=16, sliding_window=WINDOW),
    "Gemma 3": Gemma3TextConfig(**SMALL, head_dim=16, sliding_window=WINDOW),
    "Phi 2": PhiConfig(**SMALL, resid_pdrop=0.0),
    "Phi 3": Phi3Config(**SMALL),
    "OPT": OPTConfig(**SMALL, ffn_dim=128, word_embed_proj_dim=32, do_layer_norm_before=False, dropout=0.0),
    "GPT-NeoX": GPTNeoXConfig(**SMALL),
    "StarCoder 2": Starcoder2Config(**SMALL, residual_dropout=0.0, embedding_dropout=0.0),
}
"""A small model of each family, as its configuration class builds it by default but for size."""


def padded(rows: int, length: int, supervised: int) -> BatchShape:
    """The shape of rows that are padded to each other."""
    return BatchShape(rows=rows, length=length, supervised=supervised, joined_lengths=None)


def joined(lengths: tuple[int, ...], supervised: int) -> BatchShape:
    """The shape of rows that are joined; the last length is padding."""
    return BatchShape(rows=1, length=sum(lengths), supervised=supervised, joined_lengths=lengths)


# The second micro-batch meets the gradients of the first; the second step begins with another shape.
LAYOUTS: Mapping[str, TracedSteps] = {
    "padded": ((padded(4, 96, 200), padded(2, 128, 100)), (padded(6, 64, 300),)),
    "joined": (
        (joined((128, 100, 60, 50, 30, 16), 200), joined((128, 96, 20, 8, 4), 100)),
        (joined((64, 64, 64, 50, 50, 40, 30, 20, 2), 300),),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison."""

    family: str
    method: str
    precision: str = "fp32"
    optimizer: str = "adamw"
    grad_ckpt: bool = False
    loss_chunk: int | None = 32
    layout: str = "padded"

    @property
    def setting(self) -> Setting:
        """What is traced and trained."""
        return Setting(
            model=ModelSpec(
                method=self.method,  # type: ignore[arg-type]
                precision=self.precision,  # type: ignore[arg-type]
                grad_ckpt=self.grad_ckpt,
                lora_rank=4,
                lora_alpha=8,
                lora_dropout=0.0,
                lora_targets=("all-linear",),
                seed=1,
            ),
            optimizer=self.optimizer,
            loss_chunk=self.loss_chunk,
            max_grad_norm=1.0,
        )


def save_small(family: str, directory: Path) -> Path:
    """Write a small model of a family with random weights."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(FAMILIES[family]).save_pretrained(directory)
    return directory


def real_batch(wanted: BatchShape, vocabulary: int) -> Batch:
    """A batch of this shape with random tokens, the first `supervised` positions trained."""
    input_ids_BT = torch.randint(vocabulary, (wanted.rows, wanted.length))
    index = torch.arange(wanted.supervised)
    targets_BT = torch.full_like(input_ids_BT, IGNORED)
    targets_BT.view(-1)[index] = input_ids_BT.view(-1)[index]
    rows = None if wanted.joined_lengths is None else join_rows(wanted.joined_lengths, wanted.length)
    if rows is not None:  # numpy's memory, which the profiler does not count; a GPU's batch is copied.
        rows = JoinedRows(lengths=rows.lengths, offsets=rows.offsets.clone(), positions_BT=rows.positions_BT.clone())
    return Batch(input_ids_BT=input_ids_BT, targets_BT=targets_BT, supervised_index_N=index, joined_rows=rows)


def count(directory: Path, setting: Setting, steps: TracedSteps) -> Measured:
    """Load and train for real under the CPU's meter, as train does."""
    offload = make_offload(setting.offload_activations, CPU, directory)
    optim = replace(optim_of(setting), lr=1e-3, weight_decay=0.01)
    spec = StepSpec(
        loss_chunk=setting.loss_chunk,
        max_grad_norm=setting.max_grad_norm,
        foreach=False,
        optimizer_in_backward=setting.optimizer_in_backward,
    )
    scaler = LossScaler() if setting.model.scales_loss else None
    gc.collect()  # What earlier runs left must not be freed inside the window.
    meter = make_meter(CPU)
    with meter.window("run"):
        with meter.phase("load"):
            model = load_model(directory, setting.model, CPU)
            optimizer = build_optimizer(model, optim)
        for shapes in steps:
            training_step(
                model,
                optimizer,
                (real_batch(wanted, VOCABULARY) for wanted in shapes),
                supervised_tokens=300,
                model_spec=setting.model,
                spec=spec,
                phase=meter.phase,
                guard=lambda losses, norm: None,
                scaler=scaler,
                offload=offload,
            )
    return meter.result()


@contextmanager
def without_onednn() -> Iterator[None]:
    """Multiply without oneDNN, whose bf16 products take scratch memory that no shape function tells of."""
    before = torch.backends.mkldnn.set_flags(False)
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(before[0])


def make_code_books() -> None:
    """Have bitsandbytes make the tables that it keeps for the life of the process."""
    bnb.functional.quantize_4bit(torch.zeros(BLOCK_WEIGHTS), quant_type="nf4", compress_statistics=True)


def compare(case: Case, directory: Path) -> dict[str, tuple[int, int]]:
    """Bytes predicted and counted, by phase and of the whole run."""
    steps = LAYOUTS[case.layout]
    predicted = predict(read_config(directory), case.setting, steps, CPU_TARGET)
    make_code_books()
    with without_onednn() if case.precision == "bf16" else nullcontext():
        counted = count(directory, case.setting, steps)
    assert counted.peak_bytes is not None
    by_phase = {phase: (peak.bytes, counted.peak_bytes_by_phase[phase]) for phase, peak in predicted.by_phase.items()}
    return {**by_phase, "whole run": (predicted.peak.bytes, counted.peak_bytes)}


def worst_share(pairs: Mapping[str, tuple[int, int]]) -> float:
    """The largest difference of a phase, as a share of what was counted in it."""
    return max(abs(predicted - counted) / counted for predicted, counted in pairs.values())


def cases(quick: bool = False) -> list[Case]:
    """Every method, type, optimizer, checkpointing, loss and layout on one family, and every family."""
    llama = [
        Case(
            family="Llama",
            method=method,
            precision=precision,
            optimizer=optimizer,
            grad_ckpt=grad_ckpt,
            loss_chunk=loss_chunk,
            layout=layout,
        )
        for method in ("full", "lora", "qlora")
        for precision in ("fp32", "bf16")
        for optimizer, grad_ckpt, loss_chunk, layout in (
            ("adamw", False, None, "padded"),
            ("adamw", True, 32, "joined"),
            ("adamw_8bit", False, 32, "joined"),
            ("adamw_8bit", True, None, "padded"),
        )
    ]
    others = [
        Case(family=family, method=method, precision="bf16" if method == "qlora" else "fp32", grad_ckpt=grad_ckpt)
        for family in FAMILIES
        if family != "Llama"
        for method, grad_ckpt in (("full", False), ("lora", True), ("qlora", False))
    ]
    return llama[::6] if quick else llama + others


def rows(quick: bool = False) -> list[Row]:
    """The table: one row for each configuration, bytes of the whole run."""
    found: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        for case in cases(quick):
            directory = Path(scratch) / case.family
            if not directory.exists():
                save_small(case.family, directory)
            pairs = compare(case, directory)
            predicted, counted = pairs["whole run"]
            found.append(
                {
                    **asdict(case),
                    "predicted_B": predicted,
                    "counted_B": counted,
                    "difference_B": predicted - counted,
                    "worst_phase_percent": 100 * worst_share(pairs),
                }
            )
    return found
