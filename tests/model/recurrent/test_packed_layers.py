"""Packed rows of hybrids: no state and no tap of a convolution passes from one row to the next."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lean_finetune.config.model_families import families_that
from lean_finetune.core.errors import UserError
from lean_finetune.model.empty_model import causal_class
from lean_finetune.model.model_config import read_config, refuse_packed_rows
from lean_finetune.model.recurrent.packed_layers import Bands
from lean_finetune.step.batches import Batch, collate
from lean_finetune.step.loss import check_packed_rows, summed_loss
from lean_finetune.step.step_loss import TokenLoss
from tests.kit.loaded import load_model
from tests.kit.tiny_config import tiny_config
from tests.small_model import CPU, spec_of
from tests.step.common import assert_equal, run

LENGTHS = (150, 7, 64, 2, 70, 129, 3)
"""Up to three chunks of the delta rule and ten of Mamba 2, full and not; rows shorter than a convolution's window."""
CHUNKS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid"), {"mamba_chunk_size": 16}),
    **dict.fromkeys(("mamba2", "nemotron_h", "zamba2"), {"chunk_size": 16}),
}
FAST = ("lfm2", "granitemoehybrid", "qwen3_5_text")
"""A convolution alone, Mamba 2, and the gated delta rule."""
ROWS = [
    (np.random.default_rng(n).integers(3, 250, n).astype(np.uint16), np.array([[1, n]], dtype=np.int32))
    for n in LENGTHS
]


def packed() -> Batch:
    """All rows in one sequence, and padding."""
    return collate(ROWS, sum(LENGTHS) + 9, 0, flat=True)


def saved(family: str, directory: Path) -> Path:
    """A small model of a family with random weights, in fp32."""
    torch.manual_seed(0)
    config = tiny_config(family, **CHUNKS.get(family, {}))
    causal_class(config)._from_config(config).save_pretrained(directory)
    return directory


@pytest.mark.parametrize(
    "family",
    [one if one in FAST else pytest.param(one, marks=pytest.mark.slow) for one in families_that("packs_other_layers")],
)
def test_packed_rows_have_the_loss_and_the_gradients_of_separate_ones(family, tmp_path):
    """A state, or the last tokens of a row, that the next row sees; a gradient that passes back the same way."""
    model: Any = load_model(saved(family, tmp_path), spec_of(method="full"), CPU).eval()
    refuse_packed_rows(read_config(tmp_path), max(LENGTHS))
    check_packed_rows(model, CPU)
    losses, grads = [], []
    for batches in ([packed()], [collate([row], len(row[0]), 0) for row in ROWS]):
        model.zero_grad()
        total = 0.0
        for batch in batches:
            loss = summed_loss(model, batch, TokenLoss(64))
            loss.backward()
            total += loss.item()
        losses.append(total)
        grads.append({name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None})
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    together, alone = grads
    assert together.keys() == alone.keys()
    error, size = (
        sum(float(tensor.square().sum()) for tensor in tensors) ** 0.5
        for tensors in ([together[name] - alone[name] for name in alone], alone.values())
    )
    assert error < 1e-6 * size


@pytest.mark.parametrize("family", ["granitemoehybrid", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_recomputed_layers_see_the_same_bounds(family, tmp_path):
    """Recomputation runs in backward, where no context of forward is left."""
    plain, weights = run(saved(family, tmp_path), [packed()], steps=2)
    recomputed, other = run(tmp_path, [packed()], steps=2, grad_ckpt=True)
    assert [r.loss.item() for r in plain] == [r.loss.item() for r in recomputed]
    assert_equal(weights, other, 0)


def test_a_layer_that_does_not_pass_the_bounds_on_is_found(tmp_path):
    """It would train rows that see each other, without an error."""
    model: Any = load_model(saved("lfm2", tmp_path), spec_of(method="full"), CPU)
    layer = next(layer.conv for layer in model.model.layers if hasattr(layer, "conv"))
    forward = layer.forward
    layer.forward = lambda packed_rows=None, **options: forward(**options)
    with pytest.raises(UserError, match=r"bucket\.mode: packed needs rows that do not see each other; in lfm2 they do"):
        summed_loss(model, packed(), TokenLoss(64))


@pytest.mark.parametrize("family", ["jamba", "minimax", "recurrent_gemma", "zamba"])
def test_other_families_with_a_state_are_refused(family):
    """Mamba 1, lightning attention and gated recurrences, whose code does not see the bounds of rows."""
    with pytest.raises(UserError, match=rf"^bucket\.mode: packed needs .*; {family} has layers of type .*bucketed$"):
        refuse_packed_rows(tiny_config(family), 8)


@pytest.mark.parametrize("lengths", [(5,), (4, 4), (9, 1, 4, 12, 4), (1, 1, 1), (8, 3)])
def test_bands_have_every_token_once_and_no_padding_but_to_full_chunks(lengths):
    """Tokens in the wrong row or order; memory for rows that have ended."""
    tokens = torch.arange(1, sum(lengths) + 1)[None, :, None].expand(1, -1, 3)
    bands = Bands(lengths, 4)
    split = bands.split(tokens)
    assert torch.equal(bands.join(split), tokens)
    assert sum(band.shape[0] * band.shape[1] for band in split) == sum(-(-length // 4) * 4 for length in lengths)
    first = [sum(lengths[:row]) + 1 for row in range(len(lengths))]
    assert sorted(split[0][:, 0, 0].tolist()) == first
    assert sum(int((band != 0).sum()) for band in split) == tokens.numel()
