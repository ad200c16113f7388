"""Optimizers: state made before the first step, parameter groups, determinism, bytes of state."""

import warnings
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch

from lean_finetune.config.field_types import OptimizerName
from lean_finetune.config.optimizers import OPTIMIZERS
from lean_finetune.config.schema import Train
from lean_finetune.step.loss import summed_loss
from lean_finetune.step.run_optimizer import build_optimizer, device_state, paging_note, peak_lr
from lean_finetune.step.step_loss import TokenLoss
from tests.kit.loaded import load_model
from tests.kit.specs import changed
from tests.small_model import CPU, spec_of
from tests.step.common import OPTIM, assert_equal, run, slow, split

NAMES = list(OPTIMIZERS)
FAST = ("adamw", "adamw_8bit", "adafactor")
SOME = [name if name in FAST else slow(name) for name in NAMES]
LR = {"lion": 1e-3, "lion_8bit": 1e-3, "sgd": 0.5}
"""Rates that learn; the others take LEARNS."""
LEARNS = 1e-2


def optim_of(name: OptimizerName) -> Train:
    """No schedule, so that two steps of the same rows are two of the same kind."""
    rate = LR.get(name, LEARNS)
    return spec_of(optimizer=name, lr=rate, weight_decay=0.1, schedule="constant", warmup_fraction=0.0)


def weights_after(directory: Path, name: OptimizerName, *, forget: bool, steps: int = 3) -> dict[str, torch.Tensor]:
    """All weights after a few plain steps; with `forget` the optimizer makes its state in its first step."""
    model = load_model(directory, spec_of(method="full"), CPU)
    optimizer = build_optimizer(model, optim_of(name))
    if forget:
        optimizer.state.clear()
    for _ in range(steps):
        (batch,) = split([8])
        (summed_loss(model, batch, TokenLoss(None)) / len(batch.supervised_index_N)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Paged optimizers are not supported on CPU", UserWarning)
            optimizer.step()
        optimizer.zero_grad()
    return {n: p.detach() for n, p in model.named_parameters()}


@pytest.mark.parametrize("name", SOME)
def test_state_made_early_is_the_state_made_late(small_llama: Path, name: OptimizerName):
    """State is made before step 1 so that memory is flat; it must not change what is learnt."""
    early = weights_after(small_llama, name, forget=False)
    assert_equal(early, weights_after(small_llama, name, forget=True), 0)


@pytest.mark.parametrize("name", SOME)
def test_every_optimizer_learns_and_learns_the_same_again(small_llama: Path, name: OptimizerName):
    """A wrongly built optimizer runs without an error; one that is not deterministic cannot be compared."""
    results, weights = run(small_llama, split([8]), method="full", steps=6, optim=optim_of(name))
    assert results[-1].loss.item() < results[0].loss.item() - 0.05
    again, other = run(small_llama, split([8]), method="full", steps=6, optim=optim_of(name))
    assert [r.loss.item() for r in results] == [r.loss.item() for r in again]
    assert_equal(weights, other, 0)


def test_adamw_8bit_goes_on_from_the_state_of_bitsandbytes_without_its_waits(monkeypatch: pytest.MonkeyPatch):
    """A checkpoint that only one of them reads; a GPU that is idle after each tensor. On a CPU both learn the same."""
    monkeypatch.setattr(bnb.optim.optimizer, "sync_gpu", lambda tensor: pytest.fail("waits for the GPU"))
    layers = [torch.nn.Linear(128, 64, bias=False) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    ours = build_optimizer(layers[0], changed(optim_of("adamw_8bit"), fused_kernels="auto"))
    assert type(build_optimizer(layers[0], optim_of("adamw_8bit"))) is bnb.optim.AdamW8bit, "the default"
    theirs = bnb.optim.AdamW8bit(layers[1].parameters(), lr=LEARNS, weight_decay=0.1)
    for step in range(4):
        for layer in layers:
            layer.weight.grad = torch.sin(torch.arange(128 * 64.0) * (step + 1)).view(64, 128)
        ours.step()
        with monkeypatch.context() as patched:
            patched.setattr(bnb.optim.optimizer, "sync_gpu", lambda tensor: None)
            theirs.step()
        assert torch.equal(layers[0].weight, layers[1].weight)
        saved = ours.state_dict(), theirs.state_dict()
        ours.load_state_dict(saved[1])
        theirs.load_state_dict(saved[0])


def test_paging_changes_no_bit(small_llama: Path):
    """tests/train/test_switches.py compares other forms of AdamW with it."""
    plain, paged = (weights_after(small_llama, name, forget=False) for name in ("adamw_8bit", "paged_adamw_8bit"))
    assert_equal(plain, paged, 0)


@pytest.mark.parametrize(
    ("name", "bytes_per_value"),
    [
        ("adamw", 8),
        ("adamw_8bit", 2.03),
        ("paged_adamw_8bit", 2.03),
        ("paged_adamw_32bit", 8),
        ("lion", 4),
        ("lion_8bit", 1.02),
        ("adafactor", 0.02),
        ("ademamix_8bit", 3.05),
        ("sgd", 0),
    ],
)
def test_bytes_of_state_for_each_value(name: OptimizerName, bytes_per_value: float):
    """The figures of docs/memory-switches.md, on one fp32 matrix that is large enough for its edges not to count."""
    layer = torch.nn.Linear(1024, 512, bias=False)
    optimizer = build_optimizer(layer, optim_of(name))
    state = sum(tensor.nbytes for tensor in device_state(optimizer, name, cuda=False))
    assert state / layer.weight.numel() == pytest.approx(bytes_per_value, abs=0.01)


def test_managed_memory_is_not_counted_as_device_memory():
    """On CUDA a paged state may lie on the host: adding it to the peak would refuse runs that fit."""
    layer = torch.nn.Linear(1024, 512, bias=False)
    optimizer = build_optimizer(layer, optim_of("paged_adamw_32bit"))
    assert list(device_state(optimizer, "paged_adamw_32bit", cuda=True)) == []
    assert len(list(device_state(optimizer, "paged_adamw_32bit", cuda=False))) == 2


def test_paging_without_cuda_is_noted():
    """A setting without an effect must not look like one that has it."""
    note = paging_note("paged_adamw_8bit", CPU)
    assert note is not None and "CUDA only" in note
    assert paging_note("adamw_8bit", CPU) is None and paging_note("paged_adamw_8bit", torch.device("cuda")) is None


def test_vectors_are_not_decayed(small_llama: Path):
    """Decayed norms drift; Hugging Face's Trainer excludes them too."""
    model = load_model(small_llama, spec_of(method="full"), CPU)
    groups: list[dict[str, Any]] = build_optimizer(model, optim_of("adamw")).param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert all(p.ndim >= 2 for p in groups[0]["params"]) and all(p.ndim == 1 for p in groups[1]["params"])


@pytest.mark.parametrize("name", NAMES)
def test_decay_is_apart_from_the_gradient(name: OptimizerName):
    """Decay inside an adaptive gradient shrinks large weights less: with none, weights shrink by lr × decay."""
    layer = torch.nn.Linear(128, 64, bias=False)
    before = layer.weight.detach().clone()
    optimizer = build_optimizer(layer, optim_of(name))
    layer.weight.grad = torch.zeros_like(before)
    optimizer.step()
    shrunk = 1 - peak_lr(optim_of(name)) * OPTIM.weight_decay
    torch.testing.assert_close(layer.weight.detach(), before * shrunk, rtol=1e-5, atol=1e-7)
