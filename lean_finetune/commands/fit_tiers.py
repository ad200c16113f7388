"""Reserved and process memory in the answer of `lean-finetune fit`: tiers, first step, staircase."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from cuda_memory.gpus import Device
from cuda_memory.units import LABEL_WIDTH, bar_line, counted, labelled, readable_size
from lean_finetune.memory.advice.plan_memory import PlanMemory
from lean_finetune.memory.advice.run import Run
from lean_finetune.memory.advice.verdict import OFFLOADED, describe, dying_first_step, offloaded_first_step
from lean_finetune.memory.predict.first_step import FirstStep
from lean_finetune.memory.predict.peak import Prediction

if TYPE_CHECKING:
    from lean_finetune.memory.advice.length_staircase import Staircase

SEGMENTS = {"expandable": "expandable", "native": "fixed"}
MOST_STAIRS = 10
"""Lines of a staircase."""


def tier_lines(run: Run, prediction: Prediction, memory: PlanMemory | None) -> Iterator[str]:
    """The three tiers of memory with either kind of segments, the run's own kind first; or why they are not known."""
    if memory is None:
        if run.device.kind == "cuda":
            yield labelled("reserved memory", "unknown for stages of a pipeline, and so is the process")
        return
    tiers = memory.tiers()
    kinds = sorted(tiers, key=lambda kind: kind != memory.chosen)
    own, other = (SEGMENTS[kind] for kind in kinds)
    yield _tier_line("allocator segments", f"{own} (this run)", other)
    for tier in ("tensors", "reserved"):
        yield _tier_line(f"  {tier}", *(readable_size(tiers[kind][f"{tier}_bytes"]) for kind in kinds))
    process = [(tiers[kind]["process_bytes"], tiers[kind]["process_margin_bytes"]) for kind in kinds]
    yield _tier_line("  process", *(f"{readable_size(low)} to {readable_size(low + more)}" for low, more in process))
    if run.margin is not None:
        yield labelled("", f"reserved and process are estimates: {run.margin.text}")
    for kind in kinds if prediction.peak.bytes <= run.usable_bytes else ():  # Else the tensors decide.
        failed, retries = tiers[kind]["out_of_memory"], tiers[kind]["retries"]
        if failed is not None:
            yield labelled("", f"{SEGMENTS[kind]} segments: out of memory in {failed}")
        elif retries:
            times = counted(retries, "time")
            yield labelled("", f"{SEGMENTS[kind]} segments fit, as cached blocks are released {times}")


def dying_lines(run: Run, prediction: Prediction) -> Iterator[str]:
    """The first step of a run that dies in its first update in most tools, and with the optimizer on the host."""
    found = dying_first_step(run, prediction)
    if found is None:
        return
    yield ""
    yield "tensors over the first step, in tools that make the optimizer's state in it"
    yield from first_step_lines(found, run.device, found.update)
    if (offloaded := offloaded_first_step(run)) is not None:
        yield f"tensors over the first step, with {OFFLOADED}"
        yield from first_step_lines(offloaded, run.device, found.update)


def first_step_lines(found: FirstStep, device: Device, whole: int) -> Iterator[str]:
    """A bar for each instant, as a share of `whole` bytes; the first one that does not fit is marked."""
    room, failed = device.usable_bytes(0), False
    for name, size in found.instants().items():
        yield bar_line(name, size, whole)
        if size > room and not failed:
            failed = True
            yield f"  {'':<{LABEL_WIDTH}}out of memory here: {device.name} has {readable_size(room)} for tensors"


def _tier_line(label: str, own: str, other: str) -> str:
    """A line with the figures of both kinds of segments."""
    return f"{label:<{LABEL_WIDTH + 2}}{own:<28}{other}"


def staircase_lines(stairs: "Staircase") -> Iterator[str]:
    """Reserved memory by optimizer step: each new maximum of fixed segments, when they settle, and in which order."""
    yield labelled("staircase", f"reserved with fixed segments, {stairs.played} played")
    rises = stairs.stairs("native")
    shown = rises if len(rises) <= MOST_STAIRS else [*rises[: MOST_STAIRS - 1], rises[-1]]
    for number, size, shape, is_largest in shown:
        why = "the largest so far" if is_largest else "other shapes"
        yield f"  {f'step {number}':<{LABEL_WIDTH}}{readable_size(size):<12}{describe(shape)}, {why}"
    if len(rises) > len(shown):
        yield labelled("", f"and {counted(len(rises) - len(shown), 'rise')} before the last one")
    settled = [f"{SEGMENTS[kind]} after step {stairs.settled_step(kind)}" for kind in ("native", "expandable")]
    yield labelled("settles", ", ".join(settled))
    planned = readable_size(stairs.memory.unlimited["native"].reserved_peak_bytes)
    mixed = readable_size(stairs.shuffled.reserved_peak_bytes)
    yield labelled("order", f"as planned, largest first: {planned}; the same at random: {mixed}")
