"""train.attention: the choice and its reason, refusals in one line, and equal results of all kernels."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from lean_finetune.core.errors import UserError
from lean_finetune.memory.predict.peak import predict
from lean_finetune.memory.predict.traced_step import TracedModel
from lean_finetune.memory.trace.memory_trace import MemoryTrace
from lean_finetune.model.attention.kernels import ATTENTION, EAGER_ATTENTION, FLASH_ATTENTION, attention_kernel
from lean_finetune.model.attention_choice import choose_attention, materializes_scores, training_attention
from lean_finetune.step.loss import causal_lm, decoder_hidden
from tests.kit.estimate_cpu import FAMILIES, SMALL
from tests.kit.loaded import load_model
from tests.memory.common import gpu_target, setting_of, shape
from tests.small_model import CPU, VOCABULARY, spec_of

LLAMA = LlamaConfig(**SMALL)
GEMMA = FAMILIES["Gemma 2"]
H100: dict[str, Any] = {"kind": "cuda", "capability": (9, 0), "masked": False}
T4: dict[str, Any] = {"kind": "cuda", "capability": (7, 5), "masked": False}
RAM: dict[str, Any] = {"kind": "cpu", "capability": (0, 0), "masked": False}


FLASH = "FlashAttention-2, as PyTorch has it"
EFFICIENT = "PyTorch's memory-efficient kernel: flash needs compute capability 8.0 (Ampere) or later"


@pytest.mark.parametrize(
    ("config", "device", "changes", "found"),
    [
        (LLAMA, RAM, {}, ("sdpa", "PyTorch's flash kernel for CPUs")),
        (LLAMA, H100, {"precision": "bf16"}, ("sdpa", FLASH)),
        (LLAMA, H100, {"precision": "bf16", "attention": "flash_attention_2"}, ("flash_attention_2", FLASH)),
        (LLAMA, T4, {"precision": "fp16"}, ("sdpa", EFFICIENT)),
        (LLAMA, H100, {"attention": "eager"}, ("eager", "as set")),
        (GEMMA, H100, {"precision": "bf16"}, ("eager", "the model caps its scores, which no fused kernel does")),
    ],
)
def test_what_is_chosen_and_why(config, device, changes, found):
    assert choose_attention(config, spec_of(**changes), **device) == found


@pytest.mark.parametrize(
    ("config", "device", "changes", "message"),
    [
        (LLAMA, RAM, {"attention": "flex"}, "flex has no backward pass on a CPU"),
        (LLAMA, H100, {"attention": "flex"}, "flex makes its kernels at run time"),
        (LLAMA, RAM, {"attention": "flash_attention_2"}, "flash_attention_2 needs a GPU"),
        (LLAMA, T4, {"attention": "flash_attention_2"}, "needs compute capability 8.0"),
        (LLAMA, H100, {"attention": "flash_attention_2"}, "needs 16 bits, not train.precision=fp32"),
        (LLAMA, {**H100, "masked": True}, {"attention": "flash_attention_2", "precision": "bf16"}, "takes no mask"),
        (GEMMA, H100, {"attention": "sdpa"}, "gemma2 caps its scores"),
    ],
)
def test_what_cannot_run_is_one_line(config, device, changes, message):
    """Another kernel taken in silence, or an error from the middle of the first step."""
    with pytest.raises(UserError, match=rf"^train\.attention: .*{message}.*use auto$") as caught:
        choose_attention(config, spec_of(**changes), **device)
    assert "\n" not in str(caught.value)


def test_eager_is_what_transformers_computes(small_llama):
    """Another scale, or tokens that see later ones; the reference is the model's own code."""
    ids = torch.randint(VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(1))
    ours = load_model(small_llama, spec_of(method="full", attention="eager"), CPU)
    theirs = AutoModelForCausalLM.from_pretrained(small_llama, attn_implementation="eager", dtype=torch.float32)
    found, wanted = decoder_hidden(causal_lm(ours), ids), theirs.train().model(ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    for hidden in (found, wanted):
        hidden.square().mean().backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6)


def test_scores_are_the_square_of_the_length_and_flash_is_not(monkeypatch):
    """A kernel that is chosen and not traced."""
    ran: set[str] = set()
    dispatch = MemoryTrace.__torch_dispatch__

    def watched(self, func, types, args=(), kwargs=None):
        ran.add(func.overloadpacket.__name__)
        return dispatch(self, func, types, args, kwargs)

    monkeypatch.setattr(MemoryTrace, "__torch_dispatch__", watched)
    peaks, target = {}, gpu_target("H100")
    for name in ("auto", "flash_attention_2", "eager"):
        ran.clear()
        model = TracedModel(LLAMA, setting_of(precision="bf16", attention=name), target)
        steps = [((shape(1, length, length - 1),),) for length in (512, 1024)]
        peaks[name] = [predict(model, step).peak.bytes - target.constant_bytes for step in steps]
        assert ("_scaled_dot_product_flash_attention" in ran) is (name != "eager")
    assert peaks["auto"] == peaks["flash_attention_2"]
    assert peaks["auto"][1] < 2.1 * peaks["auto"][0] and peaks["eager"][1] > 3 * peaks["eager"][0]
    assert (
        materializes_scores(LLAMA, "eager")
        and not materializes_scores(LLAMA, "auto")
        and materializes_scores(GEMMA, "auto")
    )
    assert training_attention(LLAMA, "flash_attention_2") == FLASH_ATTENTION


def test_heads_are_repeated_once_for_the_kernel_that_cannot_group_them():
    """A sliding window on a T4: transformers repeated the key/value heads again, and no kernel takes so many."""
    module = nn.Module()
    module.num_key_value_groups = 2  # type: ignore[assignment]
    query, key, value = (torch.randn(1, heads, 12, 8) for heads in (4, 2, 2))
    mask = torch.ones(1, 1, 12, 12, dtype=torch.bool).tril().triu(-3)
    attention = AttentionInterface()[ATTENTION]
    expected, _ = attention(module, query, key, value, mask)
    with attention_kernel(sdpa_attention_forward, (7, 5)):
        found, _ = attention(module, query, key, value, mask)
    torch.testing.assert_close(found, expected)


def test_eager_scores_of_autocast_are_masked_in_their_own_type():
    """Full training in fp16: the queries are fp32, their products fp16, and fp32's least value is none of fp16's."""
    query, key, value = (torch.randn(2, 4, 8, 16, generator=torch.manual_seed(seed)) for seed in range(3))
    attention = AttentionInterface()[EAGER_ATTENTION]
    exact, _ = attention(nn.Identity(), query, key, value, None)
    with torch.autocast("cpu", torch.float16):
        half, _ = attention(nn.Identity(), query, key, value, None)
    torch.testing.assert_close(half.float(), exact, rtol=1e-2, atol=1e-2)
