"""Traced steps replayed in the caching allocator, step by step."""

import pytest

from lean_finetune.core.units import readable_size
from lean_finetune.memory.allocator.caching_allocator import CachingAllocator
from lean_finetune.memory.allocator.replay import Replay, StepMemory, replay
from lean_finetune.memory.predict.peak import predict
from lean_finetune.memory.predict.peak_explanation import trace_origins
from tests.memory.common import gpu_target, llama, setting_of, shape

CONFIG = llama(hidden_size=256, intermediate_size=512, num_hidden_layers=1, vocab_size=1024)
STEPS = ((shape(2, 240, 300), shape(2, 256, 300)), (shape(4, 512, 1400),), (shape(1, 64, 30),))
SETTING = setting_of(method="qlora", precision="bf16", grad_ckpt=True, loss_chunk=256)
H100 = gpu_target("H100")


@pytest.fixture(scope="module")
def trace():
    return trace_origins(CONFIG, SETTING, STEPS, H100)


@pytest.mark.parametrize("expandable", [False, True])
def test_steps_have_the_counters_of_one_allocator_at_their_ends(trace, expandable):
    """A step's events counted in the next one, or its peak taken from another."""
    replayed = replay(trace, STEPS, expandable=expandable, capacity_bytes=None)
    starts = [trace.micro_batches[number][0] for number in (2, 3)]
    allocator, handles = CachingAllocator(expandable=expandable, capacity_bytes=None), {}
    reserved = []
    for place, (storage, change) in enumerate(trace.events):
        if place in starts:
            reserved.append(allocator.reserved_bytes)
        if change > 0:
            handles[storage] = allocator.allocate(trace.exact_bytes[storage])
        else:
            allocator.free(handles.pop(storage))
    assert [step.reserved_bytes for step in replayed.steps] == [*reserved, allocator.reserved_bytes]
    assert replayed.reserved_peak_bytes == allocator.peak_reserved_bytes
    assert replayed.out_of_memory is None and replayed.retries == 0
    allocated = [step.allocated_peak_bytes for step in replayed.steps]
    assert allocated[1] == max(allocated) > allocated[0] > allocated[2], "each step has its own peak"


def test_reserved_memory_of_a_phase_is_at_least_its_tensors(trace):
    """A phase reported with the reserved bytes of another."""
    replayed = replay(trace, STEPS, expandable=True, capacity_bytes=None)
    tensors = predict(CONFIG, SETTING, STEPS, H100)
    assert max(replayed.reserved_by_phase.values()) == replayed.reserved_peak_bytes
    for phase, peak in tensors.by_phase.items():
        assert peak.bytes <= replayed.reserved_by_phase[phase]


def test_out_of_memory_names_the_step_and_the_phase(trace):
    """A plan that fails in its second step reported as fitting, or as failing at once."""
    peaks = [step.reserved_peak_bytes for step in replay(trace, STEPS, expandable=True, capacity_bytes=None).steps]
    assert peaks[0] < peaks[1]
    found = replay(trace, STEPS, expandable=True, capacity_bytes=peaks[0])
    assert len(found.steps) == 1 and found.failed_phase in ("forward", "backward")
    assert str(found.out_of_memory).endswith(f"reserved of {readable_size(peaks[0])}")


@pytest.mark.parametrize(
    ("reserved", "settled"), [((42, 62, 62, 62), 1), ((62, 62), 0), ((40,), 0), ((), 0), ((10, 20, 30), 2)]
)
def test_the_settled_step_is_the_last_one_that_changes_reserved_memory(reserved, settled):
    """A plan watched to its end although reserved memory settled early."""
    steps = [
        StepMemory(allocated_peak_bytes=1, reserved_peak_bytes=size, reserved_bytes=size, retries=0)
        for size in reserved
    ]
    assert Replay(steps=tuple(steps), reserved_by_phase={}).settled_step == settled
