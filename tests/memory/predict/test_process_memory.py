"""Memory of the process outside of the trace: every figure states its source."""

import sys
from functools import partial

import pytest
import torch

from cuda_memory.gpus import CONTEXTS, GPUS
from cuda_memory.units import GIB, MIB
from lean_finetune.memory.devices import resolve_gpu
from lean_finetune.memory.predict.process_memory import IMPORTS_BYTES, as_json, host_shortage, on_device, on_host
from lean_finetune.step.parallel_model import host_bytes
from tests.memory.common import LLAMA_3_1_70B, llama, setting_of
from tests.memory.ranks import shared_setting
from tests.processes import run_bounded

CODE = "import psutil, lean_finetune.train.train_run; print(psutil.Process().memory_info().rss)"


def test_every_known_gpu_has_a_context_and_only_a_t4s_and_an_h100s_are_measured():
    """An assumed figure reported as measured."""
    for gpu in GPUS:
        context = on_device(gpu)["cuda_context"]
        assert context.bytes > 0 and context.margin_bytes > 0 and context.why
        assert (context.basis == "measured") == (gpu.compute_capability in {(7, 5), (9, 0)})
    assert [capability for capability, _ in CONTEXTS] == sorted((c for c, _ in CONTEXTS), reverse=True)
    assert on_device(resolve_gpu("H100")[0])["cublas_workspaces"].bytes == 64 * MIB


def test_the_hosts_memory_grows_with_the_largest_weight_and_not_with_the_files():
    """A host's figure for all weights, though files are read one weight at a time, or for none."""
    config, full = llama(vocab_size=4096), setting_of(method="full", precision="bf16")
    found = on_host(config, full, torch.bfloat16, batch_tokens=1000)
    assert found["loading"].bytes == 4 * 4096 * 64 * (2 + 2)
    qlora = on_host(config, setting_of(method="qlora"), torch.bfloat16, batch_tokens=1000)
    assert qlora["loading"].bytes == 4096 * 64 * 6
    assert found["batches"].bytes == 300_000
    process, loading, batches = (found[name].bytes for name in ("process", "loading", "batches"))
    assert as_json(GPUS[0], full, found)["host_needed_bytes"] == process + max(loading, batches)


@pytest.mark.parametrize("sharding", ["ddp", "zero1", "zero2", "zero3", "hsdp"])
def test_a_host_has_room_for_all_weights_where_one_process_shards_them(sharding):
    """Llama-3.1-70B full on 8 GPUs: 32 GiB predicted, 131 GiB of bf16 weights in the first process alone."""
    setting = shared_setting(sharding, 8, "one turn", method="full", precision="bf16")
    host = on_host(LLAMA_3_1_70B, setting, torch.bfloat16, batch_tokens=4096)
    needed = as_json(GPUS[0], setting, host)["host_needed_bytes"] - 8 * host["process"].bytes
    if sharding in ("ddp", "zero1"):  # Weights go straight to each GPU, one process reading them.
        assert "model" not in host and needed == host["loading"].bytes
    else:
        assert 131 * GIB < host["model"].bytes < 132 * GIB
        assert needed == host["model"].bytes + host["loading"].bytes


def test_every_process_reads_8_bit_weights():
    """Eight copies of a model on a host with room for one."""
    alone, everyone = (
        as_json(GPUS[0], setting, on_host(llama(), setting, torch.bfloat16, batch_tokens=0))
        for setting in (shared_setting("zero1", 2, "one turn", method=method) for method in ("lora", "int8_lora"))
    )
    needed = everyone["host_needed_bytes"] - 2 * everyone["host"]["process"]["bytes"]
    assert needed == 2 * everyone["host"]["loading"]["bytes"]


def test_a_host_needs_memory_for_its_own_processes_alone():
    """Two hosts of four GPUs refused for what eight processes need, or the second one for weights that it never has."""
    setting = shared_setting("zero3", 8, "one turn", method="full", precision="bf16", offload="optimizer")
    given = {"batch_tokens": 4096, "offloaded_bytes": 0}
    found = as_json(GPUS[0], setting, on_host(llama(), setting, torch.bfloat16, **given))
    own = found["host_of_process"]
    eight, four, second = (host_bytes(own, "full", *host) for host in ((8,), (4,), (4, 1)))
    assert eight == found["host_needed_bytes"] and found["processes_per_host"] == 8
    assert four == second == eight // 2 == 4 * (own["imports"] + own["training"])
    own["loading"] = 10 * own["training"]
    assert host_bytes(own, "full", 4) == four + 6 * own["training"] and host_bytes(own, "full", 4, 1) == four
    shortage = partial(host_shortage, four, llama(), setting, torch.bfloat16, **given)
    assert shortage(nodes=2) is None and "RAM on a host with 8 of its GPUs" in str(shortage())


@pytest.mark.slow
def test_a_process_takes_after_imports_what_is_stated():
    """A constant that the imports have outgrown."""
    if torch.version.cuda is not None:
        pytest.skip("PyTorch for CUDA: the constant was measured with that for CPUs, its margin is for this")
    done = run_bounded([sys.executable, "-c", CODE], check=True)
    assert int(done.stdout) == pytest.approx(IMPORTS_BYTES, rel=0.3)
