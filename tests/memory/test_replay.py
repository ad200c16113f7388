"""The replay of a plan: equal to a direct trace of it, event by event; refused where the traces do not tell."""

import random
from collections.abc import Sequence
from itertools import groupby, islice
from typing import Any

import pytest
from transformers import GemmaConfig, LlamaConfig, PretrainedConfig, Qwen2Config

from lean_finetune.core.units import MIB
from lean_finetune.memory.allocator.caching_allocator import CachingAllocator, OutOfMemory
from lean_finetune.memory.allocator.cut import NotAffine, Timeline, Unit
from lean_finetune.memory.allocator.replay import PlanPlayer, StepMemory, replay, stitched_events
from lean_finetune.memory.allocator.step_units import StepKind, step_units
from lean_finetune.memory.allocator.templates import RunModel, fit
from lean_finetune.memory.allocator.traced_runs import fit_run, kind_of
from lean_finetune.memory.predict.layer_structure import with_layers
from lean_finetune.memory.predict.peak_explanation import trace_origins
from tests.memory.common import gpu_target, joined, setting_of, shape
from tests.memory.recorder import record

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
LAYERS = 6
KIB = 1024
CHUNK = 64
PLAN = (
    (shape(10, 399, 299), shape(13, 256, 65), shape(50, 64, 400)),
    (shape(31, 123, 64),),
    (shape(31, 123, 64),),
)
"""One chunk of the loss to seven; as few tokens as the embedding's backward does not sort, and more."""
SHAPES = ((10, 399, 299), (13, 256, 65), (50, 64, 400), (31, 123, 64), (17, 200, 100), (3, 999, 222))
STEP_KIND = StepKind(loss_chunk=CHUNK, embedding_trained=False)
WORST = ((PLAN[0][0], PLAN[0][2]), (PLAN[1][0],))


def config_of(kind: type[PretrainedConfig] = LlamaConfig, layers: int = LAYERS, **values: Any) -> PretrainedConfig:
    sizes: dict[str, Any] = {**SIZES, "num_hidden_layers": layers, "vocab_size": 1024, **values}
    return kind(**sizes)


SINGLE_PLAN = ((PLAN[0][0],), (PLAN[0][1],))
JOINED_PLAN = (
    (joined((300, 200, 77, 9), 400), joined((123,) * 9, 65)),
    (joined((901, 33, 2), 200), joined((5,) * 900, 64)),
)


def case_of(
    *,
    gpu: str = "H100",
    kind: type[PretrainedConfig] = LlamaConfig,
    ties: bool = True,
    plan: Any = PLAN,
    depths: tuple[int, ...] = (3, 4, 5),
    **values: Any,
) -> Any:
    """A model of runs fitted to shallow traces, the plan's units, and its direct trace through every layer."""
    plain: dict[str, Any] = {"method": "qlora", "precision": "bf16", "grad_ckpt": True, "loss_chunk": CHUNK}
    values = plain | values
    setting, target = setting_of(**values), gpu_target(gpu)
    config = config_of(kind, depths[-1] + depths[1] - depths[0], tie_word_embeddings=ties)
    worst = WORST if plan is PLAN else plan[:1]
    shallow = [(depth, trace_origins(with_layers(config, depth), setting, worst, target)) for depth in depths]
    model = fit_run(config, setting, target, shallow, [batch for step in plan for batch in step])
    units = [step_units(step, kind_of(setting)) for step in plan]
    return model, units, record(config, setting, target, plan)


def canonical(events: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Storages numbered by birth; what is freed with no birth in between in order, since that order is no rule."""
    numbers: dict[int, int] = {}
    renamed = [(numbers.setdefault(storage, len(numbers)), change) for storage, change in events]
    runs = groupby(renamed, key=lambda event: event[1] > 0)
    return [event for born, run in runs for event in (run if born else sorted(run))]


CASES: dict[str, dict[str, Any]] = {
    "qlora": {"optimizer": "adamw_8bit"},
    "full": {"method": "full", "grad_ckpt": False},
    "full in backward": {"method": "full", "optimizer_in_backward": True, "max_grad_norm": None, "plan": SINGLE_PLAN},
}
SLOW_CASES: dict[str, dict[str, Any]] = {
    "lora without checkpoints": {"method": "lora", "grad_ckpt": False},
    "qlora without checkpoints": {"grad_ckpt": False, "loss_chunk": None},
    "full with checkpoints": {"method": "full", "optimizer": "adamw_8bit", "ties": False},
    "T4 lora": {"gpu": "T4", "method": "lora", "precision": "fp32", "loss_chunk": None},
    "T4 full": {"gpu": "T4", "method": "full", "precision": "fp32", "loss_chunk": None},
    "every other layer recomputed": {"method": "lora", "grad_ckpt_policy": "every_n", "depths": (4, 6, 8)},
    "Qwen2 qlora": {"kind": Qwen2Config, "ties": False},
    "Qwen2 full": {"kind": Qwen2Config, "method": "full", "loss_chunk": None},
    "Gemma lora": {"kind": GemmaConfig, "method": "lora"},
    "joined rows": {"method": "lora", "plan": JOINED_PLAN},
    "joined rows, full": {"method": "full", "plan": JOINED_PLAN},
    "Gemma full": {"kind": GemmaConfig, "method": "full", "grad_ckpt": False},
}


@pytest.fixture(scope="module")
def case():
    """A fitted model of runs, the plan's units, and the plan's direct trace."""
    return case_of(**CASES["qlora"])


def test_the_stitched_events_are_those_of_a_direct_trace(case):
    """A tensor stretched by the wrong figure, freed at the wrong moment, or left out; a layer or chunk too few."""
    model, steps, direct = case
    assert canonical(stitched_events(model, steps)) == canonical(direct.events)


@pytest.mark.parametrize(
    "values",
    [*(pytest.param(CASES[name], id=name) for name in ("full", "full in backward"))]
    + [pytest.param(values, id=name, marks=pytest.mark.slow) for name, values in SLOW_CASES.items()],
)
def test_so_they_are_in_other_settings_and_models(values):
    """The same, for what is trained, how it is recomputed, and whose layers they are."""
    model, steps, direct = case_of(**values)
    assert canonical(stitched_events(model, steps)) == canonical(direct.events)


@pytest.mark.parametrize("expandable", [False, True])
def test_the_replay_is_that_of_a_direct_trace_step_by_step(case, expandable):
    """Remembered outcomes that differ from playing the unit again; peaks of another step."""
    model, steps, direct = case
    found = replay(model, steps, expandable=expandable, capacity_bytes=None)
    allocator = CachingAllocator(expandable=expandable, capacity_bytes=None)
    starts = [start for start, unit in direct.units if unit.role == "first"]
    handles: dict[int, int] = {}
    for number, (start, end) in enumerate(zip([0, *starts[1:]], [*starts[1:], len(direct.events)], strict=True)):
        for place in range(start, end):
            if place == starts[number]:
                allocator.reset_peaks()
            storage, change = direct.events[place]
            if change > 0:
                handles[storage] = allocator.allocate(change)
            else:
                allocator.free(handles.pop(storage))
        step = found.steps[number]
        assert step.allocated_peak_bytes == allocator.peak_allocated_bytes
        assert (step.reserved_peak_bytes, step.reserved_bytes) == (allocator.peak_reserved_bytes,) * 2
    assert found.out_of_memory is None
    assert len(found.steps) == len(PLAN)


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("spare", [None, 1.0, 0.97])
def test_a_long_plan_is_played_as_one_allocator_plays_it(case, expandable, spare):
    """Looked up from a state that is not the same; pools apart although memory ends; unlike turns skipped."""
    model, _, _ = case
    chance = random.Random(3)
    shapes = [shape(rows, length, supervised) for rows, length, supervised in SHAPES]
    steps = [step_units(chance.choices(shapes, k=chance.randint(1, 3)), STEP_KIND) for _ in range(24)]
    capacity = None
    if spare is not None:
        free = replay(model, steps, expandable=expandable, capacity_bytes=None)
        capacity = int(max(step.reserved_peak_bytes for step in free.steps) * spare) - (spare == 1.0) * MIB
    found = replay(model, steps, expandable=expandable, capacity_bytes=capacity)
    plain, error = played_plainly(model, steps, expandable=expandable, capacity_bytes=capacity)
    assert list(found.steps) == plain
    assert str(found.out_of_memory) == str(error)
    player = PlanPlayer(model, expandable=expandable, capacity_bytes=None)
    for number in range(3 * len(steps)):
        player.step(steps[number % len(steps)])
        if number == 2 * len(steps) - 1:
            before = player.played_events
    assert player.played_events == before  # The second round ended as the first did: nothing is left to be played.


def played_plainly(model, steps, *, expandable, capacity_bytes):
    """One allocator, event by event."""
    allocator = CachingAllocator(expandable=expandable, capacity_bytes=capacity_bytes)
    events = iter(stitched_events(model, steps))
    handles: dict[int, int] = {}
    found: list[StepMemory] = []
    try:
        for _ in model.before_bytes:
            storage, change = next(events)
            handles[storage] = allocator.allocate(change)
        for units in steps:
            retries = allocator.retries
            allocator.reset_peaks()
            # Of a step that frees several units' tensors at one place, as many events.
            for storage, change in islice(events, sum(events_of(model, unit, units) for unit in units)):
                if change > 0:
                    handles[storage] = allocator.allocate(change)
                else:
                    allocator.free(handles.pop(storage))
            found.append(
                StepMemory(
                    allocated_peak_bytes=allocator.peak_allocated_bytes,
                    reserved_peak_bytes=allocator.peak_reserved_bytes,
                    reserved_bytes=allocator.reserved_bytes,
                    retries=allocator.retries - retries,
                )
            )
    except OutOfMemory as error:
        return found, error
    return found, None


def events_of(model, unit, units) -> int:
    """How many events a unit has; an update frees what every later micro-batch left."""
    events = model.template(unit).events
    counts = {"first": 1, "later": len(units) - 2, "update": 1}
    own = sum(action >= -1 for action in events.actions)
    return own + sum(counts[role] for role, _ in events.foreign)


def test_the_step_that_runs_out_of_memory_is_told(case):
    """A plan that dies in its second step reported as fitting, or as dying at once."""
    model, steps, _ = case
    big = step_units([shape(60, 400, 640)], StepKind(loss_chunk=CHUNK, embedding_trained=False))
    steps = [steps[1], big, steps[1]]
    peaks = [step.reserved_peak_bytes for step in replay(model, steps, expandable=True, capacity_bytes=None).steps]
    assert peaks[0] < peaks[1]
    found = replay(model, steps, expandable=True, capacity_bytes=peaks[0])
    assert len(found.steps) == 1
    assert found.out_of_memory is not None
    assert found.out_of_memory.capacity_bytes == peaks[0]


def test_a_kind_of_unit_that_was_not_traced_is_refused(case):
    """Three tokens replayed as three thousand, which another kernel multiplies."""
    model, _, _ = case
    steps = [step_units([shape(1, 3, 2)], StepKind(loss_chunk=CHUNK, embedding_trained=False))]
    with pytest.raises(NotAffine, match="no first unit of kind 'few tokens' was traced"):
        replay(model, steps, expandable=False, capacity_bytes=None)


def unit(role: str = "first", **figures: int) -> Unit:
    return Unit(role=role, kind=None, figures=figures)  # type: ignore[arg-type]


def line(*units: tuple[Unit, Sequence[tuple[int, int]]]) -> Timeline:
    """A timeline of 1 KiB that exists before the first step, and these units."""
    events: list[tuple[int, int]] = [(-1, KIB)]
    marks = []
    for number, (made, changes) in enumerate(units):
        marks.append((len(events), made))
        events += [(100 * number + storage, change) for storage, change in changes]
    return Timeline(events=tuple(events), units=tuple(marks))


def held(size_of) -> RunModel:
    """Fitted to one tensor of `size_of(tokens, rows)` bytes in five shapes."""
    shapes = [(10, 1), (20, 5), (35, 2), (70, 4), (64, 8)]
    return fit([line((unit(tokens=t, rows=r), [(0, size_of(t, r)), (0, -size_of(t, r))])) for t, r in shapes])


def test_sizes_of_two_figures_are_found_exactly():
    """A slope rounded, or a second figure ignored."""
    model = held(lambda tokens, rows: 12 + 7 * tokens + 100 * rows)
    assert stitched_events(model, [[unit(tokens=1000, rows=3)]]) == [(0, KIB), (1, 7312), (1, -7312)]


def test_sizes_that_are_no_such_sum_are_refused():
    """A square fitted by a line."""
    with pytest.raises(NotAffine, match="birth 0 of first units of kind None: .* bytes are no sum of figures"):
        held(lambda tokens, rows: tokens * tokens)


def test_too_few_shapes_to_check_a_sum_are_refused():
    """Two points taken for the proof of a line."""
    with pytest.raises(NotAffine, match="no sum of figures of its 2 shapes"):
        fit([line((unit(tokens=t), [(0, 8 + 4 * t)])) for t in (10, 20)])


def test_figures_that_went_together_must_go_on_so():
    """Rows never varied, or tokens always three times the rows: which of them a tensor grows with is not known."""
    constant = fit([line((unit(tokens=t, rows=2), [(0, 4 * t)])) for t in (10, 20, 40)])
    with pytest.raises(NotAffine, match="rows was constant in all traces of first units"):
        stitched_events(constant, [[unit(tokens=10, rows=3)]])
    tied = fit([line((unit(tokens=3 * r, rows=r), [(0, 12 * r)])) for r in (1, 2, 4)])
    assert stitched_events(tied, [[unit(tokens=30, rows=10)]])[1] == (1, 120)
    with pytest.raises(NotAffine, match="tokens was tied to rows"):
        stitched_events(tied, [[unit(tokens=31, rows=10)]])


def test_another_order_of_events_is_refused():
    """A kernel that only long batches take, averaged with the other."""
    short = line((unit(tokens=10), [(0, 40), (1, 40), (0, -40)]))
    long = line((unit(tokens=20), [(0, 80), (0, -80), (1, 80)]))
    with pytest.raises(NotAffine, match="make or free tensors in different orders"):
        fit([short, long])


def test_a_step_that_frees_the_state_is_refused():
    """A weight given back in a step, and then allocated for ever."""
    with pytest.raises(NotAffine, match="frees what existed before the first step"):
        fit([Timeline(events=((0, 8), (0, -8)), units=((1, unit(tokens=1)),))])


def test_it_is_told_from_which_step_on_nothing_more_is_reserved():
    """A plan watched to its end although the staircase ended early."""
    model = held(lambda tokens, rows: MIB * tokens)
    steps = [[unit(tokens=tokens, rows=1)] for tokens in (30, 50, 50, 40, 20)]
    found = replay(model, steps, expandable=True, capacity_bytes=None)
    assert [step.reserved_bytes // MIB for step in found.steps] == [42, 62, 62, 62, 62]
    assert found.settled_step == 1
