"""Types of weights and of arithmetic: what they bring, what they may cost, and which a device can."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from lean_finetune.config.load import COMMON_PARAMS, load_params
from lean_finetune.config.schema import Params
from lean_finetune.core.atomic_files import write_sealed
from lean_finetune.core.errors import UserError
from lean_finetune.model.precision import adapter_dtype, autocast, base_dtype, choose_precision, precision_of
from lean_finetune.step.loss import summed_loss
from lean_finetune.step.run_optimizer import build_optimizer
from lean_finetune.step.step_loss import TokenLoss
from tests.kit.loaded import load_model
from tests.kit.specs import changed
from tests.small_model import CPU, spec_of
from tests.step.common import run, slow, split

STILL = spec_of(optimizer="adamw", lr=1e-5, weight_decay=0.0, schedule="constant", warmup_fraction=0.0)
"""A rate whose updates are below 1/256 of most weights."""
MASTERS = changed(STILL, master_weights=True)


HIDDEN_SIZE = 64
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
    assert {value.dtype for value in weights.values()} == {adapter_dtype(spec) if spec.adapted else base_dtype(spec)}


@pytest.mark.parametrize("method", ["lora", pytest.param("qlora", marks=pytest.mark.slow)])
def test_inputs_of_adapters_are_saved_once(small_llama: Path, method: str):
    """Copies in fp32 that peft makes of inputs, and autocast converts back and saves: the same bits in more memory."""
    spec, batch = spec_of(method=method, precision="bf16", lora_joined="none"), split([8])[0]
    found = []
    for as_peft in (True, False):
        model = load_model(small_llama, spec, CPU)
        for module in model.modules() if as_peft else ():
            module.__dict__.pop("_cast_input_dtype", None)
        saved: dict[int, torch.UntypedStorage] = {}

        def note(tensor: torch.Tensor, into: dict[int, torch.UntypedStorage] = saved) -> torch.Tensor:
            storage = tensor.untyped_storage()
            into[storage._cdata] = storage  # Which stays alive, so that no other one gets its address.
            return tensor

        with saved_tensors_hooks(note, lambda tensor: tensor), autocast(spec, "cpu"):
            loss = summed_loss(model, batch, TokenLoss(16))
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        found.append((loss.detach(), gradients, sum(storage.nbytes() for storage in saved.values())))
    (loss_a, gradients_a, peft_bytes), (loss_b, gradients_b, own_bytes) = found
    assert torch.equal(loss_a, loss_b)
    assert all(torch.equal(a, b) for a, b in zip(gradients_a, gradients_b, strict=True))
    # In each of two layers: three copies of one input, two of another, and one of what attention saves too.
    assert peft_bytes - own_bytes == 2 * (2 + 1 + 1) * batch.input_ids_BT.numel() * HIDDEN_SIZE * 2


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


@pytest.mark.parametrize("content", ["[]", "{}", '{"precision": "bf16"}'])
def test_a_choice_that_no_stage_wrote_is_one_line(tmp_path: Path, content: str):
    """A KeyError."""
    chosen = tmp_path / "precision.json"
    chosen.write_text(content)
    with pytest.raises(UserError, match=r"has no hash of its content, so no stage wrote it; .* run `dvc repro`$"):
        precision_of(_automatic(), chosen)


@pytest.mark.parametrize("content", [{}, {"precision": "auto"}, {"precision": 1}])
def test_a_choice_without_a_precision_is_one_line(tmp_path: Path, content: dict[str, Any]):
    """A run in another type."""
    chosen = tmp_path / "precision.json"
    write_sealed(chosen, content)
    with pytest.raises(UserError, match=r"must name the run's precision; .* run `dvc repro -f estimate`$"):
        precision_of(_automatic(), chosen)


def _automatic() -> Params:
    """Parameters whose precision stage estimate chooses."""
    return load_params(COMMON_PARAMS).model_copy(update={"train": spec_of(precision="auto")})
