"""Refusals of stage train, before it loads and while it runs."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from lean_finetune.config.field_types import SPLIT_WEIGHTS
from lean_finetune.core.atomic_files import FIGURES, read_sealed, write_sealed
from lean_finetune.core.errors import DoesNotFit, UserError
from lean_finetune.distributed.processes import uses_cuda
from lean_finetune.memory.gpu_names import NAMED
from lean_finetune.plan.batch_plan import Plan
from lean_finetune.step.parallel_model import ParallelModel
from lean_finetune.step.run_checks import (
    _in_any,
    refuse_broken_weights,
    refuse_dead_adapters,
    refuse_non_finite,
)
from lean_finetune.train.heldout_loss import heldout_batches
from lean_finetune.train.make_job import measured_steps
from lean_finetune.train.process.training_device import (
    check_device,
    check_host,
    check_offload,
    check_processes,
    other_device_note,
    refuse_absent_gpu,
    training_device,
)
from stages.train import main as train
from tests.kit.loaded import load_model
from tests.memory.common import micro_batch
from tests.small_model import CPU, spec_of
from tests.token_files import heldout
from tests.workspace import error, invoke, lay_out, write_verdict

FITS = {"enforce": True, "refusal": None}
NAN, ONE = torch.tensor(float("nan")), torch.tensor(1.0)


MICRO_BATCHES = [micro_batch(7, rows, 8, 4) for rows in ([3, 1], [11, 12])]


def test_a_step_that_is_not_finite_is_refused_with_its_place():
    """Training on would destroy the weights."""
    refuse_non_finite([ONE, ONE], ONE, 7, MICRO_BATCHES)
    with pytest.raises(UserError, match=r"step 7, micro-batch 1 \(training rows 11, 12\)"):
        refuse_non_finite([ONE, NAN], ONE, 7, MICRO_BATCHES)
    with pytest.raises(UserError, match=r"gradient must be finite; its norm is inf at optimizer step 7"):
        refuse_non_finite([ONE, ONE], torch.tensor(float("inf")), 7, MICRO_BATCHES)


def test_actual_device_is_checked():
    """The verdict is for hardware.gpu, which may not be the machine that trains."""
    too_large = {"peak_bytes_predicted": 2**60, "gpu": "A100-80GB"}
    with pytest.raises(DoesNotFit, match=r"hardware\.gpu: the run needs .* are free (of this machine's RAM|within)"):
        check_device(CPU, spec_of(), FITS, too_large)
    check_device(CPU, spec_of(), FITS, {**too_large, "peak_bytes_predicted": 1})
    check_device(CPU, spec_of(), {"enforce": False, "refusal": None}, too_large)
    with pytest.raises(DoesNotFit, match=r"room in RAM on the host of A100-80GB; .* are predicted"):
        check_device(torch.device("cuda"), spec_of(), FITS, {**too_large, "host_bytes_predicted": 2**60})
    with pytest.raises(DoesNotFit, match="predicted peak 90") as refused:
        check_device(CPU, spec_of(), {"enforce": True, "refusal": "predicted peak 90.00 GiB exceeds …"}, too_large)
    assert refused.value.exit_code == 3


@pytest.mark.parametrize(
    ("choice", "where"), [("cpu", "(of this machine's RAM|within .*)"), ("disk", "below .*scratch")]
)
def test_offloading_activations_needs_room(tmp_path: Path, choice, where):
    """A machine that swaps itself to death, or a disk that is full after an hour."""
    check_offload("none", 2**60, tmp_path)
    check_offload(choice, 2**10, tmp_path / "scratch")
    with pytest.raises(UserError, match=rf"train\.offload_activations: {choice} needs room .* free {where}; free some"):
        check_offload(choice, 2**60, tmp_path / "scratch")


def test_offloading_to_disk_needs_a_directory(tmp_path: Path):
    """A traceback where scratch is a file, or a link to a disk that is not mounted."""
    (tmp_path / "scratch").symlink_to(tmp_path / "unmounted")
    with pytest.raises(UserError, match="scratch: cannot be written"):
        check_offload("disk", 1, tmp_path / "scratch")


def test_offloading_and_sharding_need_room_on_the_host():
    """A host that swaps under the state of an 8B, or is out of memory while it reads a 70B model that GPUs share."""
    gpu, too_large = torch.device("cuda"), {"host_bytes_predicted": 2**60}
    check_host("none", CPU, {"host_bytes_predicted": None})
    check_host("none", gpu, too_large, "ddp")
    check_host("optimizer", gpu, {"host_bytes_predicted": 2**10})
    with pytest.raises(UserError, match=r"^train\.offload: optimizer needs room .* free .*; free some, use"):
        check_host("optimizer", gpu, too_large)
    with pytest.raises(UserError, match=r"^train\.offload: .* where training runs on the CPU; use none$"):
        check_host("optimizer", CPU, {"host_bytes_predicted": None})
    for sharding in SPLIT_WEIGHTS:
        with pytest.raises(UserError, match=rf"^train\.sharding: {sharding} needs room .* are free .*; free some, use"):
            check_host("none", gpu, too_large, sharding)


def test_a_run_for_a_named_gpu_trains_on_the_cpu_only_if_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`hardware.gpu: RTX-4090` on a laptop: hours on the CPU, in silence."""
    monkeypatch.chdir(lay_out(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    write_verdict(tmp_path)
    figures = read_sealed(Path("data/estimate") / FIGURES)
    write_sealed(Path("data/estimate") / FIGURES, figures | {"gpu": "RTX-4090", "gpu_reason": NAMED})
    refusal = error(invoke(train))
    assert refusal.startswith("hardware.gpu: the run is for RTX-4090, and this machine has no CUDA device")
    assert refusal.endswith("set run.device=cpu to train on the CPU")
    lay_out(tmp_path, run__device="cpu")
    assert "plan.arrow" in error(invoke(train)), "the next check"
    note = other_device_note(CPU, {"gpu": "RTX-4090"})
    assert note is not None and note.startswith("training runs on the CPU with ") and note.endswith(" for RTX-4090")
    assert other_device_note(CPU, {"gpu": "cpu"}) is None


def test_run_device_cpu_leaves_a_gpu_alone(monkeypatch: pytest.MonkeyPatch):
    """A card that another program uses."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert training_device("cpu") == CPU and not uses_cuda("cpu") and uses_cuda("auto")
    refuse_absent_gpu("auto", {"gpu": "RTX-4090", "gpu_reason": NAMED})


def test_more_processes_than_memory_has_room_for_never_start():
    """A thousand processes on a laptop's CPU, which stopped answering."""
    check_processes(1, "auto")
    with pytest.raises(UserError, match=r"^hardware\.num_gpus: 1000000 processes .* GiB are free .*, or lower hardw"):
        check_processes(10**6, "auto")


def test_heldout_batches_keep_the_budget_and_lose_no_row(tmp_path: Path):
    """A held-out pass larger than training's own batches could be the one that runs out of memory."""
    lengths = [5, 30, 7, 7, 2, 19, 30, 4]
    rows = heldout(tmp_path, [([3] * length, [1, length], None) for length in [9, *lengths]], dropped=[0])
    batches = list(heldout_batches(rows, 100, 40, 0))
    assert all(batch.input_ids_BT.numel() <= 40 for batch in batches)
    assert sum(len(batch.supervised_index_N) for batch in batches) == sum(lengths) - len(lengths)
    few = list(heldout_batches(rows, 3, 40, 0))
    assert sum(len(batch.input_ids_BT) for batch in few) == 3


def test_adapters_without_a_gradient_are_refused(small_llama: Path):
    """A frozen input under checkpointing once left lora_B at zero for a run, with a normal-looking loss."""
    model = load_model(small_llama, spec_of(method="lora"), CPU)
    ids = torch.arange(8)[None]
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    refuse_dead_adapters(ParallelModel(model), whole=True)
    dead = next(p for name, p in model.named_parameters() if "lora_B" in name)
    for gradient in (torch.zeros_like(dead), None):
        dead.grad = gradient
        with pytest.raises(UserError, match=r"every adapter must receive a gradient; .*lora_B.* is zero in the first"):
            refuse_dead_adapters(ParallelModel(model), whole=True)


def test_broken_weights_are_not_saved():
    """The last update can overflow after its loss was found finite."""
    model = torch.nn.Linear(2, 2)
    refuse_broken_weights(ParallelModel(model), 9)
    with torch.no_grad():
        model.weight[0, 0] = float("inf")
    with pytest.raises(UserError, match=r"weights must be finite; weight is not, after 9 steps"):
        refuse_broken_weights(ParallelModel(model), 9)


def test_control_steps_are_measured_too():
    """Measuring only what was predicted to be the worst would agree with a prediction that overlooked the worst."""
    planned = [micro_batch(k, range(9 - k), 8, 4) for k in range(9)]
    lengths = np.full(9, 8, np.int32)
    assert measured_steps(Plan.of(planned), lengths, chunk=0) == {0, 2, 4, 6, 8}
    assert measured_steps(Plan.of(planned[:1]), lengths, chunk=0) == {0}


def test_what_one_process_finds_stops_all():
    """The others would wait for it until the time limit."""
    parallel: Any = Mock(size=2, same_parameters=True)
    parallel.model.parameters.return_value = iter([torch.ones(1)])
    parallel.sum_over_ranks = lambda flags: flags + torch.tensor([1.0, 0.0])
    assert _in_any(parallel, [False, False]) == [True, False]
