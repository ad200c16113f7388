"""What the whole plan reserves on a GPU, step by step, by either kind of segments, and the step at which it would end.

As many first steps are replayed as bounded time allows, and behind them, as far as it allows, the further steps that
hold one of the plan's worst micro-batches. What repeats from an equal state takes no time, so a plan whose shapes come
again is played to its end. How many steps that is, is told.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PretrainedConfig

from lean_finetune.core.units import GIB
from lean_finetune.memory.allocator.cut import NotAffine, Unit
from lean_finetune.memory.allocator.replay import PlanPlayer, Replay
from lean_finetune.memory.allocator.reserved_memory import ALLOCATORS, segments_of
from lean_finetune.memory.allocator.step_units import step_units
from lean_finetune.memory.allocator.templates import RunModel
from lean_finetune.memory.allocator.traced_runs import LONGEST_TRACED, fit_run, kind_of
from lean_finetune.memory.gpus import Device
from lean_finetune.memory.predict.peak import Prediction, Setting
from lean_finetune.memory.trace.cuda_kernels import EMBEDDING_SORT_TOKENS, Target
from lean_finetune.model.attention import FLASH_CAPABILITY, VARLEN_READY
from lean_finetune.model.model_config import attention_window
from lean_finetune.plan.batch_plan import Plan
from lean_finetune.plan.worst_micro_batches import worst_steps
from lean_finetune.step.batches import BatchShape

MOST_EVENTS = 800_000
"""Allocations and frees that are played, of the first steps by both kinds of segments together: what was met before in
the same state is looked up and not counted. About two seconds; a number, so that it is the same on every machine."""
MOST_EVENTS_WORST = 300_000
"""The same for the worst steps behind them, and for each replay within the device's memory."""
MOST_TRACED_LAYERS = 12
"""A model whose layers do not tell of each other is traced whole up to so many."""
RESERVED_COLUMNS = ("step", "allocated_gib", "reserved_gib", "reserved_expandable_gib", "retries")


@dataclass(frozen=True, kw_only=True)
class PlanMemory:
    """The replay of a plan."""

    steps: tuple[int, ...]
    """Numbers of the optimizer steps that were played, ascending."""
    planned_steps: int
    chosen: str
    """The kind of segments that the run has: train.expandable_segments."""
    unlimited: Mapping[str, Replay]
    """By kind of segments, with all memory there is."""
    limited: Mapping[str, Replay]
    """The same within the device's memory less the most of a context."""
    context_bytes: int
    """Of the process, beside what is reserved."""

    def reserved_bytes(self, allocator: str) -> int:
        """The most that is reserved at any instant."""
        return max(step.reserved_peak_bytes for step in self.unlimited[allocator].steps)

    def failing_step(self, allocator: str) -> int | None:
        """The optimizer step, from 0, in which memory ends; None where it does not."""
        found = self.limited[allocator]
        return None if found.out_of_memory is None else self.steps[len(found.steps)]

    def first_step_above(self, count_bytes: int) -> int | None:
        """The optimizer step, from 0, in which tensors first take more; None where none does."""
        played = zip(self.steps, self.unlimited["native"].steps, strict=True)
        return next((number for number, step in played if step.allocated_peak_bytes > count_bytes), None)

    def retries(self, allocator: str) -> int:
        """How often cached blocks would be given back on the device."""
        return sum(step.retries for step in self.limited[allocator].steps)

    def metrics(self) -> dict[str, Any]:
        """Its part of data/estimate/figures.json, in place of what the worst micro-batches alone reserve."""
        told: dict[str, Any] = {
            "process_bytes_predicted": self.reserved_bytes(self.chosen) + self.context_bytes,
            "reserved_settled_step": self.steps[self.unlimited[self.chosen].settled_step],
        }
        for suffix, allocator in (("", self.chosen), *((f"_{name}", name) for name in ALLOCATORS)):
            told[f"reserved_bytes_predicted{suffix}"] = self.reserved_bytes(allocator)
            told[f"retries_predicted{suffix}"] = self.retries(allocator)
            told[f"out_of_memory_step{suffix}"] = self.failing_step(allocator)
        return told

    def tiers(self, worst: Mapping[str, Any]) -> dict[str, Any]:
        """The content of tiers.json, in place of what the `worst` micro-batches alone reserve; phases stay theirs."""
        told: dict[str, Any] = {}
        for name in ALLOCATORS:
            step, error = self.failing_step(name), self.limited[name].out_of_memory
            told[name] = {
                **worst[name],
                "reserved_bytes": self.reserved_bytes(name),
                "retries": self.retries(name),
                "out_of_memory": None if step is None else f"optimizer step {step}: {error}",
                "process_bytes": self.reserved_bytes(name) + self.context_bytes,
            }
        return told

    def rows(self) -> list[dict[str, Any]]:
        """The content of reserved.csv."""
        native, expandable = self.unlimited["native"].steps, self.unlimited["expandable"].steps
        limited = self.limited[self.chosen].steps
        return [
            {
                "step": step,
                "allocated_gib": round(native[place].allocated_peak_bytes / GIB, 6),
                "reserved_gib": round(native[place].reserved_peak_bytes / GIB, 6),
                "reserved_expandable_gib": round(expandable[place].reserved_peak_bytes / GIB, 6),
                "retries": limited[place].retries if place < len(limited) else None,
            }
            for place, step in enumerate(self.steps)
        ]


def tensors_alone(peak_bytes: int) -> dict[str, Any]:
    """The one row of reserved.csv where no plan was replayed: a plot of an empty file fails."""
    return {"step": 0, "allocated_gib": round(peak_bytes / GIB, 6)}


def replay_plan(
    plan: Plan,
    lengths: np.ndarray,
    config: PretrainedConfig,
    setting: Setting,
    target: Target,
    prediction: Prediction,
    *,
    windowed: bool,
    expandable: bool,
    device: Device,
) -> tuple[PlanMemory | None, str]:
    """Replay a plan; None where that cannot be done exactly. And the steps that were played, or why none were.

    Args:
        plan: the run.
        lengths: tokens of every training row.
        config: of the model.
        setting: what is trained, and how.
        target: the GPU's rules.
        prediction: of the same run.
        windowed: the model makes masks.
        expandable: the kind of segments that the run has.
        device: what the run is held against.
    """
    reason = _why_not(plan, config, setting, target, prediction, windowed=windowed)
    if reason is not None:
        return None, f"worst micro-batches only: {reason}"
    try:
        model = fit_run(config, setting, target, prediction.shallow, _examples(plan, lengths, setting))
        numbers, unlimited = _played(plan, lengths, setting, model)
        usable = device.memory_bytes - device.context.max_bytes
        limited = {
            name: _within(plan, lengths, setting, model, numbers, found, ALLOCATORS[name], usable)
            for name, found in unlimited.items()
        }
    except NotAffine as error:
        return None, f"worst micro-batches only: {error}"
    found = PlanMemory(
        steps=numbers,
        planned_steps=len(plan.steps),
        chosen=segments_of(expandable),
        unlimited=unlimited,
        limited=limited,
        context_bytes=device.context.bytes,
    )
    return found, _told(found)


def _told(memory: PlanMemory) -> str:
    """How much of the plan was played."""
    count, planned = len(memory.steps), memory.planned_steps
    told = f"all {count} steps replayed"
    if count < planned:
        part = "the first ones and those that hold a worst micro-batch; the rest would take too long"
        told = f"{count} of {planned} steps replayed: {part}"
    for name, found in memory.limited.items():
        if found.out_of_memory is None and len(found.steps) < count:
            told += f"; within the device's memory {len(found.steps)} ({name} segments)"
    return told


def _units(plan: Plan, lengths: np.ndarray, setting: Setting, number: int) -> list[Unit]:
    """The units of a step."""
    return step_units([BatchShape.of(one, lengths) for one in plan.steps[number]], kind_of(setting))


def _played(
    plan: Plan, lengths: np.ndarray, setting: Setting, model: RunModel
) -> tuple[tuple[int, ...], dict[str, Replay]]:
    """The steps that are played, by number, and what they reserve by kind of segments.

    Raises:
        NotAffine: a unit is beyond what was traced.
    """
    players = {name: PlanPlayer(model, expandable=grows, capacity_bytes=None) for name, grows in ALLOCATORS.items()}
    numbers: list[int] = []

    def play(candidates: Iterable[int], most_events: int) -> None:
        start = sum(player.played_events for player in players.values())
        for number in candidates:
            if sum(player.played_events for player in players.values()) - start >= most_events:
                return
            units = _units(plan, lengths, setting, number)
            for player in players.values():
                player.step(units)
            numbers.append(number)

    play(range(len(plan.steps)), MOST_EVENTS)
    behind = numbers[-1]
    play((number for number in worst_steps(plan, lengths) if number > behind), MOST_EVENTS_WORST)
    return tuple(numbers), {name: player.replay for name, player in players.items()}


def _within(
    plan: Plan,
    lengths: np.ndarray,
    setting: Setting,
    model: RunModel,
    numbers: Sequence[int],
    free: Replay,
    expandable: bool,
    capacity_bytes: int,
) -> Replay:
    """The replay within a capacity: the same as without one where that is never reached."""
    if max(step.reserved_peak_bytes for step in free.steps) <= capacity_bytes:
        return free
    player = PlanPlayer(model, expandable=expandable, capacity_bytes=capacity_bytes)
    for number in numbers:
        player.step(_units(plan, lengths, setting, number))
        if player.replay.out_of_memory is not None or player.played_events > MOST_EVENTS_WORST:
            break
    return player.replay


def _why_not(
    plan: Plan, config: PretrainedConfig, setting: Setting, target: Target, prediction: Prediction, *, windowed: bool
) -> str | None:
    """Why sizes of other shapes would not follow; None where they do."""
    if setting.sharing is not None:
        return "several GPUs share the steps, and what they send is made and freed on streams of its own"
    if windowed:
        return "the model makes masks, which grow with the square of the length"
    window = attention_window(config)
    if window is not None and window <= LONGEST_TRACED:
        return f"a window of {window} tokens is shorter than the shapes that are traced"
    one_kernel = (
        VARLEN_READY and setting.model.precision != "fp32" and (target.capability or (0, 0)) >= FLASH_CAPABILITY
    )
    if plan.flat and not one_kernel:
        return "joined rows are attended to one after the other here, as many times as there are rows"
    layers = config.get_text_config().num_hidden_layers
    if not prediction.shallow and layers > MOST_TRACED_LAYERS:
        return f"every shape would have to be traced with {prediction.layers_traced}"
    return None


def _examples(plan: Plan, lengths: np.ndarray, setting: Setting) -> list[BatchShape]:
    """A micro-batch of every kind in the plan: the smallest, and the largest on either side of each threshold."""
    tokens = plan.padded_tokens
    below = np.flatnonzero(tokens <= EMBEDDING_SORT_TOKENS)
    numbers = {int(tokens.argmin()), int(tokens.argmax())}
    if len(below):
        numbers.add(int(below[tokens[below].argmax()]))
    return [BatchShape.of(plan.micro_batch(number), lengths) for number in sorted(numbers)]
