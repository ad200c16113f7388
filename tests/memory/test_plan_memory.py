"""What a whole plan reserves: equal to what its micro-batches were predicted to hold, and a reason where it is not."""

from dataclasses import replace

import numpy as np
import pytest
from transformers import LlamaConfig

from lean_finetune.core.units import GIB, MIB
from lean_finetune.memory.advice.verdict import judge
from lean_finetune.memory.advice.verdict_with_advice import other_segments
from lean_finetune.memory.allocator import plan_memory as module
from lean_finetune.memory.allocator.plan_memory import PlanMemory, replay_plan
from lean_finetune.memory.gpus import Device, context_of
from lean_finetune.memory.predict.peak_breakdown import predict_explained
from lean_finetune.memory.predict.traced_shapes import traced_steps
from tests.memory.common import gpu_target, plan_of, setting_of
from tests.plan.common import cutting_of, index_of
from tests.plan.common import plan_of as cut_plan

CONFIG = LlamaConfig(
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=13,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=1024,
    tie_word_embeddings=False,
)
SETTING = setting_of(method="lora", precision="bf16", loss_chunk=256)
PLAN = plan_of([[(4, 600, 900), (6, 400, 700)], [(3, 800, 2000)], [(20, 64, 100), (8, 296, 512)], [(4, 600, 900)]])
LENGTHS = np.full(20, 64, np.int32)
H100 = gpu_target("H100")


@pytest.fixture(scope="module")
def prediction():
    steps = traced_steps(PLAN, LENGTHS, tiled=True, windowed=False)
    return predict_explained(CONFIG, SETTING, steps, H100)[0]


def card(memory_bytes: int) -> Device:
    return Device(name="card", kind="cuda", memory_bytes=memory_bytes, compute_capability=(9, 0))


CONTEXT = context_of((9, 0))


def played(
    prediction, *, plan=PLAN, setting=SETTING, target=H100, windowed=False, expandable=False, capacity_bytes=80 * GIB
):
    return replay_plan(
        plan,
        LENGTHS,
        CONFIG,
        setting,
        target,
        prediction,
        windowed=windowed,
        expandable=expandable,
        device=card(capacity_bytes),
    )


@pytest.fixture(scope="module")
def memory(prediction) -> PlanMemory:
    found, told = played(prediction)
    assert found is not None and told == "all 4 steps replayed"
    return found


def test_the_replayed_tensors_are_those_of_the_prediction(memory, prediction):
    """Two predictions of one run that disagree: here they come from other shapes and other code."""
    assert prediction.shallow, prediction.layers_traced
    steps = memory.unlimited["expandable"].steps
    assert max(step.allocated_peak_bytes for step in steps) == prediction.peak.bytes
    assert memory.reserved_bytes("native") >= memory.reserved_bytes("expandable") >= prediction.peak.bytes


def test_every_step_has_a_row_and_the_metrics_are_their_maximum(memory):
    """A staircase whose top is not the figure that is told."""
    rows = memory.rows()
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    told = memory.metrics()
    for column, name in (("reserved_gib", "_native"), ("reserved_expandable_gib", "_expandable")):
        highest = max(row[column] for row in rows)
        assert highest == pytest.approx(told[f"reserved_bytes_predicted{name}"] / GIB, abs=1e-6)
        assert told[f"retries_predicted{name}"] == 0 and told[f"out_of_memory_step{name}"] is None


def judged(memory: PlanMemory, prediction, capacity_bytes: int):
    other = other_segments(memory, prediction)
    return judge(prediction, card(capacity_bytes), other, headroom_percent=0.0, enforce=True, memory=memory)


def test_a_run_whose_blocks_do_not_fit_is_refused_at_its_step(memory, prediction):
    """A run that is told to fit and dies at the step that needs another kind of blocks."""
    capacity = prediction.peak.bytes + CONTEXT.max_bytes
    found, _ = played(prediction, capacity_bytes=capacity)
    assert found is not None
    step = found.failing_step("native")
    assert step is not None and len(found.limited["native"].steps) == step
    refusal = judged(found, prediction, capacity).refusal
    assert refusal is not None and f"out of memory at optimizer step {step} (" in refusal
    assert refusal.endswith("lower bucket.max_tokens")
    eased = replace(found, limited={**found.limited, "expandable": memory.limited["expandable"]})
    refusal = judged(eased, prediction, capacity).refusal
    assert refusal is not None and "; would fit: -S train.expandable_segments=true (" in refusal
    growing = replace(eased, chosen="expandable")
    assert judged(growing, prediction, capacity).state == "fits" and not other_segments(growing, prediction)
    assert growing.metrics()["out_of_memory_step"] is None and growing.metrics()["out_of_memory_step_native"] == step


def test_the_figures_of_the_run_are_those_of_its_own_segments(memory):
    """A run with segments that grow, held against what segments of fixed sizes would reserve."""
    fixed, growing = memory.metrics(), replace(memory, chosen="expandable").metrics()
    for name, told in (("native", fixed), ("expandable", growing)):
        assert told["reserved_bytes_predicted"] == told[f"reserved_bytes_predicted_{name}"]
        assert told["process_bytes_predicted"] == told["reserved_bytes_predicted"] + CONTEXT.bytes
    assert fixed["reserved_bytes_predicted"] > growing["reserved_bytes_predicted"]


def test_blocks_that_are_given_back_in_time_are_no_refusal(memory, prediction):
    """Reserved bytes held against the device although the allocator would have given them back."""
    for spare in range(1, 64):
        capacity = memory.reserved_bytes("native") + CONTEXT.max_bytes - 2 * spare * MIB
        found, _ = played(prediction, capacity_bytes=capacity)
        assert found is not None
        if found.failing_step("native") is None:
            assert found.retries("native") > 0
            assert judged(found, prediction, capacity).state == "fits"
            return
    pytest.fail("no capacity was enough with blocks given back")


def test_tensors_that_do_not_fit_are_refused_at_the_step_that_has_them(memory, prediction):
    """A refusal that leaves open when."""
    step = memory.first_step_above(prediction.peak.bytes - 1)
    assert step == 0 and memory.first_step_above(2 * prediction.peak.bytes) is None
    refusal = judged(memory, prediction, prediction.peak.bytes - 1).refusal
    assert refusal is not None and "micro-batch of 6 x 400 tokens, at optimizer step 0) exceeds" in refusal


def test_a_long_plan_is_played_in_part_and_says_so(prediction, monkeypatch):
    """An estimate that runs for hours, or one that passes a part off as the whole."""
    monkeypatch.setattr(module, "MOST_EVENTS", 1)
    monkeypatch.setattr(module, "MOST_EVENTS_WORST", 1)
    found, told = played(prediction)
    assert found is not None
    assert told.startswith(f"{len(found.steps)} of 4 steps replayed: the first ones and those that hold a worst")
    assert found.steps[0] == 0 and 1 < len(found.steps) < 4


def test_what_cannot_be_replayed_says_why(prediction):
    """Reserved memory of a few micro-batches taken for that of the plan."""
    found, told = played(prediction, windowed=True)
    assert found is None and told.startswith("worst micro-batches only: the model makes masks")
    flat = replace(PLAN, flat=True)
    found, told = played(prediction, plan=flat, target=gpu_target("T4"))
    assert found is None and "joined rows are attended to one after the other" in told
    found, told = played(replace(prediction, shallow=(), layers_traced="all 13 layers: they are few"))
    assert found is None and "every shape would have to be traced with all 13 layers" in told


@pytest.mark.parametrize("mode", ["bucketed", "packed"])
def test_reserved_memory_of_a_cut_plan_is_flat_after_its_first_step(mode: str):
    """Memory that climbs while a run goes on, and ends it hours after its start."""
    lengths = np.random.default_rng(5).integers(24, 700, 300)
    plan = cut_plan(index_of(lengths), cutting_of(mode=mode, max_tokens=4096), tokens_per_step=9000)
    steps = traced_steps(plan, lengths, tiled=True, windowed=False)
    predicted = predict_explained(CONFIG, SETTING, steps, H100)[0]
    found, told = replay_plan(
        plan, lengths, CONFIG, SETTING, H100, predicted, windowed=False, expandable=True, device=card(80 * GIB)
    )
    assert found is not None and len(found.steps) > 8, told
    for kind, played_steps in found.unlimited.items():
        assert len({step.reserved_bytes for step in played_steps.steps}) == 1, f"{kind}: not a byte more or less"
        assert len({step.allocated_peak_bytes for step in played_steps.steps}) > 5, "though steps differ"
