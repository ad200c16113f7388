"""The peak of a deep model taken apart from shallow ones: as if all of its layers had been traced."""

import pytest

from lean_finetune.core.units import GIB
from lean_finetune.memory.predict.peak import predict
from lean_finetune.memory.predict.peak_explanation import TIMELINE_COLUMNS, explain, predict_explained, trace_origins
from lean_finetune.memory.trace.memory_trace import CATEGORIES
from tests.memory.common import CPU_TARGET, setting_of, shape
from tests.memory.test_depth_extrapolation import CASES, llama

STEPS = ((shape(2, 96, 60), shape(3, 96, 120), shape(1, 96, 20)), (shape(2, 96, 100),))


@pytest.mark.parametrize("case", ["qlora, recomputed, padded", "two kinds of layers"])
def test_the_parts_of_the_peak_are_those_of_all_layers(case):
    """Holdings of a shallow model shown for a deep one, or layers of two kinds taken for one."""
    make, steps, target, changes = CASES[case]
    config, setting = make(), setting_of(**changes)
    prediction, found = predict_explained(config, setting, steps, target)
    assert prediction == predict(config, setting, steps, target)
    assert prediction.layers_traced.startswith("models of ")
    whole = explain(trace_origins(config, setting, prediction.steps_of_peak, target))
    assert (found.peak_bytes, found.phase, found.top) == (whole.peak_bytes, whole.phase, whole.top)


def test_the_timeline_climbs_layer_by_layer_to_the_peak():
    """Layers out of order, the middle ones left out, or micro-batches that have nothing to do with the peak."""
    config, setting = llama(14), setting_of(method="full", loss_chunk=None)
    prediction, found = predict_explained(config, setting, STEPS, CPU_TARGET)
    assert len(prediction.steps_of_peak[0]) == 2  # The second micro-batch of the first step meets its gradients.
    assert all(tuple(row) == TIMELINE_COLUMNS for row in found.timeline)
    assert [row["event"] for row in found.timeline] == list(range(len(found.timeline)))
    phases = [row["phase"] for row in found.timeline]
    both = ["forward", "backward"]
    assert [a for a, b in zip(phases, ["", *phases], strict=False) if a != b] == [*both, *both, "clip", "optimizer"]
    held = [sum(row[category] for category in CATEGORIES) for row in found.timeline]
    assert max(held) * GIB == pytest.approx(found.peak_bytes, abs=16 * 1024)
    kept = [row["activations"] for row in found.timeline[: phases.index("backward")]]
    assert len(kept) >= 14 and kept[1:15] == sorted(kept[1:15])
    growth = {round(after - before, 6) for before, after in zip(kept[2:12], kept[3:13], strict=True)}
    assert max(growth) - min(growth) <= 2e-6  # GiB are told to six places.
