"""Types of weights and of arithmetic: what they bring, what they may cost, and which a device can."""

from pathlib import Path

import pytest
import torch

from lean_finetune.core.errors import UserError
from lean_finetune.model.precision import choose_precision
from lean_finetune.step.run_optimizer import OptimSpec, build_optimizer
from tests.small_model import spec_of
from tests.step.common import run, slow, split

STILL = OptimSpec(name="adamw", lr=1e-5, weight_decay=0.0, schedule="constant", warmup_fraction=0.0)
"""A rate whose updates are below 1/256 of most weights."""
MASTERS = OptimSpec(**{**vars(STILL), "master_weights": True})


BOUNDS = {"full": 0.04, "lora": 0.02, "qlora": 0.02, "int8_lora": 0.02}


FAST = [("full", "bf16"), ("full", "fp16"), ("lora", "pure_bf16"), ("qlora", "bf16")]


@pytest.mark.parametrize(
    ("method", "precision"), [*FAST, *(slow(method, "pure_bf16") for method in ("full", "qlora", "int8_lora"))]
)
def test_losses_follow_those_of_fp32(small_llama: Path, method: str, precision: str):
    """A type that changes what is learnt by more than its rounding."""
    plain, _ = run(small_llama, split([3, 5]), method=method, precision="fp32", steps=6)
    other, weights = run(small_llama, split([3, 5]), method=method, precision=precision, steps=6)
    for a, b in zip(plain, other, strict=True):
        assert a.loss.item() == pytest.approx(b.loss.item(), abs=BOUNDS[method])
    spec = spec_of(method=method, precision=precision)
    assert {value.dtype for value in weights.values()} == {spec.adapter_dtype if spec.adapted else spec.dtype}


def test_master_weights_of_exact_gradients_are_those_of_fp32():
    """The copies follow the very path of an fp32 run that sees the same gradients."""
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(64, 32, generator=draw).bfloat16()
    half, single = (torch.nn.Linear(32, 64, bias=False) for _ in range(2))
    half.weight = torch.nn.Parameter(values.clone())
    single.weight = torch.nn.Parameter(values.float())
    optimizers = [build_optimizer(half, MASTERS), build_optimizer(single, STILL)]
    for _ in range(5):
        gradient = torch.randn(64, 32, generator=draw).bfloat16()
        half.weight.grad, single.weight.grad = gradient.clone(), gradient.float()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(half.weight, single.weight.bfloat16())
    assert torch.equal(optimizers[0].state[half.weight]["master"], single.weight)


@pytest.mark.parametrize(
    ("kind", "native", "choice"), [("cpu", True, "fp32"), ("cuda", True, "bf16"), ("cuda", False, "fp16")]
)
def test_auto_is_chosen_by_the_device_and_says_why(kind, native: bool, choice: str):
    chosen, reason = choose_precision("auto", kind=kind, native_bf16=native, name="the card")
    assert chosen == choice and "the card" in reason


@pytest.mark.parametrize("choice", ["bf16", "pure_bf16"])
def test_bf16_on_a_card_without_it_proposes_fp16(choice):
    """The case of eight P4 with bf16 set."""
    with pytest.raises(UserError, match=rf"got {choice} for P4; set train.precision to fp16"):
        choose_precision(choice, kind="cuda", native_bf16=False, name="P4")
    assert choose_precision("fp16", kind="cuda", native_bf16=False, name="P4")[0] == "fp16"
