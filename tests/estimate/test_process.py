"""What no trace can tell: each figure says where it comes from."""

import sys

import pytest
import torch
from transformers import LlamaConfig

from benchmarks.estimate_cpu import SMALL
from stages.estimate.devices import resolve_gpu
from stages.estimate.gpus import CONTEXTS, GPUS
from stages.estimate.process import IMPORTS_BYTES, as_json, needed_bytes, on_device, on_host
from stages.units import MIB
from tests.processes import run_bounded
from tests.small_model import spec_of

CODE = "import psutil, stages.train.__main__; print(psutil.Process().memory_info().rss)"


def test_every_known_gpu_has_a_context_and_only_a_t4s_is_measured():
    """An assumed figure told as a measured one."""
    for gpu in GPUS:
        context = on_device(gpu)["cuda_context"]
        assert context.bytes > 0 and context.margin_bytes > 0 and context.why
        assert (context.basis == "measured") == (gpu.compute_capability == (7, 5))
    assert [capability for capability, _ in CONTEXTS] == sorted((c for c, _ in CONTEXTS), reverse=True)
    assert on_device(resolve_gpu("H100")[0])["cublas_workspaces"].bytes == 64 * MIB


def test_the_hosts_memory_grows_with_the_largest_weight_and_not_with_the_files():
    """A host said to need room for the whole model, whose files are read a weight at a time, or for none of it."""
    config = LlamaConfig(**{**SMALL, "vocab_size": 4096})
    found = on_host(config, spec_of(method="full", precision="bf16"), torch.bfloat16, batch_tokens=1000)
    assert found["loading"].bytes == 4 * 4096 * 64 * (2 + 2)
    assert on_host(config, spec_of(method="qlora"), torch.bfloat16, batch_tokens=1000)["loading"].bytes == 4096 * 64 * 6
    assert found["batches"].bytes == 300_000
    told = as_json(on_device(GPUS[0]), found)
    assert told["host_needed_bytes"] == needed_bytes(found) == sum(part["bytes"] for part in told["host"].values())


def test_a_process_takes_after_imports_what_is_stated():
    """A constant that the imports have outgrown."""
    if torch.version.cuda is not None:
        pytest.skip("PyTorch for CUDA: the constant was measured with that for CPUs, its margin is for this")
    done = run_bounded([sys.executable, "-c", CODE], check=True)
    assert int(done.stdout) == pytest.approx(IMPORTS_BYTES, rel=0.3)
