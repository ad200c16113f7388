"""Out-of-memory errors are recognised by any of their names, and reported with remedies."""

import errno
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cuda_memory.units import GIB, MIB
from lean_finetune.core.atomic_files import write_sealed
from lean_finetune.train.monitor.memory_monitor import AddressLimit, OomFailure, requested_bytes
from lean_finetune.train.monitor.out_of_memory import (
    EstimateOutputs,
    changes_that_fit,
    is_out_of_memory,
    oom_error,
    read_prediction,
)
from tests.cuda_memory.snapshots import Snapshot, frame
from tests.small_model import spec_of

FAILURE = OomFailure(
    message="OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 MiB. " + "GPU 0 has figures. " * 20,
    requested_bytes=512 * MIB,
    phase="backward",
    step=3,
    number=1,
    micro_batches=4,
    rows=8,
    padded_tokens=4096,
    length=512,
    joined=False,
    live_bytes=20 * GIB,
    reserved_bytes=23 * GIB,
    by_category={"weights": 4 * GIB, "gradients": 0, "optimizer": GIB},
    free_bytes=GIB // 4,
    total_bytes=24 * GIB,
    addresses=None,
    weights_intact=True,
    process_status=None,
)
FULL: dict[str, Any] = {"train": spec_of(method="full"), "snapshot": None}
METRICS = {"worst_phase": "backward", "gpu": "RTX-4090", "capacity_gib": 23.99}
FORECAST = EstimateOutputs(
    metrics=METRICS,
    breakdown={"backward": {"weights": 4 * GIB, "activations": 12 * GIB}, "peak": {"weights": 4 * GIB}},
    advice={},
)


def lines_of(
    failure: OomFailure, tmp_path: Path, *, forecast: EstimateOutputs = FORECAST, running: dict[str, Any] = FULL
) -> list[str]:
    """The error's line, then the details."""
    error = oom_error(failure, forecast, device="RTX-4090", record=tmp_path / "oom.json", **running)
    return [str(error), *error.details]


def test_gpu_error_has_predicted_and_measured_breakdown(tmp_path: Path):
    assert lines_of(FAILURE, tmp_path) == [
        "bucket.max_tokens: RTX-4090 ran out of memory allocating 0.5 GiB in backward of optimizer step 3, micro-batch "
        "1 of 4 (8 x 512 tokens); lower it, or change the run as below",
        "predicted: 16 GiB of tensors at most in backward (activations 12 GiB, weights 4 GiB), for RTX-4090 of 23.99 "
        "GiB",
        "measured: 20 GiB (activations and all else 15 GiB, weights 4 GiB, optimizer 1 GiB); 23 GiB reserved; 0.25 GiB "
        "of 24 GiB free on the device",
        f"allocator: {FAILURE.message[:160]}…",
        "to list what would fit, run: lean-finetune fit --gpu 20480MiB",
        f"details: {tmp_path / 'oom.json'}",
    ]


@pytest.mark.parametrize(
    ("changes", "begins"),
    [
        ({"rows": 1, "padded_tokens": 512}, "data.max_length: "),
        ({"joined": True, "length": 4096}, "bucket.max_tokens: "),
        ({"phase": "optimizer", "weights_intact": False}, "train.optimizer: "),
        ({"phase": "load", "step": None, "number": None}, "train.method: "),
        ({"phase": "save", "step": 9}, "hardware.gpu: "),
        (
            {"phase": "reading"},
            "bucket.max_tokens: RTX-4090 ran out of memory allocating 0.5 GiB between phases of optimizer step 3",
        ),
    ],
)
def test_each_phase_has_its_own_remedy(tmp_path: Path, changes: dict[str, Any], begins: str):
    """The batch size blamed for the optimizer."""
    lines = lines_of(replace(FAILURE, **changes), tmp_path)
    assert lines[0].startswith(begins) and all("\n" not in line for line in lines)
    assert ("8 rows joined to 4096 tokens" in lines[0]) is changes.get("joined", False)


def test_current_settings_are_not_proposed(tmp_path: Path):
    """A run of qlora that is advised to use qlora, and one of sgd to use an optimizer with less state."""
    least = FULL | {"train": spec_of(method="qlora", precision="bf16", optimizer="sgd")}
    for phase in ("load", "optimizer"):
        failure = replace(FAILURE, phase=phase, step=None, number=None, weights_intact=False)
        assert lines_of(failure, tmp_path, running=least)[0].startswith("hardware.gpu: ")
    loading = replace(FAILURE, phase="load", step=None, number=None)
    line = lines_of(
        loading, tmp_path, running={**least, "train": spec_of(method="lora", precision="bf16", optimizer="sgd")}
    )[0]
    assert line.startswith("train.method: ") and "(qlora)" in line


def test_advice_of_estimate_comes_before_single_changes(tmp_path: Path):
    """A proposed change that needs more memory than was available."""
    changes = [("a=1", 30 * GIB), ("b=2", 20 * GIB), ("c=3", 10 * GIB), ("d=4", 9 * GIB), ("e=5", 8 * GIB)]
    single = [{"command": f"dvc exp run -S {flag}", "peak_bytes": size} for flag, size in changes]
    forecast = replace(FORECAST, advice={"remedies": [], "single_changes": single})
    assert changes_that_fit(FAILURE, forecast) == [
        "would fit: dvc exp run -S b=2 (20 GiB)",
        "would fit: dvc exp run -S c=3 (10 GiB)",
        "would fit: dvc exp run -S d=4 (9 GiB)",
    ]
    remedies = [{"command": "dvc exp run -S x=1 -S y=2", "peak_bytes": GIB}]
    advised = replace(FORECAST, advice={"remedies": remedies, "single_changes": single})
    assert changes_that_fit(FAILURE, advised) == ["would fit: dvc exp run -S x=1 -S y=2 (1 GiB)"]


def test_error_is_reported_without_a_prediction(tmp_path: Path):
    """A second fault that hides the first."""
    forecast = read_prediction(METRICS, tmp_path / "nowhere")
    (tmp_path / "oom.json").mkdir()
    unknown = replace(FAILURE, live_bytes=None, reserved_bytes=None, free_bytes=None)
    lines = lines_of(unknown, tmp_path, forecast=forecast)
    assert lines[1] == "measured: unknown, this system has no allocator statistics" and not any(
        "predicted" in one for one in lines
    )
    assert "no details were written: " in lines[-1], "an error of the record must not hide the first"
    write_sealed(tmp_path / "breakdown.json", dict(FORECAST.breakdown))
    assert read_prediction(METRICS, tmp_path).breakdown == FORECAST.breakdown


def test_address_space_limit_is_named(tmp_path: Path):
    """bucket.max_tokens blamed for `ulimit -v`; a proposed GPU of 4 MiB, which `lean-finetune fit` refuses."""
    limit = AddressLimit(limit_bytes=4 * GIB, used_bytes=4 * GIB - MIB)
    small = replace(FAILURE, live_bytes=4 * MIB, requested_bytes=2 * MIB, by_category={}, addresses=limit)
    few = replace(FORECAST, breakdown={"backward": {"activations": 27 * MIB}})
    first, *lines = lines_of(small, tmp_path, forecast=few)
    assert (
        first.startswith("ulimit -v: RTX-4090 ran out of memory allocating 2 MiB in backward of optimizer step 3")
        and "4 GiB" in first
    )
    assert "bucket.max_tokens" not in first and not any("lean-finetune fit" in line for line in lines)
    assert lines_of(replace(FAILURE, addresses=limit), tmp_path)[0].endswith("or bucket.max_tokens: lower it")
    assert not any("--gpu 4MiB" in line for line in lines_of(replace(small, addresses=None), tmp_path, forecast=few))


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (MemoryError(), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (ValueError("DefaultCPUAllocator: can't allocate memory"), False),
    ],
)
def test_out_of_memory_errors_are_recognised(error: Exception, memory: bool):
    """Recovery from a fault of the program, or a traceback for lack of memory."""
    assert is_out_of_memory(error) is memory


def test_requested_bytes_are_parsed_from_real_messages():
    """Messages of the libraries that change with a version."""
    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**46)
    assert is_out_of_memory(refused.value) and requested_bytes(str(refused.value)) == 2**48
    with pytest.raises(MemoryError) as refused_too:
        np.empty(2**46, np.int64)
    assert requested_bytes(str(refused_too.value)) == 2**49
    assert requested_bytes("Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 79.11 GiB") == 3 * GIB // 2
    assert requested_bytes("CUDA error: out of memory") is None


def test_snapshot_says_what_filled_the_memory(tmp_path: Path):
    """A file of 21 MiB that nobody knows what to do with."""
    found, path = Snapshot(), tmp_path / "oom_snapshot.pickle"
    found.reserve(0, 20 * MIB)
    found.alloc(0, 12 * MIB, frame("transformers/models/llama/modeling_llama.py", 87, "forward"))
    found.alloc(12 * MIB, 3 * MIB, frame("torch/nn/functional.py", 3053, "cross_entropy"))
    found.fail(512 * MIB, 0)
    lines = lines_of(FAILURE, tmp_path, running=FULL | {"snapshot": found.write(path)})
    assert lines[3:5] == [
        "filled by: activations 12 MiB, logits 3 MiB; most of it from llama/modeling_llama.py:87 forward 12 MiB, "
        "nn/functional.py:3053 cross_entropy 3 MiB",
        f"more: lean-finetune snapshot {path}",
    ]
    assert json.loads((tmp_path / "oom.json").read_text())["snapshot"]["by_category"]["logits"] == 3 * MIB


def test_snapshot_without_tensors_names_the_command_alone(tmp_path: Path):
    """A list of nothing, where another process has filled the device."""
    found, path = Snapshot(), tmp_path / "oom_snapshot.pickle"
    found.fail(512 * MIB, 0)
    lines = lines_of(FAILURE, tmp_path, running=FULL | {"snapshot": found.write(path)})
    assert lines[3] == f"more: lean-finetune snapshot {path}" and not any("filled by" in line for line in lines)


def test_snapshot_that_cannot_be_read_hides_nothing(tmp_path: Path):
    """The error of the run replaced by one about pickles."""
    path = tmp_path / "oom_snapshot.pickle"
    path.write_bytes(b"not a pickle")
    first, *lines = lines_of(FAILURE, tmp_path, running=FULL | {"snapshot": path})
    assert "RTX-4090 ran out of memory" in first
    assert any(line.startswith("the snapshot could not be explained (") for line in lines)
