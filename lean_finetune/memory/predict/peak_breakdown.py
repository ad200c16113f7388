"""The peak taken apart without tracing every layer: windows that know where each storage came from.

What lives at a window's fullest instant grows by the same tensors with every layer (module `depth_extrapolation`); told
apart also by what made them, and for which module, they give the largest holdings of the deep model. Its timeline is
the fullest instant of each window, in the order of the step: layers between the two ends lie on a line.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby

from transformers import PretrainedConfig

from lean_finetune.memory.predict.depth_extrapolation import (
    AFTER,
    BEFORE,
    INSIDE,
    Label,
    NotRepeated,
    Place,
    Window,
    WindowTrace,
    peak_of,
)
from lean_finetune.memory.predict.experts import refuse_experts
from lean_finetune.memory.predict.layer_structure import Repetition, find_repetition
from lean_finetune.memory.predict.peak import Prediction, Setting, from_windows, predict, shallow_windows
from lean_finetune.memory.predict.peak_explanation import (
    Explanation,
    explain,
    largest_holdings,
    timeline_row,
    trace_origins,
)
from lean_finetune.memory.predict.traced_offload import offloaded_bytes
from lean_finetune.memory.predict.traced_shapes import TracedSteps
from lean_finetune.memory.trace.allocation_origins import OriginTrace
from lean_finetune.memory.trace.cuda_kernels import Target

UPDATE_PHASES = ("clip", "optimizer")


class OriginWindowTrace(WindowTrace, OriginTrace):
    """Keeps the peak of every window, its storages told apart by where they came from."""

    def label(self, storage_id: int) -> Label:
        """Category, operation, module with * for a layer's number, phase, shape and type."""
        origin = self.origins[storage_id]
        module = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", origin.module)
        return (self.category(storage_id), origin.operation, module, origin.phase, origin.shape, origin.dtype)


def predict_explained(
    config: PretrainedConfig, setting: Setting, steps: TracedSteps, target: Target
) -> tuple[Prediction, Explanation]:
    """The prediction of `predict`, and its peak taken apart.

    Raises:
        UserError: the model's memory depends on the data, or PyTorch cannot trace one of its operations.
    """
    refuse_experts(config)
    repetition, reason = find_repetition(config, setting.model, setting.all_layers)
    if repetition is not None:
        try:
            windows, shallow = shallow_windows(OriginWindowTrace, config, setting, steps, target, repetition)
            away = offloaded_bytes([each for _, each in shallow], repetition)
        except NotRepeated:
            pass  # `predict` finds the same, traces all layers, and says why.
        else:
            prediction = replace(from_windows(windows, steps, target, reason), shallow=shallow, offloaded_bytes=away)
            return prediction, _explain(windows, prediction, repetition, steps, target.granularity_bytes)
    prediction = predict(config, setting, steps, target)
    return prediction, explain(trace_origins(config, setting, prediction.steps_of_peak, target))


def _explain(
    windows: Mapping[Place, Window],
    prediction: Prediction,
    repetition: Repetition,
    steps: TracedSteps,
    granularity_bytes: int,
) -> Explanation:
    """The explanation that windows make."""
    phase = prediction.worst_phase
    of_phase = [window.contents for window in windows.values() if window.phase == phase]
    fullest = max(of_phase, key=lambda contents: peak_of(contents, granularity_bytes).bytes)
    kinds = [
        (label, count, count * (-(-size // granularity_bytes) * granularity_bytes))
        for (label, size), count in fullest.items()
    ]
    rows = _timeline(windows, prediction, repetition, steps, granularity_bytes)
    return Explanation(
        peak_bytes=prediction.peak.bytes,
        phase=phase,
        top=largest_holdings(kinds),
        timeline=[timeline_row(number, *row) for number, row in enumerate(rows)],
    )


def _timeline(
    windows: Mapping[Place, Window],
    prediction: Prediction,
    repetition: Repetition,
    steps: TracedSteps,
    granularity_bytes: int,
) -> Iterator[tuple[str, Mapping[str, int]]]:
    """Phase and bytes by category of every window, in the order of the steps; other micro-batches left out."""
    shown = _shown(prediction, steps)
    for _, group in groupby(sorted(windows.items(), key=lambda item: item[0][0]), key=lambda item: item[0][0]):
        visit = dict(group)
        phase, micro_batch = next((window.phase, window.micro_batch) for window in visit.values())
        if not shown[phase in UPDATE_PHASES, micro_batch]:
            continue
        sizes = {place[1:]: peak_of(window.contents, granularity_bytes).by_category for place, window in visit.items()}
        for found in _in_order(sizes, repetition, backward=phase == "backward"):
            yield phase, found


def _shown(prediction: Prediction, steps: TracedSteps) -> Mapping[tuple[bool, int], bool]:
    """Whether a micro-batch, and the update after it, belongs to what set the peak: the first one, and the worst."""
    worst = prediction.steps_of_peak[-1][-1]
    later = len(prediction.steps_of_peak[-1]) > 1
    found: dict[tuple[bool, int], bool] = {}
    number = 0
    for shapes in steps:
        first = number
        for place, shape in enumerate(shapes):
            found[False, number] = number == 0 or (shape == worst and (place > 0) == later)
            number += 1
        found[True, number - 1] = any(found[False, micro_batch] for micro_batch in range(first, number))
    return found


def _in_order(
    sizes: Mapping[tuple[str, int], Mapping[str, int]], repetition: Repetition, *, backward: bool
) -> Iterator[Mapping[str, int]]:
    """A phase from its beginning to its end: before any layer, every layer, after the last."""
    for before in (INSIDE, BEFORE):
        if ("outside", before) in sizes:
            yield sizes["outside", before]
    if any(end == "first" for end, _ in sizes):
        layers = range(repetition.layers)
        for layer in reversed(layers) if backward else layers:
            yield _of_layer(sizes, layer, repetition)
    if ("outside", AFTER) in sizes:
        yield sizes["outside", AFTER]


def _of_layer(
    sizes: Mapping[tuple[str, int], Mapping[str, int]], layer: int, repetition: Repetition
) -> Mapping[str, int]:
    """What one layer's window holds: near an end as it was found, else on the line between two of its kind."""
    period, from_end = repetition.period, repetition.layers - 1 - layer
    if layer <= period:
        return sizes["first", layer]
    if from_end <= period:
        return sizes["last", from_end]
    low = 1 + (layer - 1) % period
    high_from_end = 1 + (from_end - 1) % period
    below, above = sizes["first", low], sizes["last", high_from_end]
    span = repetition.layers - 1 - high_from_end - low
    return {
        category: below.get(category, 0) + (above.get(category, 0) - below.get(category, 0)) * (layer - low) // span
        for category in {**below, **above}
    }
