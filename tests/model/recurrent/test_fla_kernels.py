"""train.fused_kernels: fla: what is refused, what is called, and a prediction that counts what the allocator counts."""

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from lean_finetune.core.errors import UserError
from lean_finetune.memory.devices import cpu_device, linear_attention_on
from lean_finetune.memory.gpu_names import named_gpu
from lean_finetune.memory.predict.peak import predict
from lean_finetune.memory.predict.traced_step import TracedModel
from lean_finetune.memory.trace import cuda_kernels
from lean_finetune.memory.trace.cuda_kernels import TUNING_BYTES, target_of, without_launches
from lean_finetune.model import fused_kernels
from lean_finetune.model.empty_model import causal_class
from lean_finetune.model.fused_kernels import refuse_fused
from lean_finetune.model.model_config import read_config
from lean_finetune.model.recurrent import fla_kernels, packed_layers
from lean_finetune.step.batches import pack_rows
from lean_finetune.step.loss import causal_lm, decoder_hidden
from tests.kit.estimate_cpu import LAYOUTS, count, make_code_books, without_onednn
from tests.kit.loaded import load_model
from tests.kit.tiny_config import tiny_config
from tests.memory.common import CPU_TARGET, setting_of
from tests.model.recurrent.test_packed_layers import LENGTHS, packed, saved
from tests.small_model import CPU, spec_of

QWEN = tiny_config("qwen3_next")
MISSING = "needs fla-core and triton: pip install -e .[fla]"
H100 = named_gpu("H100-80GB")[0]


@pytest.mark.parametrize(
    ("config", "device", "versions", "other", "enforce", "message"),
    [
        (QWEN, "cpu", ("0.6.0", "3.9.0"), (), True, "flash-linear-attention needs a GPU"),
        (tiny_config("llama"), "cuda", ("0.6.0", "3.9.0"), (), True, "got llama; use none"),
        (tiny_config("kimi_linear"), "cuda", ("0.6.0", "3.9.0"), (), True, "got kimi_linear; use none"),
        (tiny_config("qwen3_next", linear_value_head_dim=512), "cuda", ("0.6.0", "3.9.0"), (), True, "heads of 512"),
        (QWEN, "cuda", ("0.7.0", "3.9.0"), (), True, r"memory of fla-core 0\.7\.0 is not known"),
        (QWEN, "cuda", ("0.6.0", "3.6.0"), (), False, r"needs triton 3\.7\.1 or later.*got 3\.6\.0"),
        (QWEN, "cuda", ("0.6.0", "3.9.0"), ("tilelang",), True, "memory of tilelang, which fla calls"),
        (QWEN, "cuda", ("0.7.0", "3.9.0"), ("tilelang",), False, None),
        (QWEN, "cuda", ("0.6.0", "3.9.0"), (), True, None),
    ],
)
def test_it_is_refused_where_it_cannot_run_or_its_memory_is_unknown(
    monkeypatch: pytest.MonkeyPatch, config, device, versions, other, enforce, message
):
    """A run that fails in its first step, has wrong gradients, or a verdict that nobody compared."""
    monkeypatch.setattr(fused_kernels, "_version", lambda choice: versions[0])
    monkeypatch.setattr(fla_kernels, "version", lambda name: versions[1])
    monkeypatch.setattr(fla_kernels, "find_spec", lambda name: name in other or None)
    if message is None:
        return refuse_fused("fla", device, config, enforce=enforce)
    with pytest.raises(UserError, match=rf"^train\.fused_kernels: .*{message}") as error:
        refuse_fused("fla", device, config, enforce=enforce)
    assert "\n" not in str(error.value)


def test_a_missing_package_is_refused(monkeypatch: pytest.MonkeyPatch):
    """A traceback where the extra is not installed."""
    monkeypatch.setitem(sys.modules, "fla", None)
    with pytest.raises(UserError, match=r'^train\.fused_kernels: needs the package fla-core .*\[fla\]"`, or use none$'):
        refuse_fused("fla", "cuda", QWEN, enforce=True)


class Calls(list):
    """Stands for fla's function: notes the bounds of rows that it gets, and computes by the family's own code."""

    def __call__(self, *tokens: torch.Tensor, **options: Any) -> Any:
        self.append((options.pop("cu_seqlens", None), options.pop("chunk_indices", None)))
        code: Any = sys.modules[causal_class(QWEN).__module__]
        rows = {} if self[-1][0] is None else {"packed_rows": pack_rows(LENGTHS, sum(LENGTHS) + 9)}
        return code.torch_chunk_gated_delta_rule(*tokens, **options, **rows)


def test_layers_call_it_only_where_it_is_asked_for_and_with_the_bounds_of_rows(tmp_path, monkeypatch):
    """Transformers calls fla wherever it is installed: other memory than predicted. Packed rows that see each other."""
    package: Any = ModuleType("fla.ops.gated_delta_rule")
    package.chunk_gated_delta_rule = calls = Calls()
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setattr(fused_kernels, "version", lambda name: "0.6.0")
    saved("qwen3_next", tmp_path)
    fused, plain = (
        causal_lm(load_model(tmp_path, spec_of(method="full", fused_kernels=kernels), CPU)).eval()
        for kernels in ("fla", "none")
    )
    batch = packed()
    assert batch.packed_rows is not None
    with torch.no_grad():
        expected = decoder_hidden(plain, batch.input_ids_BT, batch.packed_rows)
        assert calls == []
        assert torch.equal(decoder_hidden(fused, batch.input_ids_BT, batch.packed_rows), expected)
        assert len(calls) == 3 and calls[0][0] is batch.packed_rows.offsets
        assert calls[0][1] is calls[2][1]  # Made once.
        assert calls[0][1].tolist() == [
            [row, part] for row, length in enumerate((*LENGTHS, 9)) for part in range(-(-length // 64))
        ]
        decoder_hidden(fused, batch.input_ids_BT)
    assert calls[3] == (None, None)


@pytest.mark.parametrize(
    ("family", "device", "kernels", "expected"),
    [
        ("qwen3_5_text", H100, "none", "gated delta rule in PyTorch, .*; train.fused_kernels: fla has faster ones"),
        ("qwen3_5_text", H100, "fla", "gated delta rule by flash-linear-attention's kernels"),
        ("qwen3_5_text", cpu_device(2**34), "none", "gated delta rule in PyTorch, by no other package's kernels$"),
        ("kimi_linear", H100, "none", "Kimi delta attention in PyTorch, by no other package's kernels$"),
        ("granitemoehybrid", H100, "none", "Mamba 2 in PyTorch"),
        ("falcon_h1", H100, "none", "Mamba 2 in PyTorch"),
        ("jamba", H100, "none", "Mamba in PyTorch"),
        ("minimax", H100, "none", "the family's own in PyTorch"),
        ("lfm2", H100, "none", None),
        ("llama", H100, "none", None),
    ],
)
def test_fit_says_what_computes_linear_attention(family, device, kernels, expected):
    """A user who does not know that a hybrid runs without the kernels that make it fast."""
    found = linear_attention_on(device, tiny_config(family), spec_of(fused_kernels=kernels))
    if expected is None:
        assert found is None
    else:
        assert found is not None and re.match(expected, found)


CASES: list[dict[str, Any]] = [
    {"method": "full", "precision": "bf16"},
    {"method": "lora", "grad_ckpt": True},
    {"method": "qlora", "grad_ckpt": True, "grad_ckpt_policy": "selective"},
]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["padded", "joined"])
@pytest.mark.parametrize("changes", CASES, ids=str)
def test_the_prediction_equals_what_the_allocator_counted(tmp_path: Path, changes: dict[str, Any], layout: str):
    """A trace that allocates unlike fla's code: real steps whose kernels are left out take the same memory."""
    pytest.importorskip("fla.ops.gated_delta_rule", reason=MISSING, exc_type=ImportError)
    saved("qwen3_next", tmp_path)
    make_code_books()
    setting, steps = setting_of(**changes, fused_kernels="fla"), LAYOUTS[layout]
    predicted = predict(TracedModel(read_config(tmp_path), setting, CPU_TARGET), steps)
    with without_onednn(), without_launches("fla", 1):
        counted = count(tmp_path, setting, steps).peak_bytes_by_phase
    for phase, peak in predicted.by_phase.items():
        # fla keeps the bounds of the last packed sequences.
        assert peak.bytes == pytest.approx(counted[phase], abs=512), phase
    plain = predict(TracedModel(read_config(tmp_path), setting_of(**changes), CPU_TARGET), steps)
    assert predicted.peak.bytes < 0.8 * plain.peak.bytes


@pytest.mark.slow
def test_on_a_gpu_tuning_is_counted(monkeypatch):
    """Triton's buffer at the first launch of a kernel."""
    pytest.importorskip("fla.ops.gated_delta_rule", reason=MISSING, exc_type=ImportError)
    model = TracedModel(QWEN, setting_of(method="full", fused_kernels="fla"), target_of(H100))
    tuned = predict(model, LAYOUTS["padded"][1:]).peak.bytes
    monkeypatch.setattr(cuda_kernels, "TUNING_BYTES", 0)
    more = tuned - predict(model, LAYOUTS["padded"][1:]).peak.bytes
    assert 0.9 * TUNING_BYTES < more <= TUNING_BYTES


@pytest.mark.slow
def test_tiles_are_those_of_the_gpu_that_is_predicted():
    """Partial sums of the decay's gradient: one on an H100, four on a T4, whatever GPU this machine has."""
    chunk_o = pytest.importorskip("fla.ops.common.chunk_o", reason=MISSING, exc_type=ImportError)
    found = {}
    for capability in ((9, 0), (8, 0), (8, 9), (7, 5)):
        with without_launches("fla", 1, capability):
            found[capability] = [chunk_o.check_shared_mem(kind) for kind in ("hopper", "ampere", "ada")]
    assert [*found.values()] == [[True] * 3, [False, True, True], [False, False, True], [False] * 3]


def test_the_family_code_itself_calls_no_package():
    """Transformers' own use of an installed fla."""
    code: Any = sys.modules[causal_class(QWEN).__module__]
    assert code.torch_chunk_gated_delta_rule.__code__.co_filename == packed_layers.__file__
    own = code.torch_chunk_gated_delta_rule.__wrapped__
    assert own.__code__.co_filename == code.__file__
