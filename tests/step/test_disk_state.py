"""Optimizer state on disk learns what it learns in memory, to the bit."""

import errno
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lean_finetune.config.schema import Train
from lean_finetune.memory.predict.process_memory import disk_state_bytes
from lean_finetune.model.model_config import read_config
from lean_finetune.step.offload import disk_weights
from lean_finetune.step.offload.disk_weights import DiskFault, DiskMasterWeights, DiskPlace, StateFile
from lean_finetune.step.run_optimizer import build_optimizer, peak_lr
from tests.kit.loaded import load_model
from tests.kit.specs import changed
from tests.memory.common import setting_of
from tests.processes import run_bounded
from tests.small_model import CPU
from tests.step.common import OPTIM, slow

SIZES = ((1100, 513), (70,), (2, 128, 1024), (5000,), (1,))
"""Several chunks with a short last one, one exact chunk, and tensors too small for 8 bits."""


def updated(
    spec: Train, dtype: torch.dtype, disk: DiskPlace | None = None, steps: int = 4
) -> tuple[list[torch.Tensor], Any]:
    """Weights after some steps with gradients that are the same for every optimizer, and the optimizer."""
    draw = torch.Generator().manual_seed(0)
    model = nn.ParameterList([torch.randn(size, generator=draw).to(dtype) for size in SIZES])
    optimizer = build_optimizer(model, spec, disk=disk)
    for step in range(steps):
        for parameter in model:
            parameter.grad = torch.randn(parameter.shape, generator=draw).to(dtype)
        optimizer.param_groups[0]["lr"] = peak_lr(spec) / (step + 1)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model], optimizer


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> DiskPlace:
    """A file on a disk, with chunks so small that tensors have several."""
    monkeypatch.setattr(disk_weights, "CHUNK_VALUES", disk_weights.ALIGNED_VALUES)
    return DiskPlace(directory=tmp_path / "scratch", buffer_bytes=64 * 2**20)


@pytest.mark.parametrize("masters", [False, slow(True)])
@pytest.mark.parametrize("dtype", [torch.float32, slow(torch.bfloat16)], ids=str)
@pytest.mark.parametrize("name", ["adamw", *map(slow, ("adamw_8bit", "lion", "lion_8bit", "sgd"))])
def test_state_on_disk_learns_as_in_memory(place, name, dtype, masters):
    """A chunk that is lost, stale or shifted; a step counted once a chunk; scales of another block."""
    spec = changed(OPTIM, optimizer=name, offload="optimizer", master_weights=masters)
    expected, memory = updated(spec, dtype)
    found, disk = updated(spec, dtype, place)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    for here, there in zip(disk.inner.state.values(), memory.inner.state.values(), strict=True):
        assert here.keys() == there.keys()
        assert all(torch.equal(torch.as_tensor(here[key]), torch.as_tensor(there[key])) for key in here)


def test_a_file_system_in_memory_is_refused():
    """State "on disk" that takes the RAM it should save."""
    with pytest.raises(DiskFault, match=r"^train\.offload_to: disk needs a disk; /dev/shm/.* is a tmpfs, .*use cpu$"):
        StateFile(Path("/dev/shm/lean-finetune-test"))
    Path("/dev/shm/lean-finetune-test").rmdir()


def test_a_disk_without_room_is_found_before_the_first_step(place, monkeypatch):
    """A disk that fills up after hours of training."""

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DiskFault, match=r"^train\.offload_to: .* refused after 0 B \(No space left on device\); free"):
        updated(changed(OPTIM, offload="optimizer"), torch.float32, place)


LIMITED = """
import resource, sys
from pathlib import Path
import torch
from lean_finetune.model.files.safetensors_files import write_loaded
from lean_finetune.step.offload.disk_weights import DiskPlace
from lean_finetune.step.run_optimizer import build_optimizer
from tests.small_model import spec_of
model = torch.nn.ParameterList([torch.ones(16 * 2**20)])
model[0].grad = torch.ones_like(model[0])
private = int(next(line for line in open("/proc/self/status") if line.startswith("VmData")).split()[1]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (private + 160 * 2**20,) * 2)
place = DiskPlace(directory=Path(sys.argv[1]), buffer_bytes=64 * 2**20) if sys.argv[2] == "disk" else None
optimizer = build_optimizer(model, spec_of(optimizer="adamw", lr=1e-3, offload="optimizer"), disk=place)
optimizer.step()
optimizer.zero_grad()
state = next(iter(optimizer.inner.state.values()))
write_loaded(Path(sys.argv[1]) / "checkpoint", {"master": next(iter(optimizer.state.values()))["master"], **state})
state["exp_avg"].copy_(state["exp_avg_sq"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["disk", "cpu"])
def test_neither_updates_nor_checkpoints_need_memory_for_all_state(tmp_path, where):
    """192 MiB of state, and a limit of 160 MiB for what a process allocates: state in memory must not pass."""
    run = run_bounded([sys.executable, "-c", LIMITED, str(tmp_path), where])
    if where == "disk":
        assert run.returncode == 0, run.stderr
        assert (tmp_path / "checkpoint").stat().st_size > 192 * 2**20
    else:
        assert run.returncode != 0 and "alloc" in run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "lion", "sgd"])
def test_the_predicted_size_is_that_of_the_file(small_llama, tmp_path, name):
    """A disk that is full although there was room by the prediction."""
    setting = setting_of(method="full", precision="bf16", optimizer=name, offload="optimizer", offload_to="disk")
    setting = replace(setting.with_train(master_weights=True), offload_buffer_bytes=64 * 2**20)
    model = load_model(small_llama, setting.train, CPU)
    place = DiskPlace(directory=tmp_path, buffer_bytes=setting.offload_buffer_bytes)
    made = build_optimizer(model, setting.train, disk=place)
    assert isinstance(made, DiskMasterWeights)
    assert made._file._end == disk_state_bytes(read_config(small_llama), setting)
