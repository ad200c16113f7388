"""Reserved memory of a plan: steps sampled, replayed, and compared with the device."""

from dataclasses import replace

import numpy as np
import pytest

from cuda_memory.gpus import context_of
from cuda_memory.units import GIB, MIB, readable_size
from lean_finetune.config.optimizers import OPTIMIZERS
from lean_finetune.memory.advice.plan_memory import (
    MAX_MICRO_BATCHES,
    MIN_MICRO_BATCHES,
    PlanMemory,
    replay,
    replay_plan,
    replay_steps,
    sample_steps,
)
from lean_finetune.memory.advice.verdict import judge, other_segments
from lean_finetune.memory.predict.deep_events import step_events
from lean_finetune.memory.predict.peak import predict
from lean_finetune.memory.predict.traced_step import TracedModel, traced_steps
from lean_finetune.step.batches import BatchShape
from tests.memory.common import card, gpu_target, llama, plan_of, setting_of, shape
from tests.plan.common import batch_settings_of, index_of
from tests.plan.common import plan_of as full_plan

CONFIG = llama(hidden_size=256, intermediate_size=512, vocab_size=1024)
SETTING = setting_of(method="lora", precision="bf16", loss_chunk=256)
PLAN = plan_of([[(4, 600, 900), (6, 400, 700)], [(3, 800, 2000)], [(20, 64, 100), (8, 296, 512)], [(4, 600, 900)]])
LENGTHS = np.full(20, 64, np.int32)
H100 = gpu_target("H100")
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def prediction():
    steps = traced_steps(PLAN, LENGTHS, tiled=True, windowed=False)
    return predict(TracedModel(CONFIG, SETTING, H100), steps)


CONTEXT = context_of((8, 0))


def replayed(prediction, *, setting=SETTING, capacity_bytes=80 * GIB) -> tuple[PlanMemory | None, str]:
    device = card(capacity_bytes)
    return replay_plan(PLAN, LENGTHS, TracedModel(CONFIG, setting, H100), prediction, expandable=False, device=device)


def reserved_bytes(memory: PlanMemory, kind: str) -> int:
    return memory.unlimited[kind].reserved_peak_bytes


@pytest.fixture(scope="module")
def memory(prediction) -> PlanMemory:
    found, description = replayed(prediction)
    assert found is not None and description == "all 4 steps replayed"
    return found


def test_the_replayed_tensors_are_those_of_the_prediction(memory, prediction):
    """Two predictions of one run that disagree."""
    steps = memory.unlimited["expandable"].steps
    assert max(step.allocated_peak_bytes for step in steps) == prediction.peak.bytes
    assert reserved_bytes(memory, "native") >= reserved_bytes(memory, "expandable") >= prediction.peak.bytes


STEPS = ((shape(2, 240, 300), shape(2, 256, 300)), (shape(4, 512, 1400),), (shape(1, 64, 30),))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_repeated_step_holds_what_the_first_one_holds(optimizer: str):
    """A tensor that a step replaces, as Adafactor's moments, which the next round would free once more."""
    setting = setting_of(method="full", precision="bf16", loss_chunk=256, optimizer=optimizer)
    steps = STEPS[:1]
    events, _ = step_events(TracedModel(CONFIG, setting, H100), steps)
    found = replay(events, steps, expandable=True, capacity_bytes=None, rounds=3)
    assert len({step.allocated_peak_bytes for step in found.steps}) == 1
    assert found.steps[1].reserved_bytes == found.steps[2].reserved_bytes


@pytest.fixture(scope="module")
def events():
    return step_events(TracedModel(CONFIG, SETTING, H100), STEPS)[0]


@pytest.mark.parametrize("expandable", [False, True])
def test_every_step_has_its_own_peaks(events, expandable):
    """A step's events counted in the next one, or the reserved bytes of a phase taken from another."""
    replayed = replay(events, STEPS, expandable=expandable, capacity_bytes=None)
    allocated = [step.allocated_peak_bytes for step in replayed.steps]
    assert allocated[1] == max(allocated) > allocated[0] > allocated[2]
    reserved = [step.reserved_bytes for step in replayed.steps]
    assert reserved[0] < reserved[1] == reserved[2] == replayed.reserved_peak_bytes
    assert replayed.out_of_memory is None and replayed.retries == 0 and replayed.settled_step == 1
    assert max(replayed.reserved_by_phase.values()) == replayed.reserved_peak_bytes
    for phase, peak in predict(TracedModel(CONFIG, SETTING, H100), STEPS).by_phase.items():
        assert peak.bytes <= replayed.reserved_by_phase[phase]


def test_out_of_memory_names_the_step_and_the_phase(events):
    """A plan that fails in its second step reported as fitting, or as failing in its first."""
    first = replay(events, STEPS, expandable=True, capacity_bytes=None).steps[0].reserved_peak_bytes
    found = replay(events, STEPS, expandable=True, capacity_bytes=first)
    assert len(found.steps) == 1 and found.failed_phase in ("forward", "backward")
    assert str(found.out_of_memory).endswith(f"reserved of {readable_size(first)}")


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0)])
def test_memory_for_blocks_ends_where_the_cuda_context_may_begin(events, capability):
    """Blocks predicted to fit in memory that the CUDA context of the GPU's generation takes."""
    device = card(80 * GIB, capability=capability)
    unlimited = replay_steps(events, STEPS, expandable=True, device=device)
    needed = reserved_bytes(unlimited, "expandable") + context_of(capability).max_bytes
    enough, short = (
        replay_steps(events, STEPS, expandable=True, device=replace(device, memory_bytes=size)).limited["expandable"]
        for size in (needed, needed - 2 * MIB)
    )
    assert enough.out_of_memory is None and enough.retries == 0
    assert short.out_of_memory is not None or short.retries > 0


def verdict_on(memory: PlanMemory, prediction, capacity_bytes: int):
    other = other_segments(memory, prediction)
    return judge(prediction, card(capacity_bytes), other, headroom_percent=0.0, enforce=True, memory=memory)


def test_a_run_whose_blocks_do_not_fit_is_refused_at_its_step(memory, prediction):
    """A run predicted to fit that fails at a step which needs blocks of other sizes."""
    capacity = prediction.peak.bytes + CONTEXT.max_bytes
    found, _ = replayed(prediction, capacity_bytes=capacity)
    assert found is not None
    step = found.failing_step("native")
    assert step is not None and len(found.limited["native"].steps) == step
    assert found.tiers()["native"]["out_of_memory"].startswith(f"optimizer step {step}, ")
    refusal = str(verdict_on(found, prediction, capacity).refusal)
    assert f"out of memory at optimizer step {step} (" in refusal and refusal.endswith("lower bucket.max_tokens")
    expandable_fits = replace(found, limited={**found.limited, "expandable": memory.limited["expandable"]})
    refusal = str(verdict_on(expandable_fits, prediction, capacity).refusal)
    assert "; would fit: -S train.expandable_segments=true (" in refusal
    expandable = replace(expandable_fits, chosen="expandable")
    assert verdict_on(expandable, prediction, capacity).state == "fits" and not other_segments(expandable, prediction)
    metrics = expandable.metrics()
    assert metrics["out_of_memory_step"] is None and metrics["out_of_memory_step_native"] == step


def test_a_run_with_retries_and_no_failure_fits(memory, prediction):
    """A run refused for reserved bytes although the allocator releases cached blocks in time."""
    for spare in range(1, 64):
        capacity = reserved_bytes(memory, "native") + CONTEXT.max_bytes - 2 * spare * MIB
        found, _ = replayed(prediction, capacity_bytes=capacity)
        assert found is not None
        if found.failing_step("native") is None:
            assert found.metrics()["retries_predicted_native"] > 0
            assert verdict_on(found, prediction, capacity).state == "fits"
            return
    pytest.fail("no capacity was enough with retries")


def test_a_refusal_names_the_step_whose_tensors_do_not_fit(memory, prediction):
    """A refusal that does not say when the run would fail."""
    step = memory.first_step_above(prediction.peak.bytes - 1)
    assert step == 0 and memory.first_step_above(2 * prediction.peak.bytes) is None
    refusal = verdict_on(memory, prediction, prediction.peak.bytes - 1).refusal
    assert refusal is not None and "micro-batch of 6 rows of 400 tokens, at optimizer step 0) exceeds" in refusal


def random_plan(rows: int, *, mode: str = "bucketed"):
    lengths = np.random.default_rng(5).integers(24, 700, rows)
    return full_plan(index_of(lengths), batch_settings_of(mode=mode, max_tokens=4096), tokens_per_step=4500), lengths


@pytest.mark.parametrize(("layers", "most"), [(4, MAX_MICRO_BATCHES), (32, 4), (80, MIN_MICRO_BATCHES)])
@pytest.mark.parametrize("later", [False, True])
def test_a_sample_of_a_long_plan_has_its_first_micro_batch_and_the_peak(layers, most, later):
    """An estimate that takes hours, or one that misses the micro-batch that sets the peak."""
    plan, lengths = random_plan(3000)
    shapes = [[BatchShape.of(one, lengths) for one in step] for step in plan.steps]
    middle = len(shapes) // 2
    start, peak = shapes[0][0], shapes[middle][1 if later else 0]
    sampled = sample_steps(plan, lengths, ((start, peak),) if later else ((start,), (peak,)), layers=layers)
    assert list(sampled) == sorted(sampled) and sampled[0][0] == start
    assert sampled[middle][: 2 if later else 1] == tuple(shapes[middle][: 2 if later else 1])
    assert sum(map(len, sampled.values())) <= most + 1
    if layers == 4:
        assert len(sampled[0]) > 1 and len(sampled) >= 4 and max(sampled) == len(shapes) - 1
    for number, step in sampled.items():
        assert step[0] == shapes[number][0] and set(step) <= set(shapes[number])


def test_several_gpus_are_not_replayed_and_say_so(prediction):
    """Reserved memory of a few micro-batches reported as that of the plan."""
    found, description = replayed(prediction, setting=replace(SETTING.with_train(sharding="ddp"), gpus=2))
    assert found is None and description.startswith("worst micro-batches only: several GPUs share the steps")


@pytest.mark.parametrize(
    ("rows", "mode"),
    [(36, "bucketed"), pytest.param(36, "packed", marks=SLOW), pytest.param(300, "bucketed", marks=SLOW)],
)
def test_reserved_memory_of_a_plan_settles_in_its_first_step(rows, mode):
    """Memory that grows during a run, which then fails hours after its start."""
    plan, lengths = random_plan(rows, mode=mode)
    steps = traced_steps(plan, lengths, tiled=True, windowed=False)
    predicted = predict(TracedModel(CONFIG, SETTING, H100), steps)
    found, description = replay_plan(
        plan, lengths, TracedModel(CONFIG, SETTING, H100), predicted, expandable=True, device=card(80 * GIB)
    )
    assert found is not None and len(found.steps) >= 3, description
    sampled = f" of {len(plan)} micro-batches in {len(found.steps)} of {len(plan.steps)} steps replayed: "
    assert f"all {len(plan.steps)} steps replayed" == description if rows == 36 else sampled in description
    for kind, steps_of_kind in found.unlimited.items():
        reserved = [step.reserved_bytes for step in steps_of_kind.steps]
        assert max(reserved) - reserved[0] <= 20 * MIB, f"{kind}: one large segment at most"
        assert len({step.allocated_peak_bytes for step in steps_of_kind.steps}) >= 3, "although steps differ"
