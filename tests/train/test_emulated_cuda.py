"""Training and evaluation on an emulated GPU: no tensor on the wrong device, the results of the CPU, no new wait."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lean_finetune.evaluate.generate import Prompt, greedy_answers, row_sums
from lean_finetune.step import batches
from lean_finetune.step.evaluation_limits import EvaluationLimits
from lean_finetune.step.offload.activation_offload import ActivationOffload, HostStore
from lean_finetune.step.offload.disk_weights import DiskPlace
from lean_finetune.train.job import TrainJob
from lean_finetune.train.loop import train
from lean_finetune.train.monitor.measured_peak import make_meter
from lean_finetune.train.process.stop_signals import Stopped
from tests.emulated_cuda.device import CUDA, EmulatedCuda, MixedDevices, emulated_cuda
from tests.kit.estimate_cpu import save_small
from tests.kit.loaded import load_base
from tests.kit.specs import changed
from tests.small_model import CPU, VOCABULARY, save_small_llama, spec_of
from tests.train.interrupted import Breaking
from tests.train.jobs import Tokens, make_job, plan_of, random_lengths, random_tokens

STEPS, MICRO_BATCHES, ROWS_A_BATCH, HELDOUT_ROWS = 2, 2, 2, 3
OLDER_GPU = (7, 5)
"""Without flash kernels, which PyTorch has for GPUs alone."""


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> Tokens:
    count = STEPS * MICRO_BATCHES * ROWS_A_BATCH
    return random_tokens(tmp_path_factory.mktemp("tokens"), random_lengths(6, 40, count), HELDOUT_ROWS)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """As many key heads as query heads: a GPU without flash kernels repeats keys, which sums in another order."""
    return save_small_llama(tmp_path_factory.mktemp("model"), num_key_value_heads=4)


def job_of(
    model: Path, tokens: Tokens, *, flat: bool = False, micro_batches: int = MICRO_BATCHES, **more: Any
) -> TrainJob:
    """A run of a few rows."""
    shape = (-1, micro_batches, ROWS_A_BATCH)
    plan = plan_of(tokens[0], np.arange(len(tokens[0])).reshape(shape).tolist(), flat=flat)
    return make_job(model, tokens, plan, loader_threads=0, heldout_rows=HELDOUT_ROWS, foreach=True, **more)


def results(job: TrainJob) -> list[float]:
    """Losses, norms and held-out losses of a run."""
    curves = train(job, make_meter(job.device)).curves
    return [row[name] for row in curves for name in ("loss", "grad_norm", "heldout_loss") if name in row]


def both(job: TrainJob, **on_gpu: Any) -> tuple[list[float], list[float], EmulatedCuda]:
    """The results of a job on the CPU and on the emulated GPU, where `on_gpu` changes it."""
    expected = results(job)
    with emulated_cuda(OLDER_GPU) as gpu:
        return expected, results(replace(job, device=CUDA, **on_gpu)), gpu


def spec_for(method: str, **changes: Any) -> Any:
    """A run in bf16 that recomputes layers."""
    return spec_of(method=method, precision="bf16", grad_ckpt=True, **changes)


@pytest.mark.parametrize(
    ("method", "flat"),
    [
        ("lora", False),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("lora", True), ("full", False), ("full", True))),
        *(pytest.param("qlora", flat, marks=pytest.mark.slow) for flat in (False, True)),
    ],
)
def test_a_run_on_a_gpu_has_the_results_of_the_cpu(model, tokens, method, flat):
    """A tensor made on the host where the GPU computes, in loading, batches, step, update or held-out loss."""
    expected, found, gpu = both(job_of(model, tokens, flat=flat, train=spec_for(method)))
    assert found == expected and len(found) == 2 * STEPS + 1
    assert gpu.record.launches


@pytest.mark.slow
@pytest.mark.parametrize("flat", [False, True])
def test_int8_runs_on_a_gpu(model, tokens, flat):
    """As above; bitsandbytes multiplies in 8 bits on a GPU alone, so results are near those of the CPU."""
    expected, found, _ = both(job_of(model, tokens, flat=flat, train=spec_for("int8_lora")))
    assert found == pytest.approx(expected, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"master_weights": True, "train": spec_of(method="full", precision="pure_bf16")},
        {"train": spec_of(precision="fp16")},
        {"train": spec_of(lora_dora=True)},
        {"train": spec_for("lora", lora_dropout=0.1)},
        {"train": spec_of(lora_init="pissa")},
        {"train": spec_of(lora_trainable_tokens=[5, 9, VOCABULARY + 2])},
        {"optimizer": "adamw_8bit"},
        {"optimizer": "adafactor"},
        {"optimizer": "lion_8bit"},
        {"loss_chunk": None, "max_grad_norm": None},
        {
            "micro_batches": 1,
            "train": spec_of(method="full"),
            "max_grad_norm": None,
            "optimizer_in_backward": True,
        },
    ],
    ids=str,
)
def test_other_switches_on_a_gpu_have_the_results_of_the_cpu(model, tokens, changes):
    """The same for code that only these switches run."""
    expected, found, _ = both(job_of(model, tokens, **changes))
    assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Qwen3-MoE", {}),
        ("Qwen3-MoE", {"lora_experts": "all"}),
        ("Qwen3-MoE", {"method": "full"}),
        ("Qwen3-MoE", {"method": "qlora"}),
        ("Gemma 2", {}),
        ("DeepSeek-V3", {}),
        ("Mistral, window", {}),
    ],
)
def test_other_families_on_a_gpu_have_the_results_of_the_cpu(tmp_path, tokens, family, changes):
    """The same for experts, and for attention with caps, other head sizes and windows."""
    save_small(family, tmp_path)
    expected, found, _ = both(job_of(tmp_path, tokens, train=spec_of(**{"method": "lora", **changes})))
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_offload_to_the_host_has_the_results_without(tmp_path, model, tokens):
    """A copy that is never made, made to the wrong device, or from memory that is not pinned."""
    job = job_of(model, tokens, train=spec_of(method="full"))
    expected, found, gpu = both(job, offload=ActivationOffload(HostStore(CUDA)))
    assert found == expected
    there = [kind for kind, place in gpu.record.copies if "activation_offload" in place]
    assert sorted(there) == ["to device, pinned", "to host, pinned"]
    for disk in (None, DiskPlace(directory=tmp_path, buffer_bytes=64 * 2**20)):
        _, found, gpu = both(job, train=changed(job.train, offload="optimizer"), disk=disk)
        assert found == expected
        there = sorted({kind for kind, place in gpu.record.copies if "host_transfer" in place})
        assert there == ["to device, pinned", "to host, pinned"]


@pytest.mark.slow
def test_an_interrupted_run_on_a_gpu_resumes_exactly(tmp_path, model, tokens):
    """State that is restored to the host, or the GPU's random numbers that are not restored."""
    job = job_of(model, tokens, train=spec_for("lora", lora_dropout=0.1))
    with emulated_cuda(OLDER_GPU):
        job = replace(job, device=CUDA)
        expected = results(job)
        with pytest.raises(Stopped):
            train(job, make_meter(CUDA), Breaking(tmp_path, stop_after=1))
        curves = train(job, make_meter(CUDA), Breaking(tmp_path)).curves
    found = [row[name] for row in curves for name in ("loss", "grad_norm", "heldout_loss") if name in row]
    assert found == expected


@pytest.mark.slow
def test_evaluation_on_a_gpu_has_the_results_of_the_cpu(model, tokens):
    """Prompts, masks or a KV cache on the host."""
    limits = EvaluationLimits(max_tokens=200, logits_chunk=16, max_new_tokens=5, generate_batch_rows=2)
    spec, rows = spec_of(method="full"), tokens[1]
    prompts = [Prompt(family="all", ids=list(range(5, 5 + size)), answer_ids=[]) for size in (9, 4, 6)]

    def evaluated(device: torch.device) -> tuple[Any, Any]:
        lm = load_base(model, spec, device).eval()
        losses = row_sums(lm, spec, rows.gather, rows.lengths, [0, 1, 2], limits, pad_id=0, device=device)
        return losses.tolist(), greedy_answers(lm, spec, prompts, stops=(2,), limits=limits, pad_id=0, device=device)

    expected = evaluated(CPU)
    with emulated_cuda(OLDER_GPU):
        assert evaluated(CUDA) == expected


def test_the_host_waits_for_the_gpu_only_for_results(model, tokens):
    """An `.item()` in the step, which stops the host from launching work ahead of the GPU."""
    with emulated_cuda(OLDER_GPU) as gpu:
        results(job_of(model, tokens, device=CUDA, train=spec_for("full")))
    waits: Counter[str] = Counter()
    for (_, place), count in gpu.record.waits.items():
        waits[place] += count
    assert waits == {
        "step/run_checks.py:refuse_non_finite": STEPS,
        "train/loop.py:train_step": 2 * STEPS,
        "train/heldout_loss.py:heldout_loss": 1,
        "step/run_checks.py:refuse_broken_weights": 1,
        "step/loss.py:_close": 2,
        "step/loss.py:check_head → transformers/masking_utils.py:find_packed_sequence_indices": 1,
    }
    copied = {place: kind for kind, place in gpu.record.copies if "batches" in place}
    assert copied == {"step/batches.py:to": "to device, pinned"}


def test_a_tensor_on_the_host_is_found(model, tokens, monkeypatch):
    """An emulation that lets devices mix finds nothing."""
    moved = batches.Batch.to

    def without_targets(batch: batches.Batch, device: torch.device) -> batches.Batch:
        return replace(moved(batch, device), supervised_index_N=batch.supervised_index_N)

    monkeypatch.setattr(batches.Batch, "to", without_targets)
    with emulated_cuda(OLDER_GPU), pytest.raises(MixedDevices, match=r"index_select.* at step/loss\.py"):
        results(job_of(model, tokens, device=CUDA))
