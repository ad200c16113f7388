"""The closed form of states: equal to the trace, and the survey's arithmetic."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig

from lean_finetune.config.optimizers import OPTIMIZERS
from lean_finetune.core.units import GIB
from lean_finetune.memory.predict.peak import optim_of, predict
from lean_finetune.memory.predict.state_formulas import (
    BF16_WITH_FP32_MASTER,
    BF16_WITH_FP32_MOMENTS,
    PURE_BF16,
    PURE_FP32,
    host_lines,
    model_shapes,
    state_bytes,
    state_lines,
)
from lean_finetune.model.load_model import fake_model, load_model
from lean_finetune.model.model_config import read_config
from lean_finetune.model.quantize import quantisation_tensors
from lean_finetune.step.master_weights import MasterWeights
from lean_finetune.step.optimizers import device_state
from lean_finetune.step.run_optimizer import build_optimizer
from tests.memory.common import CPU_TARGET, gpu_target, setting_of, shape
from tests.small_model import CPU, spec_of

GB = 10**9
OTHER_OPTIMIZERS = [name for name in OPTIMIZERS if name not in ("adamw", "adamw_8bit")]
STATES = ("weights", "quantisation_state", "adapters", "gradients", "optimizer")


def llama(*, tied: bool) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=264,  # Not a multiple of 64 × 256: the last block of scales is not full.
        intermediate_size=520,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=1000,
        tie_word_embeddings=tied,
        attention_bias=not tied,
    )


LLAMA_3_1_8B = LlamaConfig(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
    tie_word_embeddings=False,
)


@pytest.mark.parametrize(
    ("method", "precision", "gpu", "optimizer", "tied"),
    [
        ("full", "bf16", None, "adamw", True),
        ("full", "fp32", "T4", "adamw_8bit", False),
        ("lora", "bf16", "H100", "adamw", False),
        ("lora", "fp32", None, "adamw_8bit", True),
        ("qlora", "bf16", "H100", "adamw_8bit", True),
        ("qlora", "fp32", None, "adamw", False),
        ("qlora", "bf16", "H100", "adamw_8bit", False),  # Biases beside packed weights.
        *(("full", "bf16", gpu, name, False) for name in OTHER_OPTIMIZERS for gpu in (None, "H100")),
    ],
)
def test_the_closed_form_is_what_the_trace_counts(method, precision, gpu, optimizer, tied):
    """A rule of the closed form, or a category of the trace, that is off by a byte."""
    setting = setting_of(method=method, precision=precision, optimizer=optimizer, lora_targets=("all-linear",))
    target = CPU_TARGET if gpu is None else gpu_target(gpu)
    held = predict(llama(tied=tied), setting, ((shape(2, 32, 40),),), target).by_phase["clip"].by_category
    lines = state_lines(
        model_shapes(llama(tied=tied)),
        setting.model,
        setting.optimizer,
        cuda=target.foreach,
        master_weights=setting.master_weights,
    )
    closed = state_bytes(lines, granularity_bytes=target.granularity_bytes)
    assert closed == {category: held[category] for category in STATES if category in held}


@pytest.mark.parametrize("gpu", [None, "H100"])
@pytest.mark.parametrize(
    "changes",
    [
        {"method": "lora", "lora_dora": True},
        {"method": "lora", "lora_init": "pissa"},
        {"method": "lora", "precision": "pure_bf16"},
        {"method": "full", "precision": "fp16"},
        {"method": "lora", "precision": "fp16"},
        {"method": "qlora", "quant_type": "fp4", "double_quant": False, "precision": "fp16"},
        {"method": "int8_lora", "precision": "bf16"},
        {"method": "full", "precision": "bf16", "master_weights": True},
        {"method": "full", "precision": "bf16", "master_weights": True, "optimizer": "adamw_8bit"},
        {"method": "full", "precision": "bf16", "master_weights": True, "offload": "optimizer"},
        {"method": "lora", "offload": "optimizer", "optimizer": "lion_8bit"},
        {"method": "full", "precision": "bf16", "optimizer_in_backward": True, "max_grad_norm": None},
    ],
    ids=str,
)
def test_the_closed_form_of_every_method_and_type(changes, gpu):
    """The same for what the rows above leave out."""
    setting = setting_of(**changes)
    target = CPU_TARGET if gpu is None else gpu_target(gpu)
    held = predict(llama(tied=False), setting, ((shape(2, 32, 40),),), target).by_phase["clip"].by_category
    lines = state_lines(
        model_shapes(llama(tied=False)),
        setting.model,
        setting.optimizer,
        cuda=target.foreach,
        master_weights=setting.master_weights,
        offload=setting.offload,
        optimizer_in_backward=setting.optimizer_in_backward,
    )
    closed = state_bytes(lines, granularity_bytes=target.granularity_bytes)
    assert closed == {category: held[category] for category in STATES if category in held}


def test_adapters_of_named_layers():
    """Targets that end alike taken for each other, or the head adapted."""
    spec = spec_of(method="lora", lora_targets=("q_proj", "down_proj"))
    closed = state_bytes(
        state_lines(model_shapes(llama(tied=False)), spec, "adamw", cuda=False, master_weights=False),
        granularity_bytes=1,
    )
    assert closed["adapters"] == 4 * 3 * spec.lora_rank * ((264 + 264) + (264 + 520))


def test_llama_3_1_8b_holds_what_the_closed_form_says():
    """An arithmetic that only holds for small models: every tensor of the 8B, without memory."""
    spec = spec_of(method="qlora", precision="bf16", lora_rank=16)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = fake_model(LLAMA_3_1_8B, spec, CPU)
    closed = state_bytes(
        state_lines(model_shapes(LLAMA_3_1_8B), spec, "adamw", cuda=False, master_weights=False), granularity_bytes=1
    )
    trained = sum(_bytes(p) for p in model.parameters() if p.requires_grad)
    frozen = sum(_bytes(t) for t in [*model.parameters(), *model.buffers()] if not t.requires_grad)
    assert closed["weights"] == frozen
    assert closed.get("quantisation_state", 0) == sum(_bytes(t) for t in quantisation_tensors(model))
    assert closed["adapters"] == closed["gradients"] == trained == 4 * 41_943_040


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def test_every_line_says_why():
    """A table of bytes that nobody can check: what each tensor kind is, and how large a value."""
    lines = state_lines(
        model_shapes(LLAMA_3_1_8B),
        spec_of(method="qlora", precision="bf16"),
        "adamw_8bit",
        cuda=True,
        master_weights=False,
    )
    said = {(line.category, line.what): round(line.total_bytes(1) / GIB, 3) for line in lines}
    assert said["weights", "NF4, half a byte a value"] == 3.25
    assert said["weights", "bf16, 2 bytes a value"] == 1.958
    assert said["quantisation_state", "scales, a byte per 64 values"] == 0.102
    assert ("optimizer", "two moments, a byte each per trained value") in said


def test_the_surveys_arithmetic_of_7b_and_175b():
    """The table this project started from: 7B weights 14 GB, Adam 28 or 56 GB, gradients 14 GB; 175B in fp16 350 GB."""
    assert 7e9 * PURE_BF16.weights == 14 * GB
    assert 7e9 * PURE_BF16.gradients == 14 * GB
    assert 7e9 * PURE_BF16.moments == 28 * GB
    assert 7e9 * BF16_WITH_FP32_MOMENTS.moments == 56 * GB
    assert 175e9 * PURE_BF16.weights == 350 * GB
    assert PURE_FP32.in_update == 16


def test_llama_8b_with_fp32_master_weights_grows_by_phase_until_it_does_not_fit_80_gb():
    """OpenRLHF's 46 → 61 → out of memory: 6 bytes a parameter prepared, 8 after backward, 16 in the update."""
    values = model_shapes(LLAMA_3_1_8B).values
    assert values == 8_030_261_248
    scheme = BF16_WITH_FP32_MASTER
    assert (scheme.prepared, scheme.after_backward, scheme.in_update) == (6, 8, 16)
    assert round(values * scheme.prepared / GIB, 1) == 44.9
    assert round(values * scheme.after_backward / GIB, 1) == 59.8
    assert values * scheme.in_update > 80 * GIB


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit", "adafactor"])
def test_the_hosts_closed_form_is_what_is_made_there(optimizer, small_llama):
    """Memory of the host promised away: copies, moments, room for a gradient, and the buffer on the way."""
    setting = setting_of(method="full", precision="bf16", master_weights=True, optimizer=optimizer, offload="optimizer")
    model = load_model(small_llama, setting.model, CPU)
    made = build_optimizer(model, optim_of(setting))
    assert isinstance(made, MasterWeights) and made.link is not None
    tensors = [
        *made.link.buffers,
        *(state["master"] for state in made.state.values()),
        *device_state(made.inner, setting.optimizer, cuda=False),
    ]
    held = {tensor.data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}  # Code books are there once.
    lines = host_lines(model_shapes(read_config(small_llama)), setting.model, setting.optimizer, master_weights=True)
    assert sum(line.total_bytes(1) for line in lines) == sum(held.values())
