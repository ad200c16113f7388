"""The answer of `lean-finetune fit` as lines of at most 80 columns, and as JSON."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from cuda_memory.gpus import Device
from cuda_memory.units import (
    COLUMNS,
    LABEL_WIDTH,
    bar_line,
    counted,
    labelled,
    readable_size,
    readable_time,
    significant,
)
from cuda_memory.user_paths import shell_line
from lean_finetune.commands.fit_images import images_json, largest_lines, row_lines
from lean_finetune.config.rule import SWITCHED_OFF
from lean_finetune.memory.advice.plan_memory import PlanMemory
from lean_finetune.memory.advice.run import Run
from lean_finetune.memory.advice.run_notes import layers_note, not_loaded, notes_of
from lean_finetune.memory.advice.search import Remedy
from lean_finetune.memory.advice.step_cost import device_step_seconds, tokens_per_second
from lean_finetune.memory.advice.traffic import network_lines, traffic_of
from lean_finetune.memory.advice.verdict import (
    OFFLOADED,
    answer,
    deciding_tier,
    describe,
    dying_first_step,
    judge_run,
    offloaded_first_step,
    room_bytes,
)
from lean_finetune.memory.advice.what_fits import LENGTH_STEP, Largest, find_limits
from lean_finetune.memory.predict.first_step import FirstStep
from lean_finetune.memory.predict.other_phases import loading_note
from lean_finetune.memory.predict.peak import Prediction
from lean_finetune.model.files.quantized_checkpoint import format_text

if TYPE_CHECKING:
    from lean_finetune.memory.advice.length_staircase import Staircase

LARGEST_PARTS = 5


def fit_lines(
    run: Run,
    prediction: Prediction,
    memory: PlanMemory | None,
    source: str,
    command: str,
    option: str,
    *,
    of_tool: bool = False,
    stairs: "Staircase | None" = None,
) -> Iterator[str]:
    """The lines of the answer, each as soon as it is known: the verdict first.

    `memory` is the replay of the run, if there is one. `source` says where the parameters come from. `command` and
    `option` make the lines that apply settings: `lean-finetune fit …` and `--set`. `of_tool`: another tool's step is
    shown besides, so most tools' first step is left out. `stairs`: with --lengths.
    """
    verdict = judge_run(run, prediction, memory)
    shown = labelled("verdict here" if of_tool else "verdict", verdict_text(run, prediction, memory))
    yield shown
    if (shortage := run.shortage(prediction.offloaded_bytes)) is not None:
        yield labelled("host", shortage)
    if run.device.kind == "cpu" and run.params.hardware.gpu.strip().lower() == "auto":
        yield labelled("note", "for the CPU of this machine, which has no CUDA device; --gpu names a GPU")
    yield ""
    yield from _peak_lines(run, prediction)
    yield from tier_lines(run, prediction, memory)
    if not of_tool:
        yield from dying_lines(run, prediction)
    if stairs is not None:
        yield ""
        yield from staircase_lines(stairs)
    yield ""
    yield labelled("params", source)
    yield from _run_lines(run, prediction)
    if not verdict.fits:
        offers = offers_of(run, prediction, memory)
        yield ""
        if not offers:
            yield labelled("what would fit", "no settings found: choose a larger device")
        else:
            yield labelled("what would fit", "the least harmful to learning first, then the fastest")
        for remedy in offers:
            yield from _remedy_lines(remedy, command, option)
        yield ""
    limits = find_limits(run, prediction.peak.bytes)
    with_margin = "" if run.margin is None else f", with {run.margin.text}"
    smallest = limits.smallest_gpu or "none is large enough"
    yield labelled("smallest GPU", f"{smallest} (of the known GPUs, for this run{with_margin})")
    yield labelled("longest row", _tokens(limits.longest_row) or f"not even {LENGTH_STEP} tokens fit")
    batch = _tokens(limits.largest_max_tokens) or f"not even one row of {run.longest} tokens fits"
    yield labelled("largest micro-batch", batch)
    yield from largest_lines(run, prediction.peak.bytes)
    yield ""
    yield shown  # Again, because the first line scrolls away.


def offers_of(run: Run, prediction: Prediction, memory: PlanMemory | None) -> Sequence[Remedy]:
    """Settings with which a run fits that does not, best first."""
    return answer(run, prediction, memory).remedies


def verdict_text(run: Run, prediction: Prediction, memory: PlanMemory | None) -> str:
    """The verdict, with the tier that decides, its peak and its room."""
    verdict = judge_run(run, prediction, memory)
    headroom_percent = run.params.estimate.headroom_percent
    tier, size = deciding_tier(prediction, memory, run.device, headroom_percent), prediction.peak.bytes
    if memory is not None and tier == "reserved":
        size = memory.held_bytes(memory.chosen)
    needs = {"tensors": "needs", "reserved": "reserves"}[tier]
    usable = f"{readable_size(room_bytes(tier, run.device, headroom_percent))} usable on {run.device.name}"
    if verdict.within_margin:
        why = "; stage train starts it, with a note"
    else:
        why = "" if verdict.why_tight is None else f"; {verdict.why_tight}"
    if run.margin is None or tier != "tensors":
        return f"{verdict.state}: {needs} {readable_size(size)}, {usable}{why}"
    return f"{verdict.state}: {needs} {run.margin.peak_text(size)}; {usable}{why}"


def _peak_lines(run: Run, prediction: Prediction) -> Iterator[str]:
    """Bars of the peak by phase and of what the highest one consists of, as shares of the usable memory."""
    whole = max(run.usable_bytes, prediction.peak.bytes)
    of = "the peak" if whole > run.usable_bytes else "usable memory"
    yield f"peak by phase, as a share of {of}"
    for phase, peak in prediction.by_phase.items():
        yield bar_line(phase, peak.bytes, whole)
    yield f"at the peak, in {prediction.worst_phase}"
    by_size = sorted(prediction.peak.by_category.items(), key=lambda item: -item[1])
    rest = sum(size for _, size in by_size[LARGEST_PARTS:])
    for category, size in [*by_size[:LARGEST_PARTS], *([("other", rest)] if rest else [])]:
        yield bar_line(category.replace("_", " "), size, whole)
    for what, where, size in run.host_bytes(prediction):
        yield labelled(where, f"{readable_size(size)}: {what}")


def _run_lines(run: Run, prediction: Prediction) -> Iterator[str]:
    """The device, the model, and how it is trained."""
    p, train = run.params, run.setting.train
    less = run.device.headroom_text(run.params.estimate.headroom_percent)
    less += " of headroom" if less.endswith("%") else ""
    yield labelled("device", f"{run.device.name}: {readable_size(run.device.memory_bytes)}, less {less}")
    layers = run.config.get_text_config().num_hidden_layers
    yield labelled("model", f"{run.params.model.name}: {run.config.model_type}, {counted(layers, 'layer')}")
    if (others := not_loaded(run)) is not None:
        yield labelled("not loaded", others)
    adapters = f", rank {train.lora.rank}" if train.adapted else ""
    memory = f"grad_ckpt={str(train.grad_ckpt).lower()}, loss_chunk={train.loss_chunk or 'null'}"
    for name, off in SWITCHED_OFF.items():
        memory += f", {name.partition('.')[2]}={value}" if (value := attrgetter(name)(p)) != off else ""
    objective = f"{train.objective} with " if train.goal.compares else ""
    yield labelled("run", f"{objective}{train.method}{adapters}, {train.precision}, {train.optimizer}, {memory}")
    if prediction.stages:
        sizes = (f"{counted(layers, 'layer')} {readable_size(size)}" for layers, size in prediction.stages)
        waits = (len(prediction.stages) - 1) / run.micro_batches_per_step
        waiting = f"each waits {waits / (1 + waits):.0%} of the time"
        yield labelled("GPUs", f"stages of a pipeline: {', '.join(sizes)}; {waiting}")
    elif p.hardware.num_gpus > 1:
        yield labelled("GPUs", f"{p.hardware.num_gpus}, sharding {train.sharding}; sizes are per GPU")
    yield labelled("micro-batches", describe(run.steps[-1][-1]))
    yield from row_lines(run)
    if (speed := tokens_per_second(run)) is not None:
        slow, fast = (significant(tokens, 2) if tokens < 100 else f"{round(tokens, -2):,.0f}" for tokens in speed)
        of_each = p.hardware.num_gpus > 1 and not prediction.stages
        per_gpu = " on each GPU, less where GPUs wait for each other" if of_each else ""
        yield labelled("speed", f"{slow} to {fast} tokens/s{per_gpu}, by the data sheet (not measured)")
    if p.train.offload_to == "disk" and (parts := device_step_seconds(run)) is not None:
        by_time = sorted(parts.items(), key=lambda item: -item[1])
        slowest = ", ".join(f"{name} {readable_time(seconds)}" for name, seconds in by_time if seconds >= 0.1)
        yield labelled("step", f"{readable_time(sum(parts.values()))} by the data sheet: {slowest}")
        rate = f"{p.hardware.disk_gb_per_second:g} GB/s (hardware.disk_gb_per_second)"
        yield labelled("disk", f"a step reads and writes all of its state, at {rate}")
    for label, text in network_lines(run):
        yield labelled(label, text)
    yield labelled("attention", run.attention)
    if (linear := run.linear_attention) is not None:
        yield labelled("linear attention", linear)
    load_bytes = run.load_bytes(prediction)
    if (weights := format_text(run.config)) is not None:
        yield labelled("weights", f"{weights}; loading takes {readable_size(load_bytes)} at most")
    if (experts := run.experts) is not None:
        yield labelled("experts", experts)
    for note in filter(None, (*notes_of(run), layers_note(run), loading_note(load_bytes, prediction.peak.bytes))):
        yield labelled("note", note)


def _remedy_lines(remedy: Remedy, command: str, option: str) -> Iterator[str]:
    """A line to run, continued where it is too long, and what it brings."""
    line = f"  {command}"
    for words in (f"{option} {shell_line([flag])}" for flag in remedy.flags):
        if len(line) + len(words) + len("  \\") > COLUMNS:
            yield f"{line} \\"
            line = f"     {words}"
        else:
            line += f" {words}"
    yield line
    text = f"peak {readable_size(remedy.peak_bytes)}, {remedy.slowdown:.2f}x time per token; {remedy.effect}"
    yield textwrap.fill(text, COLUMNS, initial_indent=" " * 4, subsequent_indent=" " * 4)
    if remedy.host_bytes:
        disk = f", {readable_size(remedy.disk_bytes)} on disk" if remedy.disk_bytes else ""
        step = "" if remedy.step_seconds is None else f"; {readable_time(remedy.step_seconds)} a step"
        yield f"    {readable_size(remedy.host_bytes)} of offloaded state in host memory{disk}{step}"


def _tokens(found: Largest) -> str:
    """A largest size, and what limits it; empty if nothing fits."""
    return f"{found.value:,} tokens, limited by {found.limit or 'memory'}" if found.value else ""


def verdict_json(run: Run, prediction: Prediction, memory: PlanMemory | None) -> dict[str, Any]:
    """The part of the answer that needs no search. Sizes are in bytes."""
    verdict = judge_run(run, prediction, memory)
    return {
        "verdict": verdict.state,
        "verdict_text": verdict_text(run, prediction, memory),
        "why_tight": verdict.why_tight,
        "margin_percent": run.margin and run.margin.percent,
        "peak_bytes": prediction.peak.bytes,
        "usable_bytes": run.usable_bytes,
        "deciding_tier": deciding_tier(prediction, memory, run.device, run.params.estimate.headroom_percent),
        "tiers": memory and memory.tiers(),
    }


def fit_json(run: Run, prediction: Prediction, memory: PlanMemory | None) -> dict[str, Any]:
    """The complete answer. Sizes are in bytes, lengths in tokens."""
    verdict, limits = judge_run(run, prediction, memory), find_limits(run, prediction.peak.bytes)
    offers = () if verdict.fits else offers_of(run, prediction, memory)
    shape = run.steps[-1][-1]
    return {
        **verdict_json(run, prediction, memory),
        "first_step_elsewhere": (dying := dying_first_step(run, prediction)) and asdict(dying),
        "worst_phase": prediction.worst_phase,
        "phases": {
            phase: {"peak_bytes": peak.bytes, "by_category_bytes": _by_size(peak.by_category)}
            for phase, peak in prediction.by_phase.items()
        },
        "stages": [{"layers": layers, "peak_bytes": size} for layers, size in prediction.stages],
        "load_bytes": run.load_bytes(prediction),
        "outside_of_the_device": [
            {"what": what, "where": where, "bytes": size} for what, where, size in run.host_bytes(prediction)
        ],
        "device": {
            "name": run.device.name,
            "memory_bytes": run.device.memory_bytes,
            "headroom_percent": run.params.estimate.headroom_percent,
            "reason": run.reasons["gpu"],
            "attention": run.attention,
            "linear_attention": run.linear_attention,
        },
        "model": {"name": run.params.model.name, "type": run.config.model_type},
        "precision": run.setting.train.precision,
        "tokens_per_step": run.setting.train.step_tokens,
        "tokens_per_second": tokens_per_second(run),
        "traffic": (traffic := traffic_of(run)) and traffic.as_json(run.params.run.nodes),
        "step_seconds": device_step_seconds(run),
        "micro_batch": {"rows": shape.rows, "tokens_per_row": shape.length},
        "would_fit": [
            {"settings": list(remedy.flags), **{k: v for k, v in remedy.as_json().items() if k != "command"}}
            for remedy in offers
        ],
        "smallest_gpu": limits.smallest_gpu,
        "longest_row_tokens": asdict(limits.longest_row),
        "largest_micro_batch_tokens": asdict(limits.largest_max_tokens),
        **images_json(run, prediction.peak.bytes),
        "layers_traced": prediction.layers_traced,
        "params": _params(run),
    }


def _params(run: Run) -> dict[str, Any]:
    """The parameters of the run; of rows that carry more than text, with the lengths that this leads to."""
    params = run.params.model_dump()
    if run.full_row.attached:
        params["data"]["max_length"] = run.longest
        params["bucket"]["max_tokens"] = run.bucket.max_tokens
    return params


def _by_size(sizes: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


# Reserved and process memory: tiers, first step, staircase.

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
