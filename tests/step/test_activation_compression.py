"""Saved activations in 8 bits: their rounding error, and what stays exact."""

from contextlib import contextmanager

import pytest
import torch

from lean_finetune.model.precision import autocast
from lean_finetune.step.loss import summed_loss
from lean_finetune.step.offload import activation_offload
from lean_finetune.step.offload.activation_offload import BLOCK, ActivationOffload, compress, decompress
from lean_finetune.step.step_loss import TokenLoss
from tests.kit.loaded import load_model
from tests.small_model import CPU, spec_of
from tests.step.common import assert_equal, run, split

LARGEST_ERROR = {"int8": 0.5 / 127, "fp8": 16 / 448}
"""Of a value, as a share of the largest of its block: half the step between the two largest codes."""


@pytest.mark.parametrize("bits", LARGEST_ERROR)
def test_values_are_rounded_to_their_blocks_codes(monkeypatch, bits):
    """A scale of another block, a chunk or a last short block that is left out, or a division by zero."""
    monkeypatch.setattr(activation_offload, "CHUNK", 2 * BLOCK)
    for count in (1, BLOCK, 5 * BLOCK + 7):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            values = (torch.randn(count) * torch.arange(1, count + 1)).to(dtype)
            values[: count // 3] = 0
            codes, scales = compress(values, bits)
            assert codes.itemsize == 1 and codes.shape == values.shape and scales.numel() == -(-count // BLOCK)
            back = decompress(codes, scales, dtype)
            assert back.dtype == dtype and not back[: count // 3].any()
            for part, found in zip(values.float().split(BLOCK), back.float().split(BLOCK), strict=True):
                bound = LARGEST_ERROR[bits] + torch.finfo(dtype).eps
                assert (part - found).abs().max() <= 1.01 * bound * part.abs().max()


@pytest.mark.parametrize("bits", LARGEST_ERROR)
def test_what_is_not_finite_stays_so(bits):
    """A divergence that the check of the gradient norm does not see."""
    for value in (float("inf"), float("nan")):
        values = torch.ones(3 * BLOCK)
        values[5] = value
        back = decompress(*compress(values, bits), torch.float32)
        assert not back[5].isfinite() and torch.equal(back[BLOCK:], values[BLOCK:])


@contextmanager
def recorded(monkeypatch):
    """The tensors that are compressed in the block, in order."""
    seen: list[torch.Tensor] = []
    with monkeypatch.context() as patch:

        def record(values: torch.Tensor, bits: str) -> tuple[torch.Tensor, torch.Tensor]:
            seen.append(values.clone())
            return compress(values, bits)

        patch.setattr(activation_offload, "compress", record)
        yield seen


@pytest.mark.parametrize(("method", "precision"), [("lora", "bf16"), ("full", "fp32"), ("full", "fp16")])
def test_only_activations_are_compressed_and_each_once(small_llama, monkeypatch, method, precision):
    """Masks, positions, statistics of attention, weights or copies of them in 8 bits; a tensor compressed twice."""
    spec = spec_of(method=method, precision=precision, compress_activations="int8")
    model = load_model(small_llama, spec, CPU)
    with torch.no_grad():  # Norms of weight 1 return their input.
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.mul_(1.5)
    with recorded(monkeypatch) as seen, autocast(spec, "cpu"):
        summed_loss(model, split([8])[0], TokenLoss(None), ActivationOffload(None, "int8"))
    tokens = 8 * 27
    assert seen and all(values.numel() % tokens == 0 for values in seen)
    widths = {values.numel() // tokens for values in seen}
    # Hidden states, keys and values, the MLP's; of adapters, 4 values per token.
    assert widths <= {4, 32, 64, 128} and {64, 128} <= widths
    assert len({values.float().numpy().tobytes() for values in seen if values.dtype == torch.float32}) == len(
        [values for values in seen if values.dtype == torch.float32]
    )


def test_slices_of_one_tensor_are_compressed_once():
    """A gated product whose halves are stored twice: as much as without compression."""
    offload = ActivationOffload(None, "int8")
    both = torch.randn(40, 64, requires_grad=True) * 2
    with offload.saving(torch.nn.Linear(1, 1)):
        gate, up = both.chunk(2, dim=1)
        product = torch.nn.functional.silu(gate) * up
        assert sum(stored.handles[0].numel() for stored in offload._stored.values() if stored) <= 2 * both.numel()
    product.sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize("grad_ckpt", [False, True])
def test_the_first_loss_is_exact_and_a_second_run_gives_the_same_bits(small_llama, grad_ckpt):
    """Compression that changes the forward pass, or differs from run to run, so that no run can be resumed."""
    plain, _ = run(small_llama, split([8]), steps=2, grad_ckpt=grad_ckpt)
    runs = [
        run(small_llama, split([8]), steps=2, grad_ckpt=grad_ckpt, offload=ActivationOffload(None, "int8"))
        for _ in range(2)
    ]
    assert [results[0].loss.item() for results, _ in runs] == [plain[0].loss.item()] * 2
    assert runs[0][0][1].loss.item() != plain[1].loss.item()
    assert_equal(runs[0][1], runs[1][1], 0)
