"""Host memory of each process while weights are broadcast, against the prediction of `estimate`."""

import sys
from pathlib import Path

import pytest
import torch

from lean_finetune.memory.predict.process_memory import on_host
from lean_finetune.model.model_config import read_config
from tests.distributed.group import group_of
from tests.distributed.worker import do_load_peaks
from tests.memory.ranks import shared_setting
from tests.model.large import large_llama, write_checkpoint
from tests.small_model import spec_of

MIB = 2**20


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's high-water mark is Linux's")
@pytest.mark.parametrize(("method", "precision"), [("full", "bf16"), ("lora", "fp32")])
def test_the_first_process_has_all_weights_until_they_are_broadcast(tmp_path: Path, method: str, precision: str):
    """A host predicted to need 32 GiB for a model of which one process reads 131 GiB before any GPU has them."""
    files = write_checkpoint(large_llama(4, vocabulary=8000), tmp_path, 4)
    with group_of(2) as group:
        found = group.ask(do_load_peaks, tmp_path, "zero3", spec_of(method=method, precision=precision))
    setting = shared_setting("zero3", 2, "one turn", method=method, precision=precision)
    host = on_host(read_config(tmp_path), setting, torch.bfloat16, batch_tokens=0)
    all_weights, moving = host["model"].bytes, host["loading"].bytes
    assert all_weights > 350 * MIB and found["first"] == pytest.approx(all_weights, abs=moving + 32 * MIB)
    assert found["other"] < 0.75 * all_weights  # Its half, and the largest part before it is sharded.
    for path in files:
        path.unlink()
