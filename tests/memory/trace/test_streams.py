"""Streams of FSDP2: which blocks the caching allocator keeps apart on a GPU."""

from dataclasses import replace

from lean_finetune.memory.advice.plan_memory import replay
from lean_finetune.memory.predict.deep_events import NONE, step_events
from lean_finetune.memory.predict.traced_step import TracedModel
from tests.memory.common import gpu_target, llama, setting_of, shape


def test_gathered_layers_and_reduced_gradients_have_streams_of_their_own():
    """Reserved memory of a sharded run predicted as if its communication reused the blocks that computing frees."""
    config = llama(hidden_size=256, intermediate_size=1024, dtype="bfloat16")
    setting = setting_of(method="full", precision="bf16", sharding="zero3", gpus=2)
    steps = ((shape(1, 64, 63),),)
    events, _ = step_events(TracedModel(config, setting, gpu_target("A100-80GB")), steps)
    compute, gather, reduce = sorted({*events.stream_E.tolist()})  # In the order of their first use.
    assert compute == 0
    sent = events.size_E[(events.stream_E == reduce) & (events.target_E == NONE)]
    layer = 2 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 1024)  # 16-bit weights of attention and MLP.
    gathers = sorted(events.size_E[(events.stream_E == gather) & (events.target_E == NONE)].tolist())
    assert layer in [size - 2 * 2 * 256 for size in gathers]  # With two norms.
    assert layer // 2 in [size - 2 * 256 for size in sent.tolist()]
    apart, together = (
        replay(one, steps, expandable=False, capacity_bytes=None).reserved_peak_bytes
        for one in (events, replace(events, stream_E=0 * events.stream_E))
    )
    assert apart > together
