"""Attention with sinks: fused kernels scaled by the sinks equal all scores with one more column."""

import copy
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GptOssConfig

from lean_finetune.model.attention import kernels as kernels_of
from lean_finetune.model.attention.kernels import CAPPED_ATTENTION, EAGER_ATTENTION, sink_attention
from tests.kit.estimate_cpu import SMALL

CONFIG = GptOssConfig(
    **SMALL,
    head_dim=16,
    num_local_experts=4,
    num_experts_per_tok=2,
    sliding_window=16,
    rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
)


def logits_and_gradients(attention: str, length: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(CONFIG, attn_implementation=attention)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, std=2.0)
    tokens = torch.arange(2 * length).view(2, length) % 200
    result = model(input_ids=tokens, labels=tokens, use_cache=False)
    result.loss.backward()
    return result.logits, {name: p.grad for name, p in model.named_parameters() if "self_attn" in name}


@pytest.mark.parametrize("length", [12, 40], ids=["in the window", "with a mask"])
@pytest.mark.parametrize("ours", [CAPPED_ATTENTION, EAGER_ATTENTION])
def test_sinks_equal_transformers_scores(ours, length):
    """Logits, and gradients of queries, keys, values and sinks; without sinks both would be wrong in silence."""
    expected, gradients = logits_and_gradients("eager", length)
    logits, found = logits_and_gradients(ours, length)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    assert any(name.endswith("sinks") for name in found)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, gradients[name], rtol=1e-3, atol=1e-6, msg=name)


def test_layers_share_the_bias_of_a_window():
    """A mask of length × length saved once for each layer with a window."""
    config = copy.deepcopy(CONFIG)
    config.num_hidden_layers, config.layer_types = 6, ["sliding_attention"] * 6
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation=CAPPED_ATTENTION)
    saved = set()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[-2:] == (40, 40):
            saved.add(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(input_ids=torch.arange(40)[None] % 200, use_cache=False)
    assert len(saved) == 1


@pytest.mark.parametrize(("length", "kernels"), [(12, {"flash"}), (40, {"flash", "efficient"})])
def test_a_gpu_runs_the_flash_kernel_where_no_mask_is_needed(length, kernels, monkeypatch: pytest.MonkeyPatch):
    """The efficient kernel for rows inside the window, or a refused call of flash attention with a mask."""
    used = set()

    def on_cpu(*args: Any, kernel: str) -> torch.Tensor:
        used.add(kernel)
        return sink_attention(*args, kernel="cpu")

    monkeypatch.setattr(kernels_of, "gpu_capability", lambda tensor: (9, 0))
    monkeypatch.setattr(kernels_of, "takes_flash", lambda query, capability: True)
    monkeypatch.setattr(kernels_of, "sink_attention", on_cpu)
    logits_and_gradients(CAPPED_ATTENTION, length)
    assert used == kernels
