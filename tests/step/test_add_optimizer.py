"""An optimizer is added by one entry in config.optimizers: all other code must read what it needs from there."""

from pathlib import Path

import pytest
import torch
from ruamel.yaml import YAML

from lean_finetune.config.load import parse_params
from lean_finetune.config.optimizers import OPTIMIZERS, OptimizerEntry
from lean_finetune.config.schema import Train
from lean_finetune.memory.predict.state_formulas import Trained, optimizer_tensors
from lean_finetune.step.loss import summed_loss
from lean_finetune.step.run_optimizer import build_optimizer, device_state
from lean_finetune.step.step_loss import TokenLoss
from tests.conftest import ROOT
from tests.kit.loaded import load_model
from tests.kit.specs import changed
from tests.small_model import CPU, spec_of
from tests.step.common import run, split

MOMENTUM = OptimizerEntry(
    factory="torch.optim.SGD", options={"momentum": 0.9, "nesterov": True}, state={"momentum_buffer": 1}
)


@pytest.fixture
def optim(monkeypatch: pytest.MonkeyPatch) -> Train:
    """The settings of a run with an optimizer that exists in this test alone, read from params.yaml."""
    monkeypatch.setitem(OPTIMIZERS, "nesterov", MOMENTUM)
    values = YAML(typ="safe").load(ROOT / "params.yaml")
    values["train"] |= {"optimizer": "nesterov", "weight_decay": 0.0}
    return changed(parse_params(values).train, lr=0.05)


def test_it_trains_as_pytorch_trains_with_it(small_llama: Path, optim: Train):
    results, weights = run(small_llama, split([8]), method="full", optim=optim, max_grad_norm=None, steps=4)
    assert results[-1].loss.item() < results[0].loss.item() - 0.05
    model = load_model(small_llama, spec_of(method="full"), CPU)
    plain = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    for _ in range(4):
        (batch,) = split([8])
        (summed_loss(model, batch, TokenLoss(None)) / len(batch.supervised_index_N)).backward()
        plain.step()
        plain.zero_grad()
    assert all(torch.equal(weights[name], parameter) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("master_weights", [False, True])
def test_its_state_is_predicted_to_the_byte(small_llama: Path, optim: Train, master_weights: bool):
    spec = spec_of(method="full", precision="bf16")
    model = load_model(small_llama, spec, CPU)
    optimizer = build_optimizer(model, changed(optim, master_weights=master_weights))
    copies = sum(4 * p.numel() for p in model.parameters()) if master_weights else 0
    counted = sum(tensor.nbytes for tensor in device_state(optimizer, "nesterov", cuda=False))
    size = 4 if master_weights else 2
    trained = [Trained(shape=tuple(parameter.shape), value_bytes=size) for parameter in model.parameters()]
    predicted = sum(sum(kind.tensor_bytes) for kind in optimizer_tensors(trained, "nesterov", cuda=False))
    assert predicted + copies == counted > 0


def test_entries_of_pytorch_choose_how_tensors_are_updated():
    """PyTorch's default updates a CUDA parameter by foreach and a traced one by a loop, which takes less memory."""
    ours = [entry for entry in OPTIMIZERS.values() if entry.factory.startswith("torch.optim.")]
    assert ours and all({"fused": True, "foreach": False}.items() & entry.options.items() for entry in ours)
