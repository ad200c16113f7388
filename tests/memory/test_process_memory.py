"""Memory of the process outside of the trace: every figure states its source."""

import sys

import pytest
import torch
from transformers import LlamaConfig

from benchmarks.estimate_cpu import SMALL
from lean_finetune.core.units import GIB, MIB
from lean_finetune.memory.devices import resolve_gpu
from lean_finetune.memory.gpus import CONTEXTS, GPUS
from lean_finetune.memory.predict.process_memory import IMPORTS_BYTES, as_json, needed_bytes, on_device, on_host
from tests.processes import run_bounded
from tests.small_model import spec_of

CODE = "import psutil, lean_finetune.train.train_run; print(psutil.Process().memory_info().rss)"


def test_every_known_gpu_has_a_context_and_only_a_t4s_is_measured():
    """An assumed figure reported as measured."""
    for gpu in GPUS:
        context = on_device(gpu)["cuda_context"]
        assert context.bytes > 0 and context.margin_bytes > 0 and context.why
        assert (context.basis == "measured") == (gpu.compute_capability == (7, 5))
    assert [capability for capability, _ in CONTEXTS] == sorted((c for c, _ in CONTEXTS), reverse=True)
    assert on_device(resolve_gpu("H100")[0])["cublas_workspaces"].bytes == 64 * MIB


def test_the_hosts_memory_grows_with_the_largest_weight_and_not_with_the_files():
    """A host's figure for all weights, though files are read one weight at a time, or for none."""
    config = LlamaConfig(**{**SMALL, "vocab_size": 4096})
    found = on_host(config, spec_of(method="full", precision="bf16"), torch.bfloat16, batch_tokens=1000)
    assert found["loading"].bytes == 4 * 4096 * 64 * (2 + 2)
    assert on_host(config, spec_of(method="qlora"), torch.bfloat16, batch_tokens=1000)["loading"].bytes == 4096 * 64 * 6
    assert found["batches"].bytes == 300_000
    written = as_json(on_device(GPUS[0]), found)
    process, loading, batches = (found[name].bytes for name in ("process", "loading", "batches"))
    assert written["host_needed_bytes"] == needed_bytes(found) == process + max(loading, batches)


@pytest.mark.parametrize("sharding", ["ddp", "zero1", "zero2", "zero3", "hsdp"])
def test_a_host_has_room_for_all_weights_where_one_process_cuts_them(sharding):
    """Llama-3.1-70B full on 8 GPUs: 32 GiB predicted, 131 GiB of bf16 weights in the first process alone."""
    config = LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
        vocab_size=128256, tie_word_embeddings=False,
    )  # fmt: skip
    spec = spec_of(method="full", precision="bf16")
    host = on_host(config, spec, torch.bfloat16, batch_tokens=4096, sharding=sharding)
    needed = as_json(on_device(GPUS[0], 8), host, 8)["host_needed_bytes"]
    processes = 8 * host["process"].bytes
    if sharding in ("ddp", "zero1"):  # Weights go straight to each GPU, one process reading them.
        assert "model" not in host and needed - processes == host["loading"].bytes
    else:
        assert 131 * GIB < host["model"].bytes < 132 * GIB
        assert needed - processes == host["model"].bytes + host["loading"].bytes


def test_every_process_reads_8_bit_weights():
    """Eight copies of a model on a host with room for one."""
    host = on_host(LlamaConfig(**SMALL), spec_of(method="int8_lora"), torch.bfloat16, batch_tokens=0, sharding="zero3")
    alone, all_of_them = (as_json(on_device(GPUS[0], 2), host, 2, method) for method in ("full", "int8_lora"))
    more = all_of_them["host_needed_bytes"] - alone["host_needed_bytes"]
    assert more == host["model"].bytes + host["loading"].bytes


@pytest.mark.slow
def test_a_process_takes_after_imports_what_is_stated():
    """A constant that the imports have outgrown."""
    if torch.version.cuda is not None:
        pytest.skip("PyTorch for CUDA: the constant was measured with that for CPUs, its margin is for this")
    done = run_bounded([sys.executable, "-c", CODE], check=True)
    assert int(done.stdout) == pytest.approx(IMPORTS_BYTES, rel=0.3)
