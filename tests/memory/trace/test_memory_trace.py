"""The trace: what it counts, for whom, and that the known closed forms come out."""

import gc

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lean_finetune.core.errors import UserError
from lean_finetune.memory.predict.peak import Prediction, predict
from lean_finetune.memory.predict.traced_step import TracedModel
from lean_finetune.memory.trace.memory_trace import LOGITS, WORKSPACE, MemoryTrace, OpRules
from lean_finetune.model.model_config import read_config
from lean_finetune.step.loss import summed_loss
from tests.memory.common import CPU_TARGET, LLAMA_3_1_8B, gpu_target, joined, llama, setting_of, shape

ONE_STEP = ((shape(2, 96, 100), shape(2, 96, 100)),)
WIDE = llama(hidden_size=256, intermediate_size=512, num_hidden_layers=3, vocab_size=1024, tie_word_embeddings=True)


def predicted(target=CPU_TARGET, **setting) -> Prediction:
    return predict(TracedModel(WIDE, setting_of(**setting), target), ONE_STEP)


def test_categories_sum_to_the_peak_of_every_phase():
    """A breakdown that does not add up to the number above it."""
    for method in ("full", "qlora"):
        for target in (CPU_TARGET, gpu_target("H100")):
            for peak in predicted(target, method=method).by_phase.values():
                assert sum(peak.by_category.values()) == peak.bytes
                assert all(size > 0 for size in peak.by_category.values())


def test_switches_lower_the_peak_in_the_known_order():
    """A switch that does nothing in the trace."""
    plain = predicted(method="full").peak.bytes
    assert predicted(method="full", grad_ckpt=True).peak.bytes < plain
    full, lora, qlora = (predicted(method=m, grad_ckpt=True).peak.bytes for m in ("full", "lora", "qlora"))
    assert qlora < lora < full
    assert predicted(method="full", precision="bf16").peak.bytes < plain
    unchunked = predicted(method="full", loss_chunk=None).peak.by_category[LOGITS]
    chunked = predicted(method="full", loss_chunk=16).peak.by_category.get(LOGITS, 0)
    assert chunked < unchunked / 4


def test_the_micro_batch_that_sets_the_peak_is_found():
    """Switches compared over shapes that do not matter."""
    steps = ((shape(1, 64, 20), shape(4, 128, 200), shape(1, 8, 4)), (shape(1, 16, 8),))
    found = predict(TracedModel(WIDE, setting_of(), CPU_TARGET), steps)
    assert found.steps_of_peak == ((shape(1, 64, 20), shape(4, 128, 200)),)
    again = predict(TracedModel(WIDE, setting_of(), CPU_TARGET), found.steps_of_peak)
    assert again.peak.bytes == found.peak.bytes


def test_the_trace_is_the_same_every_time(small_llama):
    """Sizes that depend on collection of garbage or on what was traced before."""
    config = read_config(small_llama)
    first = predict(TracedModel(config, setting_of(method="qlora", optimizer="adamw_8bit"), CPU_TARGET), ONE_STEP)
    gc.collect()
    second = predict(TracedModel(config, setting_of(method="qlora", optimizer="adamw_8bit"), CPU_TARGET), ONE_STEP)
    assert first == second


def test_cuda_blocks_are_rounded_and_attention_keeps_no_score_matrix():
    """A GPU traced with the CPU's allocator or kernels."""
    on_gpu = predicted(gpu_target("H100"), method="full", precision="bf16")
    assert all(size % 512 == 0 for size in on_gpu.peak.by_category.values())
    assert on_gpu.peak.by_category[WORKSPACE] >= 2 * 32 * 2**20
    long = predict(TracedModel(WIDE, setting_of(), gpu_target("T4")), ((shape(1, 4096, 64),),))
    scores = WIDE.num_attention_heads * 4096 * 4096 * 4
    assert long.peak.bytes < scores


def test_joined_rows_on_a_gpu_need_no_more_than_one_long_row_but_for_tiles():
    """A mask of all tokens by all tokens, 64 MiB here, or keys and values spread over the heads of each row."""
    packed_rows, one_row = (
        predict(TracedModel(WIDE, setting_of(method="full", precision="bf16"), gpu_target("H100")), ((wanted,),))
        for wanted in (joined((64,) * 64, 64), shape(1, 4096, 64))
    )
    tiles = WIDE.num_attention_heads * 64 * 128 * (64 + 1) * 4
    assert abs(packed_rows.peak.bytes - one_row.peak.bytes) < tiles + 2**20


def test_a_storage_lives_until_its_last_reference():
    """Views counted as copies, or memory never freed."""
    trace = MemoryTrace(granularity_bytes=512, rules=OpRules(), vocab_size=-1)
    with FakeTensorMode(), trace.recording(), trace.phase("forward"):
        first = torch.empty(100, dtype=torch.float32)
        view = first[10:].view(9, 10)
        assert trace.current_bytes == 512
        second = view + 1
        assert trace.current_bytes == 1024
        del first
        assert trace.current_bytes == 1024
        del view, second
        assert trace.current_bytes == 0
    assert trace.peaks()["forward"].bytes == 1024


def test_a_step_that_reads_values_is_refused_in_one_line(monkeypatch):
    """A number made up where the trace could not follow."""

    def loss_that_looks(model, batch, **options):
        return summed_loss(model, batch, **options) * batch.input_ids_BT.sum().item()

    monkeypatch.setattr("lean_finetune.step.training_step.summed_loss", loss_that_looks)
    with pytest.raises(UserError, match="model.name: the step of llama reads values of tensors "):
        predicted()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "gib"),
    [
        ({"method": "full"}, 60.13),
        ({"method": "full", "grad_ckpt": True}, 59.85),
        ({"method": "lora", "grad_ckpt": True, "lora_rank": 16}, 18.89),
    ],
)
def test_llama_8b_takes_what_an_independent_prototype_found(setting, gib):
    """The step drifting from the figures this project was designed with, which have no cuBLAS workspaces."""
    setting = setting_of(precision="bf16", loss_chunk=None, **setting)
    found = predict(TracedModel(LLAMA_3_1_8B, setting, gpu_target("H100")), ((shape(1, 2048, 2047),),))
    assert (found.peak.bytes - 2 * 32 * 2**20) / 2**30 == pytest.approx(gib, abs=0.01)
