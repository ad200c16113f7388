"""Loading gives transformers' weights bit for bit, with memory for one weight more than the model."""

import gc
import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, PretrainedConfig

from lean_finetune.model.experts.experts_forward import has_experts
from lean_finetune.model.model_config import read_config
from lean_finetune.model.precision import base_dtype
from lean_finetune.model.quantize import quantisation, quantisation_tensors
from lean_finetune.train.monitor.measured_peak import make_meter
from lean_finetune.train.monitor.memory_monitor import host_peak, process_status
from lean_finetune.train.save_model import save_full
from tests.kit.estimate_cpu import FAMILIES, SMALL, make_code_books, save_small
from tests.kit.loaded import load_base
from tests.model.large import large_llama, write_checkpoint
from tests.processes import run_bounded
from tests.small_model import CPU, spec_of

ROOT = Path(__file__).parents[2]
BOUND = 1.15
"""Peak memory, relative to the model or, if more, to one file plus the weights loaded before it."""
TESTED = ("Qwen2", "Gemma")
FORMS = [("full", "bf16"), ("full", "fp32"), ("qlora", "fp32"), ("int8_lora", "bf16")]
LAYERS, SHARDS = 22, 8


@pytest.mark.parametrize("family", [f if f in TESTED else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES])
def test_weights_are_those_that_transformers_loads(family: str, tmp_path: Path):
    """A weight in another place or type, a tie lost, or a buffer left empty."""
    save_small(family, tmp_path)
    for method, precision in FORMS:
        spec = spec_of(method=method, precision=precision)
        how = quantisation(spec)
        ours = load_base(tmp_path, spec, CPU)
        if how is not None and has_experts(ours):
            continue  # transformers does not quantise experts; tests/model/experts/test_experts.py has ours.
        theirs = AutoModelForCausalLM.from_pretrained(
            tmp_path, config=read_config(tmp_path), dtype=base_dtype(spec), quantization_config=how
        )
        mine = {**dict(ours.named_parameters()), **dict(ours.named_buffers())}
        expected = {**dict(theirs.named_parameters()), **dict(theirs.named_buffers())}
        assert list(mine) == list(expected)
        for name, tensor in expected.items():
            assert mine[name].dtype == tensor.dtype and torch.equal(mine[name], tensor), name
        pairs = list(zip(quantisation_tensors(ours), quantisation_tensors(theirs), strict=True))
        assert bool(pairs) == (how is not None) and all(torch.equal(one, other) for one, other in pairs)
        tied = [m.get_input_embeddings().weight is m.get_output_embeddings().weight for m in (ours, theirs)]
        assert tied[0] == tied[1]
        assert ours.generation_config.to_dict().items() >= {"use_cache": True}.items()
        assert ours.generation_config.eos_token_id == theirs.generation_config.eos_token_id


def test_a_tied_head_is_tested(tmp_path: Path):
    """The comparison above without a tie in it, or with nothing else."""
    assert {FAMILIES[family].tie_word_embeddings for family in TESTED} == {True, False}


def test_weights_that_transformers_holds_in_another_form_come_back_as_they_were(tmp_path: Path):
    """Transformers stacks experts when loading; saving must undo that."""
    config = MixtralConfig(**SMALL, num_local_experts=2)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    model = load_base(tmp_path / "base", spec_of(method="full"), CPU)
    (tmp_path / "ours").mkdir()
    save_full(model, tmp_path / "ours")
    name = "model.safetensors"
    assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "base" / name).read_bytes()


def load_and_print(directory: Path, method: str, precision: str) -> None:
    """Load a model and print the memory it took; runs in a separate process."""
    spec = spec_of(method=method, precision=precision)
    make_code_books()
    file_pages_before = process_status()["RssFile"]
    with host_peak() as host:
        model = load_base(directory, spec, CPU)
    tensors = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers(), *quantisation_tensors(model)]}
    stays = sum(tensor.untyped_storage().nbytes() for tensor in tensors.values())
    with open("/proc/self/maps") as maps:
        mapped = str(directory) in maps.read()
    file_pages = process_status()["RssFile"] - file_pages_before
    print(json.dumps({**vars(host), "stays_bytes": stays, "mapped": mapped, "file_pages_added_bytes": file_pages}))


def measured_by_a_process(directory: Path, method: str, precision: str) -> dict[str, int]:
    command = f"from {__name__} import *; load_and_print(Path({str(directory)!r}), {method!r}, {precision!r})"
    done = run_bounded([sys.executable, "-c", command], cwd=ROOT, check=True, timeout_seconds=1800)
    return json.loads(done.stdout.splitlines()[-1])


def check(config: PretrainedConfig, directory: Path, shards: int, method: str, precision: str) -> None:
    files = write_checkpoint(config, directory, shards)
    try:
        largest_file = max(path.stat().st_size for path in files)
        measured = measured_by_a_process(directory, method, precision)
        placed_before_last = measured["stays_bytes"] * (shards - 1) / shards
        assert measured["added_bytes"] <= BOUND * max(measured["stays_bytes"], largest_file + placed_before_last)
        assert not measured["mapped"] and measured["file_pages_added_bytes"] < 16 * 2**20
    finally:
        for path in files:
            path.unlink()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's high-water mark is Linux's")
@pytest.mark.slow
def test_the_process_holds_one_file_more_than_what_stays_at_most(tmp_path: Path):
    """A checkpoint twice in memory, or its pages still referenced by weights that were not converted."""
    check(large_llama(1, vocabulary=8000), tmp_path, 4, "full", "fp32")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's high-water mark is Linux's")
@pytest.mark.parametrize(("method", "precision"), [("full", "bf16"), *FORMS[1:2], ("qlora", "bf16"), FORMS[3]])
def test_the_same_of_two_gib_in_many_files(tmp_path: Path, method: str, precision: str):
    """The same for a model of many files, in each storage format of its weights."""
    check(large_llama(LAYERS), tmp_path, SHARDS, method, precision)


SLOW_METHODS = [pytest.param(method, marks=pytest.mark.slow) for method in ("lora", "int8_lora")]


@pytest.mark.parametrize("method", ["full", "qlora", *SLOW_METHODS])
def test_loading_leaves_nothing_but_the_model(small_llama: Path, method: str):
    """Temporary memory of loading that is freed only with the model."""
    make_code_books()
    gc.collect()
    meter = make_meter(CPU)
    with meter.window("load"):
        model = load_base(small_llama, spec_of(method=method), CPU)
        gc.collect()
        with meter.phase("after"):
            torch.zeros(1)
    tensors = {t.untyped_storage().data_ptr(): t for t in [*model.parameters(), *model.buffers()]}
    stays = sum(t.untyped_storage().nbytes() for t in [*tensors.values(), *quantisation_tensors(model)])
    assert abs(meter.result().peak_bytes_by_phase["after"] - stays) < 1024
