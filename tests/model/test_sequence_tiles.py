"""MLPs and norms in tiles along the sequence: which modules, how many tokens, and what is refused.

Losses and memory: tests/train/test_switches.py and tests/memory/predict/test_measured.py.
"""

from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, OPTConfig, OPTForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from lean_finetune.core.errors import UserError
from lean_finetune.model.checkpointing import enable_tiles
from tests.memory.common import llama
from tests.small_model import spec_of


def test_mlps_and_norms_see_one_tile_at_a_time():
    """A module that still gets all tokens, or one that mixes tokens and gets a tile."""
    model = LlamaForCausalLM(llama(num_hidden_layers=1))
    widths: dict[str, set[int]] = {}

    def seen(name):
        return lambda module, args: widths.setdefault(name, set()).add(args[0].shape[1])

    layer = model.model.layers[0]
    layer.mlp.gate_proj.register_forward_pre_hook(seen("mlp"))
    layer.self_attn.q_proj.register_forward_pre_hook(seen("attention"))
    before = model(torch.arange(22).view(2, 11)).logits
    widths.clear()
    enable_tiles(model, spec_of(sequence_tiles=3))
    after = model(torch.arange(22).view(2, 11)).logits
    assert widths == {"mlp": {4, 3}, "attention": {11}}
    torch.testing.assert_close(before, after, rtol=0, atol=1e-6)


TINY: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
MIXTURE = Qwen3MoeConfig(**TINY, num_key_value_heads=2, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8)

OPT = OPTConfig(**TINY, ffn_dim=8, word_embed_proj_dim=16)


@pytest.mark.parametrize(
    ("model", "changes", "line"),
    [
        (lambda: Qwen3MoeForCausalLM(MIXTURE), {}, "qwen3_moe is a mixture of experts"),
        (
            lambda: OPTForCausalLM(OPT),
            {},
            "no module .* layers of opt",
        ),
        (lambda: LlamaForCausalLM(llama()), {"method": "int8_lora"}, "train.method=int8_lora"),
        (lambda: LlamaForCausalLM(llama()), {"grad_ckpt": True, "grad_ckpt_policy": "selective"}, "selective"),
    ],
    ids=["mixture", "opt", "int8_lora", "selective"],
)
def test_what_tiles_cannot_help_is_refused_in_one_line(model, changes, line):
    """A switch without effect."""
    with pytest.raises(UserError, match=rf"^train\.sequence_tiles: .*{line}.*; got 2; leave it blank$"):
        enable_tiles(model(), spec_of(sequence_tiles=2, **changes))
