"""train.fused_kernels: what is refused, and that a trace with Liger-Kernel counts what the allocator counts."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GemmaConfig, LlamaConfig, PretrainedConfig

from lean_finetune.config.load import load_params, with_flags
from lean_finetune.core.errors import UserError
from lean_finetune.memory.predict.peak import predict
from lean_finetune.memory.predict.traced_step import TracedModel
from lean_finetune.memory.trace.cuda_kernels import without_launches
from lean_finetune.model import fused_kernels
from lean_finetune.model.fused_kernels import refuse_fused
from lean_finetune.model.model_config import read_config
from tests.conftest import ROOT
from tests.kit.estimate_cpu import FAMILIES as SMALL_MODELS
from tests.kit.estimate_cpu import LAYOUTS, SMALL, count, make_code_books, without_onednn
from tests.memory.common import CPU_TARGET, setting_of
from tests.processes import run_bounded
from tests.small_model import save_small_llama

LLAMA = SMALL_MODELS["Llama"]
MISSING = "needs liger-kernel: pip install -e .[liger]"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("train.grad_ckpt=true train.grad_ckpt_policy=selective", "use full or every_n"),
        ("hardware.num_gpus=2 train.sharding=ddp train.context_parallel=2", "different rows"),
    ],
)
def test_settings_that_exclude_it_are_refused(flags: str, named: str):
    """Wrong gradients: selective checkpointing reads what the rotary embedding has overwritten."""
    params = with_flags(load_params(ROOT / "params.yaml"), ["train.fused_kernels=liger"])
    with pytest.raises(UserError, match=rf"^train\.fused_kernels: .*{named}"):
        with_flags(params, flags.split())


@pytest.mark.parametrize(
    ("config", "device", "found", "enforce", "message"),
    [
        (LLAMA, "cpu", "0.8.5", True, "needs a GPU"),
        (GemmaConfig(**SMALL), "cuda", "0.8.5", True, "got liger with gemma"),
        (LlamaConfig(**SMALL, hidden_act="gelu"), "cuda", "0.8.5", True, "got liger with llama and gelu"),
        (LLAMA, "cuda", "0.9.0", True, r"memory of liger-kernel 0\.9\.0 is not known"),
        (LLAMA, "cuda", "0.9.0", False, None),
        (LLAMA, "cuda", "0.8.5", True, None),
    ],
)
def test_it_is_refused_where_it_cannot_run_or_its_memory_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
    config: PretrainedConfig,
    device: str,
    found: str,
    enforce: bool,
    message: str | None,
):
    """A run that fails in its first step, or one whose verdict nobody compared."""
    monkeypatch.setattr(fused_kernels, "_version", lambda choice: found)
    if message is None:
        refuse_fused("liger", device, config, enforce=enforce)
        return
    with pytest.raises(UserError, match=rf"^train\.fused_kernels: .*{message}") as error:
        refuse_fused("liger", device, config, enforce=enforce)
    assert "\n" not in str(error.value)


def test_a_missing_package_is_refused(monkeypatch: pytest.MonkeyPatch):
    """A traceback where the extra is not installed."""
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(UserError, match=r"^train\.fused_kernels: needs the package liger-kernel .*or use none$"):
        refuse_fused("liger", "cuda", LLAMA, enforce=True)


CASES: list[dict[str, Any]] = [
    {"method": "full"},
    {"method": "full", "grad_ckpt": True},
    {"method": "full", "precision": "bf16"},
    {"method": "full", "optimizer_in_backward": True, "max_grad_norm": None},
    {"method": "lora", "precision": "bf16", "lora_dropout": 0.1},
    {"method": "lora", "grad_ckpt": True, "grad_ckpt_policy": "every_n"},
    {"method": "qlora", "grad_ckpt": True},
    {"method": "qlora", "lora_dora": True},
    {"method": "int8_lora", "grad_ckpt": True},
]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["padded", "joined"])
@pytest.mark.parametrize("changes", CASES, ids=str)
def test_the_prediction_equals_what_the_allocator_counted(tmp_path: Path, changes: dict[str, Any], layout: str):
    """A trace that allocates unlike Liger's code: real steps whose kernels are left out take the same memory."""
    pytest.importorskip("liger_kernel", reason=MISSING, exc_type=ImportError)
    save_small_llama(tmp_path, dtype=torch.float32, tie_word_embeddings=False)
    make_code_books()
    setting, steps = setting_of(**changes, fused_kernels="liger"), LAYOUTS[layout]
    if setting.train.optimizer_in_backward:
        steps = tuple(step[:1] for step in steps)
    predicted = predict(TracedModel(read_config(tmp_path), setting, CPU_TARGET), steps)
    with without_onednn(), without_launches("liger", 1):
        counted = count(tmp_path, setting, steps).peak_bytes_by_phase
    for phase, peak in predicted.by_phase.items():
        assert peak.bytes == pytest.approx(counted[phase], abs=128), phase
    assert (
        predicted.peak.bytes
        < predict(TracedModel(read_config(tmp_path), setting_of(**changes), CPU_TARGET), steps).peak.bytes
    )


@pytest.mark.slow
def test_kernels_compute_what_the_code_of_the_model_computes(tmp_path: Path):
    """Losses or gradients of another model: the bars of the benchmark, with kernels in Triton's interpreter."""
    pytest.importorskip("liger_kernel", reason=MISSING, exc_type=ImportError)
    command = [sys.executable, "-m", "benchmarks.fused_kernels", "--quick", "--out", str(tmp_path / "results.json")]
    done = run_bounded(command, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


class Created(TorchDispatchMode):
    """Records the shapes of new tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty.memory_format:
            self.shapes.append(tuple(out.shape))
        return out


@pytest.mark.slow
def test_sums_of_a_norms_gradient_have_a_row_for_each_multiprocessor():
    """The one tensor of Liger's that depends on the GPU, left out of the prediction."""
    functions = pytest.importorskip("liger_kernel.ops.rms_norm", reason=MISSING, exc_type=ImportError)
    with FakeTensorMode(), without_launches("liger", 132):
        normed = functions.LigerRMSNormFunction.apply(torch.ones(8, 64), torch.ones(64, requires_grad=True), 1e-6)
        with Created() as created:
            normed.sum().backward()
    assert (132, 64) in created.shapes and (1, 64) not in created.shapes
