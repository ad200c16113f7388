"""Stage estimate: predict the planned run, judge whether it fits, search for advice, and write the results."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

from cuda_memory.gpus import GIGA
from cuda_memory.units import GIB, counted, readable_size
from lean_finetune.config.declared_params import params_of_rules
from lean_finetune.config.overrides import keeps_rules
from lean_finetune.config.schema import Params
from lean_finetune.core.atomic_files import FIGURES, atomic_directory, write_csv, write_json
from lean_finetune.memory.advice.largest_that_fits import find_limits
from lean_finetune.memory.advice.one_change_sweep import as_advice, as_rows, halving_flag, sweep_switches
from lean_finetune.memory.advice.plan_memory import RESERVED_COLUMNS, PlanMemory, replay_steps, tiers_metrics
from lean_finetune.memory.advice.search import ADVICE_COLUMNS
from lean_finetune.memory.advice.step_cost import duration_text
from lean_finetune.memory.advice.traffic import traffic_of
from lean_finetune.memory.advice.verdict import answer, judge
from lean_finetune.memory.advice.workload import Workload, host_ram_bytes
from lean_finetune.memory.estimate.planned_run import FitCheck, PlannedRun, read_run
from lean_finetune.memory.predict.offloaded_states import closed_form, disk_state_bytes
from lean_finetune.memory.predict.other_phases import (
    LOAD,
    OtherPhases,
    evaluation_note,
    generation_shapes,
    heldout_shape,
    loading_note,
    other_phases,
)
from lean_finetune.memory.predict.peak import Prediction
from lean_finetune.memory.predict.peak_explanation import TIMELINE_COLUMNS, trace_origins
from lean_finetune.memory.predict.process_memory import as_json, on_host
from lean_finetune.memory.trace.cuda_kernels import target_of
from lean_finetune.memory.trace.memory_trace import Peak
from lean_finetune.model.allocator_settings import environment_notes
from lean_finetune.model.model_config import max_positions
from lean_finetune.plan.planner import PlanSettings
from lean_finetune.step.evaluation_limits import EvaluationLimits

RESULTS = ("fits", "peak_gib_predicted")
"""Figures in metrics/estimate.json, by which runs are compared."""

TENSORS, RESERVED = "tensors", "reserved"
"""Tiers of memory that decide: reserved memory if the plan was replayed, unless tensors alone are too large."""

MODEL_REASONS = ("attention", "experts", "fused_kernels", "not_loaded", "weights")
"""Texts of `PlannedRun.reasons` about the model that are figures too."""


def run_stage(p: Params, plan_path: Path, index: Path, model_lock: Path, out: Path, metrics: Path) -> None:
    """Predict the run of a plan, whose rows `index` lists, and judge it; writes the directory `out` and `metrics`."""
    # As in train: CPU kernels have buffers per thread.
    torch.set_num_threads(p.run.cpu_threads or torch.get_num_threads())
    planned = read_run(p, plan_path, index, model_lock)
    device = planned.device
    precision = planned.setting.train.precision if p.train.precision == "auto" else None
    _echo_choices(p, planned)
    prediction, explanation = planned.predict()
    memory, replayed = planned.replay(prediction)
    _echo_verdict(p, planned, prediction, memory)
    switches = sweep_switches(
        planned.config,
        planned.setting,
        target_of(device),
        prediction,
        smaller_batch=halving_flag(p.bucket, planned.longest),
        native_bf16=device.native_bf16,
        progress=p.run.progress,
        allowed=partial(keeps_rules, params_of_rules(p)),
    )
    run, planned = _workload(p, planned, prediction), replace(planned, setting=prediction.setting)
    by_phase = _phases(p, planned, prediction)
    duration = duration_text(run, device, len(planned.plan.steps), p.hardware.num_gpus)
    if duration is not None:
        steps = len(planned.plan.steps)
        tokens = round(int(planned.plan.padded_tokens.sum()) / steps)
        click.echo(f"training: {counted(steps, 'step')} of about {counted(tokens, 'token')}: {duration}")
    settings, headroom = PlanSettings.from_params(p), p.estimate.headroom_percent
    confirm = FitCheck(planned=planned, run=run, plan_settings=settings, index=index, headroom_percent=headroom)
    shortage = planned.shortage(prediction, run.host_ram_bytes)
    found = answer(run, prediction, device, p, memory, lambda candidate, _: confirm(candidate.run), shortage)
    states = list(closed_form(planned.config, planned.setting, target_of(device)))
    documents = {
        "verdict.json": {**found.verdict.as_json(precision), **_stage_layers(prediction)},
        "advice.json": {**found.as_json(), "single_changes": as_advice(switches)},
        "breakdown.json": {phase: peak.by_category for phase, peak in {**by_phase, "peak": prediction.peak}.items()},
        "explanation.json": {**explanation.as_json(), "states": states},
        "tiers.json": _tiers(planned, prediction, memory),
        "process.json": _process(planned, prediction),
        "what_fits.json": _what_fits(p, planned, run, prediction),
    }
    fits: dict[str, Any] = {
        "fits": found.verdict.fits,
        "verdict": found.verdict.state,
        "deciding_tier": RESERVED if memory and prediction.peak.bytes <= device.usable_bytes(headroom) else TENSORS,
        "reserved_replayed": replayed,
        "duration": duration,
    }
    if (traffic := traffic_of(run)) is not None:
        fits |= {name: size for name, size in traffic.as_json(1).items() if "node" not in name}
    figures = {**_figures(planned, prediction, by_phase, documents), **(memory.metrics() if memory else {}), **fits}
    with atomic_directory(out) as aside:
        for name, content in {**documents, FIGURES: figures}.items():
            write_json(aside / name, content)
        write_csv(aside / "advice.csv", ADVICE_COLUMNS, [remedy.as_row() for remedy in found.remedies])
        if memory is not None:  # Else DVC would draw an empty plot.
            write_csv(aside / "reserved.csv", RESERVED_COLUMNS, memory.rows())
        write_csv(aside / "timeline.csv", TIMELINE_COLUMNS, explanation.timeline)
        write_csv(aside / "switches.csv", ["switch", "peak_gib"], as_rows(switches))
    write_json(metrics, {name: figures[name] for name in RESULTS})
    if found.verdict.refusal is not None:
        click.echo(f"does not fit: {found.verdict.refusal}", err=True)


def _echo_choices(p: Params, planned: PlannedRun) -> None:
    """Report the precision that `auto` chose, what is not loaded, and notes on kernels and the environment."""
    if p.train.precision == "auto":
        click.echo(f"train.precision: auto is {planned.setting.train.precision}: {planned.reasons['precision']}")
    if "not_loaded" in planned.reasons:
        click.echo(f"not loaded: {planned.reasons['not_loaded']}")
    notes = environment_notes(p.train.expandable_segments) if planned.device.kind == "cuda" else []
    for note in filter(None, (*notes, planned.reasons.get("fused_kernels"))):
        click.echo(f"note: {note}", err=True)


def _echo_verdict(p: Params, planned: PlannedRun, prediction: Prediction, memory: PlanMemory | None) -> None:
    """Report that a run does not fit before the search for advice, which takes longer than the prediction."""
    device, headroom = planned.device, p.estimate.headroom_percent
    verdict = judge(prediction, device, (), headroom_percent=headroom, enforce=p.estimate.enforce, memory=memory)
    if not verdict.fits:
        usable = readable_size(device.usable_bytes(headroom))
        peak = readable_size(prediction.peak.bytes)
        click.echo(f"does not fit {device.name}: {peak} of {usable} usable; searching for what would", err=True)


def _workload(p: Params, planned: PlannedRun, prediction: Prediction) -> Workload:
    """The run as advice describes it."""
    plan = planned.own_plan
    steps = len(plan.steps)
    return Workload(
        config=planned.config,
        setting=planned.setting,
        steps=prediction.steps_of_peak,
        mode=p.bucket.mode,
        max_tokens=p.bucket.max_tokens,
        fixed_rows=p.bucket.fixed_rows,
        longest=planned.longest,
        tokens_per_step=float(plan.padded_tokens.sum()) / steps / planned.setting.context,
        micro_batches_per_step=len(plan) / steps,
        unpadded_tokens_per_step=p.train.tokens_per_step,
        disk_bytes_per_second=p.hardware.disk_gb_per_second * GIGA,
        host_ram_bytes=host_ram_bytes(p),
    )


def _phases(p: Params, planned: PlannedRun, prediction: Prediction) -> dict[str, Peak]:
    """Peak of every phase; notes if loading or evaluation needs more than training."""
    plan, longest, limits = planned.own_plan, planned.longest, EvaluationLimits.from_params(p)
    prompts = p.evaluate.generate_rows
    around = OtherPhases(
        stored_dtype=planned.stored,
        in_training=heldout_shape(int(plan.padded_tokens[plan.step == 0].max()), longest),
        evaluation=heldout_shape(limits.max_tokens, longest),
        logits_chunk=limits.logits_chunk,
        generation=generation_shapes(limits, prompts=prompts, longest=longest, positions=max_positions(planned.config)),
        merged=p.evaluate.merged,
    )
    target, training = target_of(planned.device), prediction.by_phase
    phases = {**training, **other_phases(planned.config, planned.setting, around, target, training["optimizer"])}
    peak_bytes = prediction.peak.bytes
    notes = (
        loading_note(phases[LOAD].bytes, peak_bytes),
        evaluation_note(phases, peak_bytes, limits.max_tokens, longest),
    )
    for note in filter(None, notes):
        click.echo(f"note: {note}", err=True)
    return phases


def _tiers(planned: PlannedRun, prediction: Prediction, memory: PlanMemory | None) -> dict[str, Any] | None:
    """Content of tiers.json for a GPU; of the worst micro-batches if no plan was replayed."""
    if planned.device.kind != "cuda":
        return None
    if memory is None:
        steps = prediction.steps_of_peak
        trace = trace_origins(planned.config, planned.setting, steps, target_of(planned.device))
        memory = replay_steps(trace, steps, expandable=planned.expandable, device=planned.device)
    return memory.tiers()


def _process(planned: PlannedRun, prediction: Prediction) -> dict[str, Any] | None:
    """Content of process.json for a GPU: memory of its process and of the host besides tensors."""
    if planned.device.kind != "cuda":
        return None
    tokens, offloaded_bytes = int(planned.own_plan.padded_tokens.max()), prediction.offloaded_bytes
    host = on_host(
        planned.config, planned.setting, planned.stored, batch_tokens=tokens, offloaded_bytes=offloaded_bytes
    )
    return as_json(planned.device, planned.setting, host)


def _what_fits(p: Params, planned: PlannedRun, run: Workload, prediction: Prediction) -> dict[str, Any]:
    """Content of what_fits.json."""
    if planned.device.kind != "cuda":
        return {"reason": "searched for GPUs only: name one in hardware.gpu, or use `lean-finetune fit`"}
    found = find_limits(
        run,
        planned.device,
        peak_bytes=prediction.peak.bytes,
        headroom_percent=p.estimate.headroom_percent,
        positions=max_positions(planned.config),
    )
    return {"reason": None, **asdict(found)}


def _stage_layers(prediction: Prediction) -> dict[str, list[int]]:
    """The part of verdict.json by which train divides the layers; empty without a pipeline."""
    return {"stage_layers": [layers for layers, _ in prediction.stages]} if prediction.stages else {}


def _figures(
    planned: PlannedRun, prediction: Prediction, by_phase: Mapping[str, Peak], documents: Mapping[str, Any]
) -> dict[str, Any]:
    """Content of figures.json, without the verdict and the replay."""
    process = documents["process.json"]
    return {
        "peak_bytes_predicted": prediction.peak.bytes,
        "peak_gib_predicted": round(prediction.peak.bytes / GIB, 6),
        "offloaded_bytes_predicted": prediction.offloaded_bytes,
        "disk_bytes_predicted": disk_state_bytes(planned.config, planned.setting),
        "predicted_by_phase": {phase: peak.bytes for phase, peak in by_phase.items()},
        "worst_phase": prediction.worst_phase,
        "layers_traced": prediction.layers_traced,
        **({"peak_bytes_by_stage": [peak for _, peak in prediction.stages]} if prediction.stages else {}),
        "gpu": planned.device.name,
        "gpu_reason": planned.reasons["gpu"],
        "capacity_gib": round(planned.device.memory_bytes / GIB, 2),
        **{name: planned.reasons[name] for name in MODEL_REASONS if name in planned.reasons},
        "host_bytes_predicted": process and process["host_needed_bytes"],
        "host_of_process": process and process["host_of_process"],
        "processes_per_host": process and process["processes_per_host"],
        **tiers_metrics(documents["tiers.json"], expandable=planned.expandable),
    }
