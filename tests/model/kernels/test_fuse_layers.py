"""train.fused_kernels: auto: which families have the kernels, a prediction that counts their tensors, and CPUs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lean_finetune.config.load import load_params, with_flags
from lean_finetune.memory.gpu_names import named_gpu
from lean_finetune.memory.predict.evaluation_phases import peak_of_loss
from lean_finetune.memory.predict.peak import predict
from lean_finetune.memory.predict.traced_step import TracedModel
from lean_finetune.memory.trace.cuda_kernels import target_of
from lean_finetune.model.empty_model import meta_model
from lean_finetune.model.kernels import fuse_layers
from lean_finetune.model.model_config import read_config
from lean_finetune.step.loss import token_losses
from tests.conftest import ROOT
from tests.kit.estimate_cpu import LAYOUTS, count, make_code_books, without_onednn
from tests.kit.specs import padded
from tests.kit.tiny_config import tiny_config
from tests.memory.common import CPU_TARGET, setting_of
from tests.model.kernels.test_layer_ops import allocated_on_cpu
from tests.small_model import save_small_llama
from tests.step.common import run, split

BOTH, SWIGLU, ROTARY = {"rotary embedding", "SwiGLU"}, {"SwiGLU"}, {"rotary embedding"}


@pytest.mark.parametrize(
    ("family", "parts"),
    [
        *((family, BOTH) for family in ("llama", "mistral", "qwen2", "qwen3", "smollm3", "granite")),
        *((family, ROTARY) for family in ("gemma2", "mixtral", "qwen3_moe")),
        *((family, SWIGLU) for family in ("olmo2", "cohere")),
        ("gpt2", set()),
    ],
)
def test_families_have_the_kernels_whose_code_they_have(family: str, parts: set[str]):
    """Other numbers: experts have other code, Gemma's activation is GELU, OLMo 2 and Cohere rotate in another way."""
    assert fuse_layers.fused_parts(meta_model(tiny_config(family))) == parts


@pytest.mark.parametrize(
    "flags", ["train.compress_activations=int8 train.grad_ckpt=false", "train.sequence_tiles=4 train.grad_ckpt=true"]
)
def test_switches_that_change_the_same_code_keep_the_models(flags: str):
    """A refusal of what the user did not ask for, or code that a switch does not know."""
    params = with_flags(load_params(ROOT / "params.yaml"), ["train.fused_kernels=auto", *flags.split()])
    assert fuse_layers.why_plain(params.train) is not None


def test_a_cpu_computes_by_the_models_code(small_llama: Path):
    """Another loss, or tensors that live longer, where there are no kernels."""
    settings = [setting_of(method="full", fused_kernels=kernels) for kernels in ("none", "auto")]
    models = [TracedModel(read_config(small_llama), setting, CPU_TARGET) for setting in settings]
    losses_alone = [
        peak_of_loss(model, padded(2, 64, 100), lambda module, batch, _: token_losses(module, batch, 16))
        for model in models
    ]
    assert losses_alone[0].bytes == losses_alone[1].bytes
    losses = [
        run(small_llama, split([8]), method="full", fused_kernels=kernels)[0][0].loss for kernels in ("none", "auto")
    ]
    assert torch.equal(*losses)


@pytest.fixture
def kernels_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Count on a CPU what the kernels allocate."""
    monkeypatch.setattr(fuse_layers, "runs_kernels", lambda x: True)
    with allocated_on_cpu():
        yield


SCALARS_BYTES = 192
"""What a trace leaves out, with the kernels or without: a few scalars, most with selective checkpointing."""
CASES: list[dict[str, Any]] = [
    {"method": "full"},
    {"method": "full", "grad_ckpt": True},
    {"method": "full", "precision": "bf16"},
    {"method": "lora", "precision": "bf16"},
    {"method": "lora", "grad_ckpt": True, "grad_ckpt_policy": "selective"},
    {"method": "qlora", "grad_ckpt": True},
]
SLOW = [pytest.param(case, marks=pytest.mark.slow) for case in CASES[1:]]


@pytest.mark.usefixtures("kernels_on_cpu")
@pytest.mark.parametrize("layout", ["padded", pytest.param("joined", marks=pytest.mark.slow)])
@pytest.mark.parametrize("changes", [CASES[0], *SLOW], ids=str)
def test_the_prediction_equals_what_the_allocator_counted(tmp_path: Path, changes: dict[str, Any], layout: str):
    """A trace that allocates unlike the kernels: real steps whose kernels are left out take the same memory."""
    save_small_llama(tmp_path, dtype=torch.float32, tie_word_embeddings=False)
    make_code_books()
    setting, steps = setting_of(**changes, fused_kernels="auto"), LAYOUTS[layout]
    predicted = predict(TracedModel(read_config(tmp_path), setting, CPU_TARGET), steps)
    with without_onednn():
        counted = count(tmp_path, setting, steps).peak_bytes_by_phase
    for phase, peak in predicted.by_phase.items():
        assert peak.bytes == pytest.approx(counted[phase], abs=SCALARS_BYTES), phase


@pytest.mark.parametrize(("gpu", "less"), [("H100-80GB", True), ("T4", False)])
def test_a_prediction_for_a_gpu_has_the_kernels_that_it_has(gpu: str, less: bool):
    """A T4 would be promised the memory of kernels that it cannot run."""
    target = target_of(named_gpu(gpu)[0])
    plain, fused = (
        predict(
            TracedModel(
                tiny_config("llama"), setting_of(method="full", fused_kernels=kernels, precision="fp32"), target
            ),
            LAYOUTS["padded"],
        ).peak.bytes
        for kernels in ("none", "auto")
    )
    assert (fused < plain) == less and (fused == plain) != less
