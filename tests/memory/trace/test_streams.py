"""Streams of FSDP2: which blocks the caching allocator keeps apart on a GPU."""

from dataclasses import replace

from lean_finetune.memory.advice.plan_memory import replay
from lean_finetune.memory.predict.deep_events import NONE, StepEvents, step_events
from lean_finetune.memory.predict.traced_step import TracedModel
from tests.memory.common import gpu_target, llama, setting_of, shape

CONFIG = llama(hidden_size=256, intermediate_size=1024, num_hidden_layers=3, dtype="bfloat16")
LAYER_BYTES = 2 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 1024 + 2 * 256)
"""16-bit weights of attention, MLP and two norms."""
STEPS = ((shape(1, 64, 63),),)


def events_of_zero3() -> StepEvents:
    setting = setting_of(method="full", precision="bf16", sharding="zero3", gpus=2)
    return step_events(TracedModel(CONFIG, setting, gpu_target("A100-80GB")), STEPS)[0]


def live_bytes(events: StepEvents, stream: int, size: int) -> dict[str, int]:
    """The most bytes of blocks of a size that live at once on a stream, by phase."""
    most: dict[str, int] = {}
    live = 0
    for place, (target, of, bytes_) in enumerate(zip(events.target_E, events.stream_E, events.size_E, strict=True)):
        if of == stream and bytes_ == size:
            live += size if target == NONE else -size
        for start, end, phase in events.phases:
            if start <= place < end:
                most[phase] = max(most.get(phase, 0), live)
    return most


def test_buffers_that_streams_keep_alive_are_traced():
    """A prediction without the buffers that overlap communication with computing."""
    events = events_of_zero3()
    _, gather, _ = sorted({*events.stream_E.tolist()})
    assert live_bytes(events, gather, LAYER_BYTES)["forward"] == 2 * LAYER_BYTES  # The next is gathered, the last kept.
    assert live_bytes(events, gather, LAYER_BYTES)["backward"] == LAYER_BYTES  # That of the layer to come.


def test_gathered_layers_and_reduced_gradients_have_streams_of_their_own():
    """Reserved memory of a sharded run predicted as if its communication reused the blocks that computing frees."""
    events = events_of_zero3()
    compute, gather, reduce = sorted({*events.stream_E.tolist()})  # In the order of their first use.
    assert compute == 0
    sent = events.size_E[(events.stream_E == reduce) & (events.target_E == NONE)]
    gathers = sorted(events.size_E[(events.stream_E == gather) & (events.target_E == NONE)].tolist())
    assert LAYER_BYTES in gathers
    assert LAYER_BYTES // 2 in sent.tolist()
    apart, together = (
        replay(one, STEPS, expandable=False, capacity_bytes=None).reserved_peak_bytes
        for one in (events, replace(events, stream_E=0 * events.stream_E))
    )
    assert apart > together
