"""The explanation of a peak: allocations, what made them, the timeline, and the closed form of state."""

import pytest

from cuda_memory.units import GIB
from lean_finetune.memory.predict.explanation import TIMELINE_COLUMNS, explain, predict_explained, trace_origins
from lean_finetune.memory.predict.peak import predict
from lean_finetune.memory.predict.traced_step import TracedModel
from lean_finetune.memory.trace.memory_trace import CATEGORIES
from lean_finetune.memory.trace.origin_trace import EXISTING
from tests.memory.common import CPU_TARGET, gpu_target, llama, setting_of, shape
from tests.memory.predict.test_depth_extrapolation import CASES

CONFIG = llama(num_hidden_layers=3, vocab_size=8192)
STEPS = ((shape(2, 96, 100), shape(3, 80, 90)),)


def explained(setting, target):
    return explain(trace_origins(TracedModel(CONFIG, setting, target), STEPS))


def test_the_peak_is_the_predicted_one():
    """An explanation of another instant, or parts larger than their category."""
    for setting, target in (
        (setting_of(method="full", loss_chunk=None), CPU_TARGET),
        (setting_of(method="qlora", precision="bf16", grad_ckpt=True), gpu_target("H100")),
    ):
        prediction = predict(TracedModel(CONFIG, setting, target), STEPS)
        found = explained(setting, target)
        assert (found.peak_bytes, found.phase) == (prediction.peak.bytes, prediction.worst_phase)
        by_category: dict[str, int] = {}
        for group in found.top:
            by_category[group["category"]] = by_category.get(group["category"], 0) + group["bytes"]
        assert by_category
        assert all(size <= prediction.peak.by_category[category] for category, size in by_category.items())
        sizes = [group["bytes"] for group in found.top]
        assert sizes == sorted(sizes, reverse=True)


def test_logits_are_named_with_their_shape_and_the_head():
    """A table of bytes that cannot be found in the model."""
    top = explained(setting_of(method="full", loss_chunk=None), CPU_TARGET).top
    logits = next(group for group in top if group["category"] == "logits")
    assert logits["shape"] in {(2, 96, 8192), (192, 8192), (3, 80, 8192), (240, 8192)} and logits["dtype"] == "float32"
    weights = {group["module"]: group for group in top if group["category"] == "weights"}
    assert weights["lm_head"]["operation"] == EXISTING and weights["lm_head"]["bytes"] == 64 * 8192 * 4
    assert weights["model.embed_tokens"]["count"] == 1


def test_layers_that_are_alike_are_one_line():
    """Ten lines for ten layers, so that everything else is left out."""
    config = llama(num_hidden_layers=3, vocab_size=96)
    top = explain(trace_origins(TracedModel(config, setting_of(method="full"), CPU_TARGET), STEPS)).top
    products = next(group for group in top if group["module"] == "model.layers.*.mlp.gate_proj")
    assert (products["category"], products["operation"], products["phase"]) == ("activations", "mm", "forward")
    assert products["shape"] == (240, 128) and products["count"] == 3 and products["bytes"] == 3 * 240 * 128 * 4


def test_the_timeline_reaches_the_peak_and_sums_to_it():
    """A timeline that misses the peak."""
    found = explained(setting_of(method="lora", grad_ckpt=True), CPU_TARGET)
    assert all(tuple(row) == TIMELINE_COLUMNS for row in found.timeline)
    highest = max(found.timeline, key=lambda row: sum(row[category] for category in CATEGORIES))
    assert abs(sum(highest[category] for category in CATEGORIES) * GIB - found.peak_bytes) < 16 * 1024
    assert highest["phase"] == found.phase
    assert found.timeline[-1]["weights"] == found.timeline[0]["weights"] > 0  # Ends before all is thrown away.
    order = [row["phase"] for row in found.timeline if row["phase"] != "between"]
    assert list(dict.fromkeys(order)) == ["forward", "backward", "clip", "optimizer"]


DEEP_STEPS = ((shape(2, 96, 60), shape(3, 96, 120), shape(1, 96, 20)), (shape(2, 96, 100),))


@pytest.mark.parametrize("case", ["full, CPU", "qlora, recomputed, padded", "two kinds of layers"])
@pytest.mark.slow
def test_an_extrapolated_explanation_is_that_of_all_layers(case):
    """Allocations of a shallow model shown for a deep one, or layers of two kinds taken for one."""
    make, steps, target, changes = CASES[case]
    config, setting = make(), setting_of(**changes)
    prediction, found = predict_explained(TracedModel(config, setting, target), steps)
    assert prediction == predict(TracedModel(config, setting, target), steps)
    assert prediction.layers_traced.startswith("models of ")
    complete = explain(trace_origins(TracedModel(config, setting, target), prediction.steps_of_peak))
    assert (found.peak_bytes, found.phase, found.top) == (complete.peak_bytes, complete.phase, complete.top)


@pytest.mark.slow
def test_the_timeline_climbs_layer_by_layer_to_the_peak():
    """Layers out of order, the middle ones left out, or micro-batches that have nothing to do with the peak."""
    config, setting = llama(num_hidden_layers=14), setting_of(method="full", loss_chunk=None)
    prediction, found = predict_explained(TracedModel(config, setting, CPU_TARGET), DEEP_STEPS)
    assert len(prediction.steps_of_peak[0]) == 2  # The second micro-batch of the first step runs while gradients exist.
    assert all(tuple(row) == TIMELINE_COLUMNS for row in found.timeline)
    assert [row["event"] for row in found.timeline] == list(range(len(found.timeline)))
    phases = [row["phase"] for row in found.timeline]
    both = ["forward", "backward"]
    assert [a for a, b in zip(phases, ["", *phases], strict=False) if a != b] == [*both, *both, "clip", "optimizer"]
    totals = [sum(row[category] for category in CATEGORIES) for row in found.timeline]
    assert max(totals) * GIB == pytest.approx(found.peak_bytes, abs=16 * 1024)
    activations = [row["activations"] for row in found.timeline[: phases.index("backward")]]
    assert len(activations) >= 14 and activations[1:15] == sorted(activations[1:15])
    growth = {round(after - before, 6) for before, after in zip(activations[2:12], activations[3:13], strict=True)}
    assert max(growth) - min(growth) <= 2e-6  # Rounded to six digits.
