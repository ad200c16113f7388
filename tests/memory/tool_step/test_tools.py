"""What the keys of other tools' configurations mean for their training step."""

from typing import Any

import pytest
from transformers import LlamaConfig

from benchmarks.specs import train_of
from lean_finetune.config.field_types import Method
from lean_finetune.config.load import COMMON_PARAMS, load_params, with_flags
from lean_finetune.memory.advice.as_tool import AsTool, predict_as_tool
from lean_finetune.memory.advice.run import Run, full_rows_run
from lean_finetune.memory.devices import resolve_gpu
from lean_finetune.memory.tool_step.tools import SAVING_KEYS, STEPS, step_of

LLAMA = LlamaConfig(
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=32000,
    max_position_embeddings=4096,
)


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
        ("torchtune", "lora", {"compile": True}, {"fused_cross_entropy": True, "autocast": False}),
        ("LitGPT", "qlora", {"precision": "bf16-true"}, {"old_4bit": True, "decoder": "litgpt"}),
    ],
)
def test_keys_decide_the_step(tool: str, method: Method, keys: dict[str, Any], expected: dict[str, Any]):
    """The figure of another run than the user's."""
    step = step_of(tool, keys, train_of(method))
    assert step is not None and {name: getattr(step, name) for name in expected} == expected


def test_every_described_tool_has_changes_to_try():
    assert STEPS.keys() == SAVING_KEYS.keys()


def run_of(**sets: object) -> Run:
    flags = ["train.method=lora", "data.max_length=2048", "bucket.max_tokens=2048", "run.progress=false"]
    flags += [f"{name}={value}" for name, value in sets.items()]
    return full_rows_run(with_flags(load_params(COMMON_PARAMS), flags), LLAMA, resolve_gpu("RTX-4090")[0])


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


def test_what_is_not_described_is_said():
    """A figure of another tool's step under the name of the user's tool."""
    assert predict_as_tool(run_of(), "Unsloth", {}) == "the training step of Unsloth is not described here"
