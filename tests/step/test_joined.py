"""Joined (packed) rows learn what padded rows learn: no row sees another, positions restart, padding trains nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    MistralConfig,
    OPTConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from lean_finetune.core.errors import UserError
from lean_finetune.model.attention.kernels import ATTENTION
from lean_finetune.model.model_config import read_config, refuse_packed_rows
from lean_finetune.step.batches import collate
from lean_finetune.step.loss import check_packed_rows, summed_loss, token_losses
from lean_finetune.step.step_loss import TokenLoss
from tests.kit.loaded import load_model
from tests.small_model import CPU, VOCABULARY, spec_of
from tests.step.common import assert_equal, joined, rows, run, slow, split

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GROUPED: dict[str, Any] = {**SIZES, "num_key_value_heads": 2}
CONFIGS = [
    Qwen2Config(**GROUPED),
    Qwen3Config(**GROUPED, head_dim=8),
    MistralConfig(**GROUPED, sliding_window=48),
    Gemma3TextConfig(**GROUPED, head_dim=8, sliding_window=48),
    Phi3Config(**GROUPED, pad_token_id=0),
    GPTNeoXConfig(**SIZES),
    OPTConfig(vocab_size=VOCABULARY, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4,
              max_position_embeddings=64, word_embed_proj_dim=32),
    GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64),
]  # fmt: skip


def small(config: PretrainedConfig) -> torch.nn.Module:
    """A random model of this config with our attention."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).eval()


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_every_token_of_a_joined_row_has_the_loss_it_has_alone(config):
    """A row that sees the one before it, or whose positions run on, has another loss."""
    model = small(config)
    alone = torch.cat([token_losses(model, batch, 1000) for batch in split([1] * 8)])
    assert alone.min() > 1
    for padding in (0, 50):
        together = token_losses(model, joined([8], padding)[0], 1000)
        torch.testing.assert_close(together, alone, rtol=2e-5, atol=2e-5)
    check_packed_rows(model, CPU)


@pytest.mark.parametrize("method", ["full", slow("qlora")])
def test_checkpointing_changes_no_bit_of_joined_rows(small_llama: Path, method: str):
    """Recomputation runs in backward, where no context of forward is left: row bounds must travel with it."""
    plain, weights = run(small_llama, joined([3, 5], padding=9), method=method)
    recomputed, other = run(small_llama, joined([3, 5], padding=9), method=method, grad_ckpt=True)
    assert [r.loss.item() for r in plain] == [r.loss.item() for r in recomputed]
    assert_equal(weights, other, 0)


def test_the_row_before_changes_no_bit_of_a_row(small_llama: Path):
    """A leak smaller than any tolerance."""
    model = load_model(small_llama, spec_of(method="full"), CPU).eval()
    one, other, last = rows(3)
    flipped = (VOCABULARY - 1 - one[0], one[1])
    found = [
        token_losses(model, collate([first, other, last], 60, 0, flat=True), 1000)[-len(last[0]) // 2 :]
        for first in (one, flipped)
    ]
    assert torch.equal(*found)


def test_no_tensor_grows_with_the_square_of_a_joined_sequence(tmp_path: Path):
    """The model library would build a mask of all tokens by all tokens, 256 MiB a batch at 16k."""
    model = small(MistralConfig(**{**GROUPED, "sliding_window": 64}))
    batch = collate([rows()[0]] * 300, 2048, 0, flat=True)
    largest = 0

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in torch.utils._pytree.tree_leaves(out):
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.untyped_storage().nbytes() // tensor.element_size())
            return out

    with Largest():
        summed_loss(model, batch, TokenLoss(64)).backward()
    assert largest < 2048 * 2048 / 8


def test_a_model_whose_layers_ignore_row_bounds_is_refused(small_llama: Path):
    """It would train rows that see each other, without an error."""
    model: Any = load_model(small_llama, spec_of(method="full"), CPU)
    check_packed_rows(model, CPU)
    for layer in model.model.layers:
        attention = layer.self_attn.forward
        layer.self_attn.forward = lambda _inner=attention, packed_rows=None, **kwargs: _inner(**kwargs)
    with pytest.raises(
        UserError, match=r"bucket\.mode: packed needs rows that do not see each other; in llama they do"
    ):
        check_packed_rows(model, CPU)


def test_a_model_that_counts_positions_itself_is_refused(small_llama: Path):
    model: Any = load_model(small_llama, spec_of(method="full"), CPU)
    rotary = model.model.rotary_emb
    forward = rotary.forward
    rotary.forward = lambda x, position_ids: forward(x, torch.arange(x.shape[1])[None] ** 2)
    with pytest.raises(UserError, match=r"bucket\.mode: packed needs rows that do not see each other"):
        check_packed_rows(model, CPU)


@pytest.mark.parametrize(
    ("changes", "longest", "message"),
    [
        ({"sliding_window": 48}, 48, None),
        ({"sliding_window": 48}, 49, r"window of 48 tokens.*longest has 49; lower data\.max_length to 48"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, 8, "layers of type chunked_attention"),
    ],
)
def test_rows_beyond_a_window_and_unknown_layers_are_refused(small_llama: Path, changes, longest, message):
    """Plain causal attention of such a row would differ from the model's."""
    refuse_packed_rows(read_config(small_llama), 10**6)
    config = MistralConfig(**GROUPED)
    for key, value in changes.items():
        setattr(config, key, value)
    if message is None:
        return refuse_packed_rows(config, longest)
    with pytest.raises(UserError, match=message):
        refuse_packed_rows(config, longest)
