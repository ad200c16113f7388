"""Updates of master weights, on the host and in backward, learn the same as plain updates."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lean_finetune.config.schema import Train
from lean_finetune.core.errors import UserError
from lean_finetune.step.offload import master_weights
from lean_finetune.step.offload.activation_offload import KEPT
from lean_finetune.step.offload.master_weights import HostTransfer, refuse_offloaded_state
from lean_finetune.step.parallel_model import ParallelModel
from lean_finetune.step.run_optimizer import build_optimizer
from lean_finetune.step.step_loss import StepGoal
from lean_finetune.step.training_step import training_step
from lean_finetune.step.update.in_backward import refuse_in_backward
from lean_finetune.step.update.loss_scaler import LossScaler
from tests.kit.loaded import load_model
from tests.kit.specs import changed
from tests.kit.tiny_config import tiny_config
from tests.small_model import CPU, spec_of
from tests.step.common import OPTIM, assert_equal, run, slow, split

OTHERS = ("adamw_8bit", "lion", "lion_8bit", "adafactor", "ademamix_8bit", "sgd")
FORMS: list[dict[str, Any]] = [
    {"method": "full"},
    {"method": "full", "precision": "bf16"},
    {"method": "full", "precision": "bf16", "optim": changed(OPTIM, master_weights=True)},
    {"method": "full", "precision": "fp16"},
    {"method": "qlora", "precision": "bf16"},
]


def optim_of(name: str) -> Train:
    return changed(OPTIM, optimizer=name, lr=1e-3 if name == "lion" else OPTIM.lr)


@pytest.mark.parametrize(
    "form",
    [*FORMS, *(slow({"method": "full", "optim": optim_of(name)}) for name in OTHERS)],
    ids=str,
)
def test_an_update_on_the_host_is_that_of_the_device(small_llama, form):
    """A gradient truncated, rounded or lost in the transfer; copies from CPU to CPU represent it."""
    check_on_host(small_llama, {"optim": OPTIM, **form})


def test_weights_of_two_types_are_updated_on_the_host_and_in_backward(tmp_path):
    """Routers that a family keeps in fp32 rounded to the type of the other weights."""
    AutoModelForCausalLM.from_config(tiny_config("ernie4_5_moe")).save_pretrained(tmp_path)
    form: dict[str, Any] = {"method": "full", "precision": "bf16", "router": "trained", "optim": OPTIM}
    check_on_host(tmp_path, form)
    _, weights = run(tmp_path, split([8]), max_grad_norm=None, **form)
    _, updated = run(tmp_path, split([8]), max_grad_norm=None, in_backward=True, **form)
    assert_equal(updated, weights, 0)


def check_on_host(directory: Path, form: dict[str, Any]) -> None:
    """Updates on the host are those of the device, to the bit."""
    plain, weights = run(directory, split([3, 5]), **form)
    results, offloaded = run(directory, split([3, 5]), **{**form, "optim": changed(form["optim"], offload="optimizer")})
    assert [r.loss.item() for r in results] == [r.loss.item() for r in plain]
    assert_equal(offloaded, weights, 0)


def test_tensors_larger_than_the_buffer_are_copied_in_parts(monkeypatch):
    """The last part of a tensor lost, or the parts in another order."""
    monkeypatch.setattr(master_weights, "STAGING_BYTES", 64)
    weight = torch.randn(7, 13)
    link = HostTransfer([weight], torch.float32)
    assert torch.equal(link.to_host(weight, torch.float32), weight)
    other = torch.randn(7, 13)
    link.to_device(other, weight)
    assert torch.equal(weight, other)


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", *map(slow, OTHERS[1:])])
def test_an_update_in_backward_is_that_after_it(small_llama, name):
    """A weight updated twice, or before its gradient is complete: the tied embedding gets it from two sides."""
    chosen = optim_of(name)
    forms: tuple[dict[str, Any], ...] = ({}, {"grad_ckpt": True})
    for changes in forms:
        plain, weights = run(small_llama, split([8]), method="full", optim=chosen, max_grad_norm=None, **changes)
        results, updated = run(
            small_llama, split([8]), method="full", optim=chosen, max_grad_norm=None, in_backward=True, **changes
        )
        for a, b in zip(results, plain, strict=True):
            assert (a.loss.item(), a.grad_norm.item()) == (b.loss.item(), b.grad_norm.item())
        assert_equal(updated, weights, 0)


def test_host_updates_in_backward_are_the_plain_update(small_llama):
    """A gradient sent to the host in backward after it was freed, or with another step's norm."""
    chosen = changed(OPTIM, master_weights=True)
    form: dict[str, Any] = {"method": "full", "precision": "bf16", "max_grad_norm": None}
    _, weights = run(small_llama, split([8]), optim=chosen, **form)
    _, updated = run(small_llama, split([8]), optim=changed(chosen, offload="optimizer"), in_backward=True, **form)
    assert_equal(updated, weights, 0)


def test_a_loss_that_is_not_finite_ends_the_step_before_any_weight_changes(small_llama):
    """Updates in backward that spoil every weight before the guard looks."""
    model = load_model(small_llama, spec_of(method="full"), CPU)
    optimizer = build_optimizer(model, OPTIM)
    with torch.no_grad():
        next(model.parameters())[5] = torch.inf
        before = [parameter.detach().clone() for parameter in model.parameters()]

    def guard(losses: list[torch.Tensor], norm: torch.Tensor) -> None:
        if not losses[0].isfinite():
            raise UserError("loss must be finite")

    with pytest.raises(UserError, match="loss must be finite"):
        training_step(
            ParallelModel(model),
            optimizer,
            split([8]),
            before=(),
            micro_batches=1,
            goal=StepGoal.of_any_rows(spec_of(), 10),
            train=spec_of(method="full", optimizer_in_backward=True),
            foreach=False,
            phase=lambda name: contextlib.nullcontext(),
            guard=guard,
            scaler=LossScaler(),
            offload=KEPT,
        )
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


def test_a_second_micro_batch_cannot_update_in_backward(small_llama):
    """Half of a step's gradient taken for all of it."""
    with pytest.raises(AssertionError, match="one gradient per step"):
        run(small_llama, split([3, 5]), method="full", max_grad_norm=None, in_backward=True)


def test_settings_that_cannot_take_effect_are_refused():
    """A switch accepted without an effect, or with another one."""
    refuse_offloaded_state("none", "cpu", "cpu")
    refuse_offloaded_state("optimizer", "cpu", "cuda")
    with pytest.raises(UserError, match=r"^train\.offload: .*got optimizer where training runs on the CPU; use none$"):
        refuse_offloaded_state("optimizer", "cpu", "cpu")
    refuse_in_backward(spec_of(method="full"), [1, 1, 1])
    with pytest.raises(
        UserError, match=r"^train\.optimizer_in_backward: .* step 1 has 3; lower train\.tokens_per_step"
    ):
        refuse_in_backward(spec_of(method="full"), [1, 3, 2])
    with pytest.raises(UserError, match=r"^train\.optimizer_in_backward: .* train\.precision is fp16 on this device"):
        refuse_in_backward(spec_of(method="full", precision="fp16"), [1])


@pytest.mark.parametrize("offload", ["none", "optimizer"])
def test_saved_master_weights_load_to_the_bit(small_llama, offload):
    """Copies rounded by a checkpoint, or left on the device."""
    chosen = changed(OPTIM, master_weights=True, offload=offload)
    model = load_model(small_llama, spec_of(method="full", precision="bf16"), CPU)
    first = build_optimizer(model, chosen)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    first.step()
    again = build_optimizer(model, chosen)
    again.load_state_dict(first.state_dict())
    a, b = first.state_dict(), again.state_dict()
    assert all(torch.equal(x, y) for x, y in zip(a["masters"], b["masters"], strict=True))
    for x, y in zip(a["inner"]["state"].values(), b["inner"]["state"].values(), strict=True):
        assert all(torch.equal(x[key], y[key]) for key in x)
