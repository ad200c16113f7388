"""What the keys of other tools' configurations mean for their training step."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lean_finetune.config.field_types import Method
from lean_finetune.config.load import COMMON_PARAMS, load_params, with_flags
from lean_finetune.memory.advice.as_tool import AsTool, predict_as_tool
from lean_finetune.memory.advice.full_rows import full_rows_run
from lean_finetune.memory.advice.run import Run
from lean_finetune.memory.choice.tool_changes import CHANGES, ROW_KEYS
from lean_finetune.memory.devices import resolve_gpu
from lean_finetune.memory.tool_step.tools import STEPS, step_of
from tests.kit.specs import train_of


def llama(layers: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=32000,
        max_position_embeddings=4096,
    )


LLAMA = llama(2)


LINEAR_LOSS = {"loss._component_": "torchtune.modules.loss.LinearCrossEntropyLoss"}


@pytest.mark.parametrize(
    ("tool", "method", "keys", "expected"),
    [
        ("TRL", "lora", {"bf16": True}, {"weights": "fp32", "loss": "chunked_nll", "adapters": "fp32"}),
        ("TRL", "lora", {"bf16": True, "dtype": "bfloat16"}, {"weights": "16 bits"}),
        ("TRL", "qlora", {"bf16": True, "dtype": "bfloat16"}, {"adapters": "16 bits"}),
        ("TRL", "lora", {"loss_type": "nll"}, {"loss": "logits", "logits_measured": True, "autocast": False}),
        ("TRL", "full", {"use_liger_kernel": True}, {"loss": "liger", "fused_layers": "norms and MLPs"}),
        ("LLaMA-Factory", "full", {"bf16": True}, {"weights": "fp32", "outputs_in_fp32": True, "reentrant": True}),
        ("LLaMA-Factory", "full", {"bf16": True, "pure_bf16": True}, {"weights": "16 bits", "autocast": False}),
        ("LLaMA-Factory", "qlora", {"bf16": True, "upcast_layernorm": True}, {"fp32_parts": "norms"}),
        ("LLaMA-Factory", "lora", {"optim": "adamw_torch"}, {"foreach_update": True}),
        ("Axolotl", "qlora", {"bf16": True, "cut_cross_entropy": True}, {"loss": "cut_cross_entropy"}),
        ("torchtune", "lora", {"compile": True}, {"cross_entropy": "compiled", "autocast": False}),
        ("torchtune", "full", {"compile": True, **LINEAR_LOSS}, {"cross_entropy": "in place", "compiled_head": True}),
        (
            "torchtune",
            "full",
            LINEAR_LOSS,
            {"loss": "chunked_head", "cross_entropy": "PyTorch", "compiled_head": False},
        ),
        ("torchtune", "full", {"loss._component_": "torch.nn.CrossEntropyLoss"}, {"loss": "fp32_logits_alone"}),
        ("torchtune", "full", {"enable_activation_offloading": True}, {"offloaded": "decoder"}),
        ("TRL", "full", {"activation_offloading": True}, {"offloaded": "all"}),
        ("Axolotl", "full", {"activation_offloading": "legacy"}, {"offloaded": "none"}),
        (
            "ms-swift",
            "lora",
            {"torch_dtype": "bfloat16"},
            {"weights": "16 bits", "adapters": "fp32", "reentrant": True},
        ),
        (
            "ms-swift",
            "full",
            {"use_liger_kernel": True, "optim": "adamw_torch"},
            {"loss": "liger", "foreach_update": True},
        ),
        ("LitGPT", "qlora", {"precision": "bf16-true"}, {"old_4bit": True, "decoder": "litgpt"}),
    ],
)
def test_keys_decide_the_step(tool: str, method: Method, keys: dict[str, Any], expected: dict[str, Any]):
    """The figure of another run than the user's."""
    step = step_of(tool, keys, train_of(method))
    assert step is not None and {name: getattr(step, name) for name in expected} == expected


def test_every_described_tool_has_changes_to_try():
    assert STEPS.keys() == CHANGES.keys() == ROW_KEYS.keys()


def run_of(**sets: object) -> Run:
    return run_of_model(LLAMA, sets)


def run_of_model(config: LlamaConfig, sets: Mapping[str, object]) -> Run:
    flags = ["train.method=lora", "data.max_length=2048", "bucket.max_tokens=2048", "run.progress=false"]
    flags += [f"{name}={value}" for name, value in sets.items()]
    return full_rows_run(with_flags(load_params(COMMON_PARAMS), flags), config, resolve_gpu("RTX-4090")[0])


def test_the_causes_of_a_larger_peak_are_named_with_their_bytes():
    """A user who learns that a tool needs more, and not why."""
    found = predict_as_tool(run_of(), "LLaMA-Factory", {"bf16": True, "optim": "adamw_torch"})
    assert isinstance(found, AsTool)
    lean = predict_as_tool(run_of(), "LLaMA-Factory", {"bf16": True, "enable_liger_kernel": True})
    assert isinstance(lean, AsTool)
    causes = {cause.what: cause.bytes for cause in found.causes()}
    logits_bytes = 2048 * LLAMA.vocab_size * 2
    assert causes["logits of all positions, and their fp32 copy"] > 3 * logits_bytes
    assert lean.peak.bytes < found.peak.bytes - 3 * logits_bytes


def test_saved_tensors_that_move_to_the_host_are_on_the_gpu_one_layer_at_a_time():
    """The key `enable_activation_offloading` was dropped without a word."""
    keys = {
        "loss._component_": "torchtune.modules.loss.CEWithChunkedOutputLoss",
        "enable_activation_checkpointing": True,
    }
    sets = {"train.grad_ckpt": True}
    deep = llama(8)
    there, away = (
        predict_as_tool(run_of_model(deep, sets), "torchtune", {**keys, "enable_activation_offloading": offloaded})
        for offloaded in (False, True)
    )
    assert isinstance(there, AsTool) and isinstance(away, AsTool)
    layer_input_bytes = 2048 * deep.hidden_size * 2
    saved_bytes = there.by_phase["forward"].bytes - away.by_phase["forward"].bytes
    assert (deep.num_hidden_layers - 4) * layer_input_bytes < saved_bytes  # Some are in flight.
    assert saved_bytes < (deep.num_hidden_layers + 2) * layer_input_bytes


def test_what_is_not_described_is_said():
    """A figure of another tool's step under the name of the user's tool."""
    assert predict_as_tool(run_of(), "Unsloth", {}) == "the training step of Unsloth is not described here"


def pair_run(tool: str, **sets: object) -> AsTool:
    """A pair of 2 x 2,048 tokens under DPO in a tool."""
    flags = {"train.objective": "dpo", "bucket.max_tokens": 4096, **sets}
    found = predict_as_tool(run_of(**flags), tool, {"bf16": True, "dtype": "bfloat16"})
    assert isinstance(found, AsTool)
    return found


def test_losses_of_pairs_hold_as_many_logits_as_the_tools_do():
    """A peak of half the size: both answers' logits exist in the model and in the reference, in fp32."""
    logits = 2 * 2048 * LLAMA.vocab_size * 4
    tiles, by_rows, log_softmax = (pair_run(tool).by_phase for tool in ("TRL", "Axolotl", "LLaMA-Factory"))
    assert tiles["reference"].bytes < by_rows["forward"].bytes  # One tile, where the others have logits.
    # The model's logits, the reference's, and the copy whose entropy is measured; LLaMA-Factory has two log-softmaxes.
    for phases, copies in ((by_rows, 3), (log_softmax, 4)):
        assert phases["reference"].bytes - phases["loading"].bytes == pytest.approx(copies * logits, rel=0.1)


def test_the_reference_of_a_full_fine_tuning_is_a_second_model():
    """A run that ends out of memory while it loads."""
    full = {"train.method": "full", "train.precision": "bf16"}
    pairs = pair_run("TRL", **full)
    rows = predict_as_tool(run_of(**full), "TRL", {"bf16": True, "dtype": "bfloat16"})
    assert isinstance(rows, AsTool)
    with torch.device("meta"):
        weights = 2 * sum(parameter.numel() for parameter in LlamaForCausalLM(LLAMA).parameters())
    assert pairs.by_phase["loading"].bytes - rows.by_phase["loading"].bytes == pytest.approx(weights, rel=0.01)
    assert any(cause.what == "the reference, a second model" for cause in pairs.causes())


@pytest.mark.parametrize(("tool", "objective"), [("TRL", "orpo"), ("Axolotl", "simpo"), ("torchtune", "dpo")])
def test_objectives_whose_step_is_not_described_have_no_figure(tool: str, objective: str):
    """The figure of supervised fine-tuning for another loss."""
    found = predict_as_tool(run_of(**{"train.objective": objective}), tool, {"bf16": True})
    assert found == f"the training step of {tool} for objective {objective} is not described here"
