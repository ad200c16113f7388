"""Predicted and measured memory on the CPU: the trace against torch.profiler's events of PyTorch's allocator.

The two sides share the training step only. The prediction follows storages of fake tensors. The measurement adds up
what the real allocator reports while a small model of random weights is loaded and trained.
"""

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CohereConfig,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Starcoder2Config,
)

from cuda_memory.gpus import Device
from lean_finetune.config.field_types import CompressActivations, LoraExperts, Method, OptimizerName, Precision
from lean_finetune.memory.predict.peak import Prediction, predict
from lean_finetune.memory.predict.traced_step import TracedModel, TracedSteps
from lean_finetune.memory.trace.cuda_kernels import target_of
from lean_finetune.memory.trace.setting import Setting
from lean_finetune.model.experts.grouped_matmul import BLOCK_WEIGHTS
from lean_finetune.model.model_config import read_config
from lean_finetune.train.monitor.measured_peak import MeasuredPeaks, make_meter
from tests.kit.loaded import load_model
from tests.kit.specs import Trainer, joined, padded, random_batch, train_of

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
"""Configuration that all small models share."""
EXPERTS: Mapping[str, Any] = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
ROPE: Mapping[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
WINDOW = 48
"""Tokens of a sliding window: shorter than the rows, so that masks are needed."""

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
    "BLOOM": BloomConfig(**{**SMALL, "n_layer": 2, "n_head": 4}),
    "Granite": GraniteConfig(**SMALL, logits_scaling=8.0, embedding_multiplier=12.0, attention_multiplier=0.0156),
    "Command-R": CohereConfig(**SMALL),
    "Mixtral": MixtralConfig(**SMALL, num_local_experts=4),
    "Qwen3-MoE": Qwen3MoeConfig(**{**SMALL, **EXPERTS, "head_dim": 16}, num_experts=8),
    "Qwen2-MoE": Qwen2MoeConfig(**SMALL, **EXPERTS, num_experts=8, shared_expert_intermediate_size=64),
    "GPT-OSS": GptOssConfig(
        **SMALL,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        rope_parameters={**ROPE},
    ),
    "DeepSeek-V3": DeepseekV3Config(
        **{**SMALL, **EXPERTS, "num_key_value_heads": 4},
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
    ),
}
"""A small model of each family: the defaults of its configuration class, apart from sizes."""


# The second micro-batch adds to the gradients of the first; the second step starts with another shape.
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
    method: Method
    precision: Precision = "fp32"
    optimizer: OptimizerName = "adamw"
    grad_ckpt: bool = False
    loss_chunk: int | None = 32
    layout: str = "padded"
    experts: LoraExperts = "none"
    compress_activations: CompressActivations = "none"

    @property
    def setting(self) -> Setting:
        """The setting that is traced and trained."""
        train = train_of(
            self.method,
            self.precision,
            rank=4,
            grad_ckpt=self.grad_ckpt,
            lora_experts=self.experts,
            optimizer=self.optimizer,
            compress_activations=self.compress_activations,
            loss_chunk=self.loss_chunk,
            max_grad_norm=1.0,
        )
        return Setting(train=train)


def save_small(family: str, directory: Path) -> Path:
    """Save a small model of a family with random weights."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(FAMILIES[family]).save_pretrained(directory)
    return directory


def count(directory: Path, setting: Setting, steps: TracedSteps) -> MeasuredPeaks:
    """Load and train for real, measured by the CPU meter of stage train."""
    gc.collect()  # Memory of earlier runs must not be freed inside the window.
    meter = make_meter(CPU)
    with meter.window("run"):
        with meter.phase("load"):
            model = load_model(directory, setting.train, CPU)
            trainer = Trainer.of(model, setting, CPU, scratch=directory, lr=1e-3, weight_decay=0.01)
        for shapes in steps:
            own, mismatched = ((random_batch(shape, VOCABULARY) for shape in shapes) for _ in range(2))
            trainer.step(own, 300, meter.phase, mismatched)
    return meter.result()


@contextmanager
def without_onednn() -> Iterator[None]:
    """Switch off oneDNN, whose bf16 products use scratch memory that no trace can see.

    PyTorch allocates it with its CPU allocator (ATen/native/mkldnn/IDeepRegistration.cpp), per thread. Its size follows
    from blocks chosen by instruction set and caches (oneDNN's src/cpu/x64/matmul/brgemm_matmul_utils.cpp,
    `init_scratchpad`); libtorch exports no function that returns it.
    """
    before = torch.backends.mkldnn.set_flags(False)
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(before[0])


def make_code_books() -> None:
    """Make bitsandbytes create its tables, which then stay allocated for the rest of the process."""
    bnb.functional.quantize_4bit(torch.zeros(BLOCK_WEIGHTS), quant_type="nf4", compress_statistics=True)


def compare(case: Case, directory: Path) -> dict[str, tuple[int, int]]:
    """Bytes predicted and measured, by phase and for the run."""
    return compare_prediction(case, directory)[1]


def compare_prediction(case: Case, directory: Path) -> tuple[Prediction, dict[str, tuple[int, int]]]:
    """The prediction, and bytes predicted and measured, by phase and for the run."""
    steps = LAYOUTS[case.layout]
    predicted = predict(TracedModel(read_config(directory), case.setting, CPU_TARGET), steps)
    make_code_books()
    with without_onednn() if case.precision == "bf16" else nullcontext():
        counted = count(directory, case.setting, steps)
    assert counted.peak_bytes is not None
    by_phase = {phase: (peak.bytes, counted.peak_bytes_by_phase[phase]) for phase, peak in predicted.by_phase.items()}
    return predicted, {**by_phase, "run": (predicted.peak.bytes, counted.peak_bytes)}


def worst_share(pairs: Mapping[str, tuple[int, int]]) -> float:
    """The largest relative difference of a phase."""
    return max(abs(predicted - counted) / counted for predicted, counted in pairs.values())


METHODS: tuple[tuple[Method, bool], ...] = (("full", False), ("lora", True), ("qlora", False))
"""Methods that every family is tried with, and whether layers are recomputed."""
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")
SWITCHES: tuple[tuple[OptimizerName, bool, int | None, str], ...] = (
    ("adamw", False, None, "padded"),
    ("adamw", True, 32, "joined"),
    ("adamw_8bit", False, 32, "joined"),
    ("adamw_8bit", True, None, "padded"),
)
"""Optimizer, grad_ckpt, loss_chunk and layout that one family is tried with."""


def cases() -> list[Case]:
    """Every method, precision, optimizer, checkpointing, loss and layout on one family, then every other family."""
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
        for method, _ in METHODS
        for precision in PRECISIONS
        for optimizer, grad_ckpt, loss_chunk, layout in SWITCHES
    ]
    others = [
        Case(family=family, method=method, precision="bf16" if method == "qlora" else "fp32", grad_ckpt=grad_ckpt)
        for family in FAMILIES
        if family != "Llama"
        for method, grad_ckpt in METHODS
    ]
    return llama + others
