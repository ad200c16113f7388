"""train.offload=parameters on one GPU: FSDP2 in a group of one process, updates after and in backward."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from lean_finetune.distributed.processes import SINGLE_PROCESS, process_group
from lean_finetune.memory.predict.peak import predict
from lean_finetune.memory.predict.state_formulas import model_shapes
from lean_finetune.memory.predict.traced_step import TracedModel
from lean_finetune.model.model_config import read_config
from lean_finetune.step.offload.disk_weights import DiskPlace
from tests.distributed.cases import Case, learn
from tests.memory.common import CPU_TARGET, setting_of
from tests.memory.ranks import STEPS, count
from tests.small_model import CPU, VOCABULARY

MASTERS: dict[str, Any] = {"offload": "parameters", "master_weights": True}
FORMS: dict[str, dict[str, Any]] = {
    "full": {"model": {"method": "full"}, "optim": {"offload": "parameters"}},
    "in backward": {
        "model": {"method": "full", "precision": "bf16", "grad_ckpt": True},
        "optim": MASTERS,
        "in_backward": True,
        "chunk": 16,
    },
    "several micro-batches": {"model": {"method": "full"}, "optim": {"offload": "parameters"}, "sizes": (3, 5)},
    "8 bits": {"model": {"method": "full"}, "optim": {**MASTERS, "optimizer": "adamw_8bit"}, "in_backward": True},
    "lora": {"model": {"method": "lora"}, "optim": {"offload": "parameters"}},
    "qlora": {"model": {"method": "qlora", "grad_ckpt": True}, "optim": {"offload": "parameters"}},
    "tokens": {
        "model": {"method": "lora", "lora_trainable_tokens": [5, 9, VOCABULARY + 2]},
        "optim": {"offload": "parameters"},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("place", ["cpu", "disk"])
@pytest.mark.parametrize("form", FORMS)
def test_one_process_that_fetches_its_layers_learns_the_same(small_llama: Path, tmp_path: Path, form: str, place: str):
    """A layer updated before its backward, a gradient that is not whole, or state on disk of another weight."""
    plain = Case(directory=str(small_llama), mode="none", steps=5, **FORMS[form])
    expected = learn(replace(plain, optim={**plain.optim, "offload": "none"}), SINGLE_PROCESS)
    disk = DiskPlace(directory=tmp_path, buffer_bytes=64 * 2**20) if place == "disk" else None
    with process_group(SINGLE_PROCESS, CPU, 60.0, alone=True):
        found = learn(replace(plain, mode="zero3", optim={**plain.optim, "disk": disk}), SINGLE_PROCESS)
        weights = dict(found.parallel.full_parameters())
    # A tied embedding's gradients of several micro-batches are summed in another order.
    tolerance = 0.0 if len(plain.sizes) == 1 else 1e-5
    assert found.losses == pytest.approx(expected.losses, rel=tolerance, abs=0)
    assert found.norms == pytest.approx(expected.norms, rel=1e-6)
    for name, weight in expected.parallel.full_parameters():
        torch.testing.assert_close(weights[name], weight, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("grad_ckpt", [False, True])
def test_the_prediction_is_what_the_allocator_counted_beside_the_host_memory(small_llama, monkeypatch, grad_ckpt):
    """A layer that is fetched, a gradient on its way, or an update of the host that is counted on the device."""
    inputs = vars(FSDPParam)["all_gather_inputs"].fget
    copied = property(lambda param: [part.clone() for part in inputs(param)])  # As from a host to a GPU.
    monkeypatch.setattr(FSDPParam, "all_gather_inputs", copied)
    setting = setting_of(
        method="full",
        grad_ckpt=grad_ckpt,
        offload="parameters",
        max_grad_norm=None,
        optimizer_in_backward=True,
    )
    config = read_config(small_llama)
    predicted = predict(TracedModel(config, setting, CPU_TARGET), STEPS["one turn"]).by_phase
    with process_group(SINGLE_PROCESS, CPU, 60.0, alone=True):
        counted = count(SINGLE_PROCESS, small_llama, setting, STEPS["one turn"])
    on_host = 3 * 4 * model_shapes(config).values  # Weights and two moments.
    for phase in ("forward", "backward"):
        assert counted[phase] - on_host == pytest.approx(predicted[phase].bytes, rel=1e-3, abs=1536), phase
