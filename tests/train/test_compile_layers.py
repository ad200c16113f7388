"""train.compile: what is refused, what its peak is known to be, and that a compiled run can be resumed."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch._dynamo

from benchmarks.estimate_cpu import FAMILIES, LAYOUTS, count, without_onednn
from lean_finetune.config.load import load_params
from lean_finetune.config.overrides import with_flags
from lean_finetune.config.schema import Params
from lean_finetune.core.errors import UserError
from lean_finetune.memory.predict.compiled_layers import (
    COUNTED,
    PEAKS_ON_CPU,
    headroom_percent,
    memory_note,
    refuse_compiled,
    refuse_unpredicted,
)
from lean_finetune.memory.predict.peak import predict
from lean_finetune.model.load_model import load_model
from lean_finetune.model.model_config import read_config
from lean_finetune.train.compile_layers import compile_errors, compile_layers
from tests.conftest import ROOT
from tests.memory.common import CPU_TARGET, setting_of
from tests.small_model import CPU, save_small_llama, spec_of
from tests.train.interrupted import finish, in_parts, small_job

JIT_WARNING = "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
"""PyTorch's compiler imports a module that uses it."""


@pytest.fixture
def fresh_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Graphs, kernels and settings of one test must not be those of another."""
    monkeypatch.chdir(tmp_path)  # The loop's kernels are in its scratch/compiled.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    with torch._dynamo.config.patch(recompile_limit=8):
        yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def params() -> Params:
    return with_flags(load_params(ROOT / "params.yaml"), ["train.compile=true"])


def test_a_gpu_is_refused_unless_its_prediction_is_not_enforced():
    """A run that ends without memory although it was predicted to fit."""
    with pytest.raises(UserError, match=r"^train\.compile: .* never measured on a GPU.*estimate\.enforce=false$"):
        refuse_unpredicted(True, "cuda", enforce=True)
    refuse_unpredicted(True, "cuda", enforce=False)
    refuse_unpredicted(True, "cpu", enforce=True)
    refuse_unpredicted(False, "cuda", enforce=True)


@pytest.mark.parametrize(
    "flag",
    [
        "bucket.mode=packed",
        "train.offload_activations=disk",
        "train.compress_activations=int8",
        "train.sequence_tiles=4",
        "hardware.num_gpus=2 train.sharding=ddp",
    ],
)
def test_settings_that_exclude_it_are_refused(params: Params, flag: str):
    """A run that compiles for each micro-batch, or offloads what nobody predicted."""
    with pytest.raises(UserError, match=r"^train\.compile: "):
        with_flags(params, flag.split())


def test_mixtures_are_refused_before_they_load(params: Params):
    with pytest.raises(UserError, match="mixtures of experts count the rows"):
        refuse_compiled(params, "cpu", FAMILIES["Mixtral"])
    refuse_compiled(params, "cpu", FAMILIES["Llama"])


def test_the_verdict_of_a_cpu_leaves_room_for_the_highest_peak_that_was_measured(params: Params):
    """A verdict that counts with the peak of layers that are not compiled."""
    percent = headroom_percent(params, "cpu")
    usable = 100 - params.estimate.headroom_percent
    assert COUNTED >= PEAKS_ON_CPU[1] and COUNTED * (100 - percent) == pytest.approx(usable, abs=0.1)
    assert headroom_percent(params, "cuda") == params.estimate.headroom_percent
    assert memory_note(False, "cpu") is None
    assert "0.77 to 1.5 times" in str(memory_note(True, "cpu")) and "on a GPU none" in str(memory_note(True, "cuda"))


@pytest.mark.slow
@pytest.mark.filterwarnings(JIT_WARNING)
@pytest.mark.usefixtures("fresh_compiler")
def test_a_layer_that_cannot_be_compiled_ends_the_run_in_one_line(small_llama: Path, tmp_path: Path):
    """A traceback of the compiler, or layers that silently run uncompiled."""
    model = load_model(small_llama, spec_of(), CPU)
    compile_layers(model, tmp_path)
    model.get_submodule("base_model.model.model.layers.0").register_forward_hook(lambda *_: torch._dynamo.graph_break())
    with pytest.raises(UserError, match=r"^train\.compile: layers of this model cannot be compiled here \("):
        with compile_errors():
            model(input_ids=torch.ones(2, 8, dtype=torch.int64))


@pytest.mark.slow
@pytest.mark.filterwarnings(JIT_WARNING)
@pytest.mark.usefixtures("one_thread", "fresh_compiler")
def test_a_compiled_run_resumes_to_the_same_bytes(small_llama: Path, tmp_path: Path):
    """Kernels that depend on the shape that they were first compiled for."""
    job = replace(
        small_job(small_llama, tmp_path / "tokens", grad_ckpt=True), compiled=True, measured_steps=frozenset()
    )
    whole = finish(job)
    torch._dynamo.reset()
    resumed = in_parts(job, tmp_path / "checkpoints", [1, 3])
    assert (whole.weights, whole.curves) == (resumed.weights, resumed.curves)
    plain = finish(replace(job, compiled=False))
    assert whole.weights != plain.weights  # Else nothing was compiled.
    assert list(Path("scratch/compiled").rglob("*.so"))


@pytest.mark.slow
@pytest.mark.filterwarnings(JIT_WARNING)
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("changes", [{"method": "full"}, {"method": "lora", "grad_ckpt": True}], ids=str)
def test_the_stated_range_has_the_peak_of_compiled_steps(tmp_path: Path, changes: dict):
    """A peak above what the verdict counts with; the prediction is that of layers that are not compiled."""
    save_small_llama(tmp_path, hidden_size=128, intermediate_size=384, num_hidden_layers=4)
    setting, steps = setting_of(**changes), LAYOUTS["padded"]
    predicted = predict(read_config(tmp_path), setting, steps, CPU_TARGET).peak.bytes
    with without_onednn():
        measured = count(tmp_path, setting, steps, compiled=True).peak_bytes
    low, high = PEAKS_ON_CPU
    assert measured is not None and low <= measured / predicted <= high
