"""The closed form of training state equals the trace."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig, PretrainedConfig

from cuda_memory.units import GIB
from lean_finetune.config.optimizers import OPTIMIZERS
from lean_finetune.memory.predict.peak import predict
from lean_finetune.memory.predict.process_memory import host_lines, host_state_bytes
from lean_finetune.memory.predict.state_formulas import (
    model_shapes,
    state_bytes,
    state_lines,
)
from lean_finetune.memory.predict.traced_step import TracedModel
from lean_finetune.memory.trace.memory_trace import GRADIENTS
from lean_finetune.model.joined_adapters.join import reason_apart
from lean_finetune.model.load_model import fake_model
from lean_finetune.model.model_config import read_config
from lean_finetune.model.quantize import quantisation_tensors
from lean_finetune.step.run_optimizer import build_optimizer
from tests.distributed.group import Group, group_of
from tests.kit.loaded import load_model
from tests.kit.tiny_config import tiny_config
from tests.memory.common import CPU_TARGET, LLAMA_3_1_8B, gpu_target, host_bytes, llama, setting_of, shape
from tests.memory.ranks import do_host_bytes, pipeline_setting, shared_setting
from tests.small_model import CPU, save_small_llama
from tests.step.common import slow

OTHER_OPTIMIZERS = [name for name in OPTIMIZERS if name not in ("adamw", "adamw_8bit")]
STATES = ("weights", "quantisation_state", "adapters", "gradients", "optimizer")


def uneven(**changes: Any) -> LlamaConfig:
    """Sizes that are not a multiple of 64 × 256: the last block of scales is not full."""
    return llama(
        **{"hidden_size": 264, "intermediate_size": 520, "num_hidden_layers": 3, "vocab_size": 1000, **changes}
    )


SETTINGS = [
    {"method": "full", "precision": "bf16"},
    {"method": "full", "precision": "fp32", "optimizer": "adamw_8bit"},
    {"method": "full", "precision": "fp16"},
    {"method": "lora", "precision": "fp32", "optimizer": "adamw_8bit"},
    {"method": "lora", "precision": "fp16"},
    {"method": "lora", "precision": "pure_bf16"},
    {"method": "lora", "lora_dora": True},
    {"method": "lora", "lora_init": "pissa"},
    {"method": "qlora", "precision": "bf16", "optimizer": "adamw_8bit"},  # Biases beside packed weights.
    {"method": "qlora", "quant_type": "fp4", "quant_double": False, "precision": "fp16"},
    {"method": "int8_lora", "precision": "bf16"},
    {"method": "full", "precision": "bf16", "master_weights": True},
    {"method": "full", "precision": "bf16", "master_weights": True, "optimizer": "adamw_8bit"},
    {"method": "full", "precision": "bf16", "master_weights": True, "offload": "optimizer"},
    {"method": "lora", "offload": "optimizer", "optimizer": "lion_8bit"},
    {"method": "full", "precision": "bf16", "optimizer_in_backward": True, "max_grad_norm": None},
    *({"method": "full", "precision": "bf16", "optimizer": name} for name in OTHER_OPTIMIZERS),
]


# Half of the pairs, alternately on a CPU and on a GPU; the others are slow.
PAIRS = [
    pytest.param(changes, gpu, marks=pytest.mark.slow if number % 2 == on_gpu else ())
    for number, changes in enumerate(SETTINGS)
    for on_gpu, gpu in enumerate((None, "H100"))
]


@pytest.mark.parametrize(("changes", "gpu"), PAIRS, ids=str)
def test_the_closed_form_is_what_the_trace_counts(changes, gpu):
    """A rule of the closed form, or a category of the trace, that is off by a byte."""
    tied = changes["method"] == "lora"
    check_closed_form(uneven(tie_word_embeddings=tied, attention_bias=not tied), changes, gpu)


def check_closed_form(config: PretrainedConfig, changes: dict[str, Any], gpu: str | None = None) -> None:
    """Every category of state."""
    setting, target = setting_of(**changes), CPU_TARGET if gpu is None else gpu_target(gpu)
    traced = predict(TracedModel(config, setting, target), ((shape(2, 32, 40),),)).by_phase["clip"].by_category
    lines = state_lines(model_shapes(config), setting, cuda=target.foreach)
    closed = {**state_bytes(lines, granularity_bytes=target.granularity_bytes)}
    counted = {category: traced[category] for category in STATES if category in traced}
    if reason_apart(setting.train) is None:  # Gradients of adapters that compute together are parts of one block.
        blocks = sum(len(line.tensor_bytes) for line in lines if line.category == GRADIENTS)
        spared = closed.pop(GRADIENTS) - counted.pop(GRADIENTS)
        assert 0 <= spared < blocks * target.granularity_bytes
    assert closed == counted


TWO_TYPES: list[tuple[str, dict[str, Any]]] = [
    ("ernie4_5_moe", {}),
    ("ernie4_5_moe", {"router": "trained"}),
    ("ernie4_5_moe", {"router": "trained", "master_weights": True}),
    ("ernie4_5_moe", {"router": "trained", "optimizer": "adamw_8bit"}),
    ("ernie4_5_moe", {"router": "trained", "optimizer": "adafactor"}),
    ("flint", {}),
]


@pytest.mark.parametrize(("family", "changes"), [*TWO_TYPES[:2], *(slow(*case) for case in TWO_TYPES[2:])], ids=str)
def test_trained_weights_of_two_types(family, changes):
    """Gradients and moments of routers and sinks that a family keeps in fp32, counted in bf16."""
    check_closed_form(tiny_config(family), {"method": "full", "precision": "bf16", **changes})


def test_adapters_of_named_layers():
    """Targets that end alike taken for each other, or the head adapted."""
    setting = setting_of(method="lora", lora_targets=("q_proj", "down_proj"))
    closed = state_bytes(state_lines(model_shapes(uneven()), setting, cuda=False), granularity_bytes=1)
    assert closed["adapters"] == 4 * 3 * setting.train.lora.rank * ((264 + 264) + (264 + 520))


def test_every_tensor_of_llama_3_1_8b_is_in_the_closed_form():
    """Formulas that are right for small models only: every tensor of the 8B, without memory."""
    setting = setting_of(method="qlora", precision="bf16", lora_rank=16)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = fake_model(LLAMA_3_1_8B, setting.train, CPU)
    lines = state_lines(model_shapes(LLAMA_3_1_8B), setting, cuda=False)
    closed = state_bytes(lines, granularity_bytes=1)
    trained = sum(_bytes(p) for p in model.parameters() if p.requires_grad)
    frozen = sum(_bytes(t) for t in [*model.parameters(), *model.buffers()] if not t.requires_grad)
    assert closed["weights"] == frozen
    assert closed["quantisation_state"] == sum(_bytes(t) for t in quantisation_tensors(model))
    assert closed["adapters"] == closed["gradients"] == trained == 4 * 41_943_040
    gib = {(line.category, line.what): round(line.total_bytes(1) / GIB, 3) for line in lines}
    assert gib["weights", "NF4, half a byte a value"] == 3.25
    assert gib["weights", "bf16, 2 bytes a value"] == 1.958
    assert gib["quantisation_state", "scales, a byte per 64 values"] == 0.102


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def test_llama_8b_with_fp32_master_weights_takes_16_bytes_a_parameter():
    """Rajbhandari et al. 2020, arXiv 1910.02054: bf16 weights and gradients, fp32 master weights and two moments."""
    shapes = model_shapes(LLAMA_3_1_8B)
    assert shapes.values == 8_030_261_248
    setting = setting_of(method="full", precision="bf16", master_weights=True)
    sizes = state_bytes(state_lines(shapes, setting, cuda=True), granularity_bytes=1)
    assert {category: round(size / shapes.values, 3) for category, size in sizes.items()} == {
        "weights": 2,
        "gradients": 2,
        "optimizer": 12,
    }
    assert sum(sizes.values()) > 80 * GIB


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit", "adafactor"])
def test_the_closed_form_of_host_memory_is_what_the_optimizer_allocates(optimizer, small_llama):
    """Host memory underestimated: copies, moments, room for a gradient, and the staging buffer."""
    setting = setting_of(method="full", precision="bf16", master_weights=True, optimizer=optimizer, offload="optimizer")
    model = load_model(small_llama, setting.train, CPU)
    lines = host_lines(model_shapes(read_config(small_llama)), setting)
    counted = host_bytes(build_optimizer(model, setting.train), setting)
    assert sum(line.total_bytes(1) for line in lines) == counted


@pytest.fixture(scope="module")
def pair() -> Iterator[Group]:
    """Two processes."""
    with group_of(2) as group:
        yield group


ON_HOST: dict[str, dict[str, Any]] = {
    "zero1": {"mode": "zero1"},
    "zero2": {"mode": "zero2"},
    "zero3": {"mode": "zero3"},
    "ddp": {"mode": "ddp"},
    "tensor": {"mode": "none", "tensor": 2},
    "pipeline": {"stage_layers": (1, 2)},
}


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(("method", "tied"), [("full", True), ("full", False), ("lora", True)])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
@pytest.mark.parametrize("division", ON_HOST)
def test_the_fullest_process_needs_the_predicted_memory_of_its_host(
    tmp_path, pair: Group, division, method, optimizer, tied
):
    """Equal parts of tensors that are not divided equally: owners, uneven rows, 8 bits for large tensors alone."""
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 250, "vocab_size": 131, "num_hidden_layers": 3}
    directory = save_small_llama(tmp_path, num_key_value_heads=4, **sizes, tie_word_embeddings=tied)
    given = {"method": method, "optimizer": optimizer, "offload": "optimizer", **ON_HOST[division]}
    made = pipeline_setting(**given) if "stage_layers" in given else shared_setting(gpus=2, steps="one turn", **given)
    counted = pair.ask(do_host_bytes, directory, made)
    assert host_state_bytes(read_config(directory), made) == counted
