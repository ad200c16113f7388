"""What-ifs of a recording: other settings, other orders of steps, smaller cards."""

from dataclasses import replace

import pytest

from cuda_memory import what_if as what_if_module
from cuda_memory.recording import Annotation, Event, Frame, Recording
from cuda_memory.steps import NoSteps, largest_first, step_ends
from cuda_memory.units import MIB
from cuda_memory.what_if import first_failure, requests_of, what_if
from lean_finetune.core.errors import UserError
from tests.cuda_memory.recorded import Recorder, random_recording

FORWARD, OPTIMIZER = (Frame("model.py", 7, "forward"),), (Frame("torch/optim/adamw.py", 100, "step"),)
STACKS = (FORWARD, OPTIMIZER)


def outcomes(recording: Recording) -> dict[str, int]:
    return {outcome.name: outcome.peak_reserved_bytes // MIB for outcome in what_if(recording).outcomes}


def training(lengths_mib: tuple[int, ...]) -> Recorder:
    """Steps that allocate three activations, free them, and keep gradients until the next step begins."""
    recorder = Recorder(expandable=False)
    recorder.begin()
    gradients = None
    for length in lengths_mib:
        if gradients is not None:
            recorder.free(gradients)
        activations = [recorder.allocate(length * MIB, stack=0) for _ in range(3)]
        gradients = recorder.allocate(40 * MIB, stack=0)
        for activation in activations:
            recorder.free(activation)
        recorder.free(recorder.allocate(2 * MIB, stack=1))
    return recorder


def test_growing_batches_fragment_and_sorting_or_expanding_helps():
    """Each larger batch finds only smaller blocks: the reason for sorting by length."""
    recording = training((24, 40, 60, 84)).recording(STACKS)
    found = outcomes(recording)
    assert found["as recorded"] == found["expandable_segments:False"]
    assert found["largest steps first"] < found["as recorded"]
    assert found["expandable_segments:True"] < found["as recorded"]
    assert found["cache emptied after each step"] < found["as recorded"]


def test_steps_end_with_the_optimizer():
    recording = training((24, 24, 24)).recording(STACKS)
    ends = step_ends(recording)
    assert [recording.events[end - 1].stack for end in ends] == [1, 1, 1]


def test_steps_end_with_annotations():
    plain = training((24, 24)).recording()
    events = tuple(replace(event, time_us=10 * place) for place, event in enumerate(plain.events))
    marks = tuple(
        Annotation(name="Optimizer.step#AdamW.step", stage="END" if time in (75, 155) else "START", time_us=time)
        for time in (51, 75, 151, 155)
    )
    assert step_ends(replace(plain, events=events, annotations=marks)) == [8, 16]


def test_steps_that_are_not_known_are_named():
    recording = training((24, 40)).recording()
    found = what_if(replace(recording, events=tuple(replace(event, stack=None) for event in recording.events)))
    assert found.not_replayed == tuple(
        f"{name}: steps cannot be compared: the recording has neither stacks nor annotations, and two are needed"
        for name in ("cache emptied after each step", "largest steps first")
    )


def test_sorted_steps_allocate_and_free_the_same():
    """A free lost in the new order would be a leak, and one too many would crash the replay."""
    recording = training((24, 40, 84, 60)).recording(STACKS)
    events = largest_first(recording)

    def counts(found):
        return sorted((event.action, event.bytes) for event in found if event.action in ("alloc", "free_completed"))

    assert counts(events) == counts(recording.events)
    allocated = [event.bytes // MIB for event in events if event.action == "alloc" and event.bytes > 40 * MIB]
    assert allocated == [84] * 3 + [60] * 3


def test_sorting_equal_steps_changes_nothing():
    """Gradients of equal size, freed in another order than that of their allocation, would swap their places."""
    recorder = Recorder(expandable=False)
    recorder.begin()
    gradients: list[int] = []
    for _ in range(4):
        for gradient in reversed(gradients):
            recorder.free(gradient)
        gradients = [recorder.allocate(count * MIB, stack=0) for count in (4, 9, 4, 7, 4)]
        recorder.free(recorder.allocate(2 * MIB, stack=1))
    found = outcomes(recorder.recording(STACKS))
    assert found["largest steps first"] == found["as recorded"]


def test_a_step_that_frees_what_no_other_leaves_is_not_sorted():
    recorder = training((24, 40))
    extra = recorder.allocate(7 * MIB, stack=0)
    recorder.allocate(2 * MIB, stack=1)
    recorder.allocate(100 * MIB, stack=0)
    recorder.free(extra)
    recorder.allocate(2 * MIB, stack=1)
    with pytest.raises(NoSteps, match="frees a tensor of a size that no other step leaves"):
        largest_first(recorder.recording(STACKS))


def test_the_request_that_fails_on_a_smaller_card():
    """The number of the request, so that its stack can be shown."""
    recording = training((24, 40)).recording(STACKS)
    found = first_failure(recording, 130 * MIB, expandable=False)
    assert found.failed_event is not None and recording.events[found.failed_event].bytes == 40 * MIB
    assert found.why is not None and "40 MiB requested" in found.why
    assert first_failure(recording, 400 * MIB, expandable=False).why is None


def test_the_smallest_card_is_the_first_that_serves_every_request():
    """A card between allocated and reserved memory serves the run if releasing cached memory is enough."""
    recorder = Recorder(expandable=False)
    recorder.begin()
    for count in (3000, 3500, 4000):
        recorder.free(recorder.allocate(count * MIB))
    found = what_if(recorder.recording())
    assert found.outcomes[0].peak_reserved_bytes == 10500 * MIB
    fixed, expandable = found.smallest_gpus["fixed"], found.smallest_gpus["expandable"]
    assert fixed is not None and fixed == expandable and fixed.memory_bytes < 10500 * MIB


def test_memory_released_by_the_program_is_released_again_and_retries_are_not():
    """torch.cuda.empty_cache belongs to the program; a release for want of memory does not happen with more of it."""
    recorder = Recorder(expandable=False, capacity_bytes=100 * MIB)
    recorder.begin()
    recorder.free(recorder.allocate(60 * MIB, stack=0))
    recorder.free(recorder.allocate(80 * MIB, stack=0))
    recorder.empty_cache()
    recorder.allocate(70 * MIB, stack=0)
    recording = recorder.recording(STACKS)
    assert len(requests_of(recording).emptied) == 1
    assert outcomes(recording)["expandable_segments:False"] == 140
    assert what_if(recording).outcomes[0].peak_reserved_bytes == 80 * MIB


@pytest.mark.parametrize("expandable", [False, True])
def test_any_recording_has_answers(expandable):
    recording = random_recording(5, expandable=expandable, streams=2).recording()
    found = what_if(recording)
    assert found.outcomes[0].peak_reserved_bytes > 0 and found.begins_anew
    assert all(o.why is None and o.peak_reserved_bytes >= o.peak_allocated_bytes for o in found.outcomes)


def test_too_much_work_is_refused(monkeypatch):
    """A file of 1 MB, with a few thousand segments that are reserved and released, kept the command busy for hours."""
    events = [Event(action=action, address=0, bytes=2 * MIB) for action in ("segment_alloc", "segment_free")] * 2
    recording = Recording(name="r.pickle", events=tuple(events))
    assert what_if(recording).outcomes
    monkeypatch.setattr(what_if_module, "MOST_WORK", 1)
    with pytest.raises(UserError, match="r.pickle: too many segments .*up to event 2"):
        what_if(recording)
