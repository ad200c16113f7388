"""Reserved and process memory above the tensors', by playing the traced steps to the allocator."""

import pytest
from transformers import LlamaConfig

from lean_finetune.core.units import GIB
from lean_finetune.memory.allocator.reserved_memory import reserve, tiers
from lean_finetune.memory.gpus import context_of
from lean_finetune.memory.predict.peak import predict
from lean_finetune.memory.predict.peak_explanation import trace_origins
from tests.memory.common import gpu_target, setting_of, shape

CONFIG = LlamaConfig(
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=8192,
    tie_word_embeddings=False,
)
STEPS = ((shape(2, 512, 700), shape(4, 240, 600)),)
SETTING = setting_of(method="qlora", precision="bf16", grad_ckpt=True, loss_chunk=256)


@pytest.fixture(scope="module")
def trace():
    return trace_origins(CONFIG, SETTING, STEPS, gpu_target("H100"))


def test_each_tier_holds_the_one_below(trace):
    """A process predicted to take less than its tensors."""
    tensors, context = predict(CONFIG, SETTING, STEPS, gpu_target("H100")), context_of((9, 0))
    for found in tiers(trace, 80 * GIB, context).values():
        assert tensors.peak.bytes <= found["reserved_bytes"] < found["process_bytes"]
        assert found["process_bytes"] == found["reserved_bytes"] + context.bytes
        assert found["process_margin_bytes"] == context.margin_bytes > 0
        assert max(found["reserved_by_phase"].values()) == found["reserved_bytes"]
        for phase, peak in tensors.by_phase.items():
            assert peak.bytes <= found["reserved_by_phase"][phase]
        assert (found["retries"], found["out_of_memory"]) == (0, None)


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0)])
def test_memory_ends_where_the_context_of_the_generation_begins(trace, capability):
    """Blocks told to fit in memory that the context of a newer GPU, or the most that it may take, has filled."""
    context = context_of(capability)
    reserved_bytes = reserve(trace, expandable=True, capacity_bytes=None).peak_bytes
    assert reserved_bytes is not None
    needed = reserved_bytes + context.max_bytes
    fits, fails = (tiers(trace, capacity, context)["expandable"] for capacity in (needed, needed - 2**21))
    assert fits["out_of_memory"] is None and fits["retries"] == 0
    assert fails["out_of_memory"] is not None or fails["retries"] > 0


def test_a_limit_below_the_tensors_ends_in_a_phase_that_is_named(trace):
    """A run said to fit whose tensors do not; or an end that nobody can find."""
    free = reserve(trace, expandable=True, capacity_bytes=None)
    held = predict(CONFIG, SETTING, STEPS, gpu_target("H100")).peak.bytes
    found = reserve(trace, expandable=True, capacity_bytes=held - 2**20)
    assert found.peak_bytes is None
    assert found.out_of_memory is not None
    assert found.out_of_memory.startswith(("forward, micro-batch", "backward, micro-batch"))
    assert free.peak_bytes is not None and free.out_of_memory is None


def test_a_tight_limit_costs_retries_first(trace):
    """Cached blocks that are given back in time, taken for an end."""
    free = reserve(trace, expandable=False, capacity_bytes=None)
    assert free.peak_bytes is not None
    found = reserve(trace, expandable=False, capacity_bytes=free.peak_bytes - 2**20)
    assert found.retries >= 1
