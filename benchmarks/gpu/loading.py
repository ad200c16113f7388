"""Measure the loading of a checkpoint of random weights, which is written first."""

from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import torch

from benchmarks.gpu.cases import LoadCase
from benchmarks.gpu.model_configs import MODELS
from benchmarks.harness import Row
from lean_finetune.model.allocator_settings import use_segments
from tests.kit.loaded import load_model
from tests.kit.random_model import base_model, free_cached
from tests.kit.specs import train_of

SHARD_SIZE = "1GB"
"""Largest file of the checkpoint."""


def measured(case: LoadCase, device: torch.device) -> Row:
    """Seconds and memory of `load_model`. The files are in the system's cache, as they were just written."""
    use_segments(True, device)
    with TemporaryDirectory() as scratch:
        directory = Path(scratch)
        base_model(MODELS[case.model], train_of("full"), device).save_pretrained(directory, max_shard_size=SHARD_SIZE)
        files = [path.stat().st_size for path in directory.glob("*.safetensors")]
        free_cached()
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        start = perf_counter()
        model = load_model(directory, train_of(case.method), device)
        torch.cuda.synchronize(device)
        seconds = perf_counter() - start
    loaded = torch.cuda.memory_allocated(device) - before
    return {
        "files": len(files),
        "files_bytes": sum(files),
        "loading_s": seconds,
        "loaded_bytes": loaded,
        "peak_bytes": torch.cuda.max_memory_allocated(device) - before,
        "largest_tensor_bytes": max(p.numel() * p.element_size() for p in model.parameters()),
    }
