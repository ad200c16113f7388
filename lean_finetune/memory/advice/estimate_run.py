"""Stage estimate: predict the planned run, judge whether it fits, search for advice, and write the results."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from cuda_memory.terminal import echo
from cuda_memory.units import GIB, counted, readable_size
from lean_finetune.config.schema import Params
from lean_finetune.core.atomic_files import FIGURES, atomic_directory, seal_tables, write_csv, write_json, write_sealed
from lean_finetune.islands.attachments import read_attached
from lean_finetune.memory.advice.plan_memory import RESERVED_COLUMNS, PlanMemory, replay_steps, tiers_metrics
from lean_finetune.memory.advice.planned_run import read_run
from lean_finetune.memory.advice.run import Run
from lean_finetune.memory.advice.run_notes import not_loaded, notes_of
from lean_finetune.memory.advice.search import ADVICE_COLUMNS
from lean_finetune.memory.advice.step_cost import duration_text
from lean_finetune.memory.advice.traffic import traffic_of
from lean_finetune.memory.advice.verdict import answer, deciding_tier, judge_run
from lean_finetune.memory.advice.what_fits import as_advice, as_rows, find_limits, sweep_switches
from lean_finetune.memory.predict.deep_events import step_events
from lean_finetune.memory.predict.explanation import TIMELINE_COLUMNS
from lean_finetune.memory.predict.other_phases import (
    LOAD,
    OtherPhases,
    evaluation_note,
    generation_shapes,
    heldout_shape,
    loading_note,
    other_phases,
    prompts_carried,
    reference_note,
    reference_shape,
    shapes_carried,
)
from lean_finetune.memory.predict.peak import Prediction
from lean_finetune.memory.predict.process_memory import as_json, closed_form, disk_state_bytes, on_host
from lean_finetune.memory.trace.memory_trace import Peak
from lean_finetune.model.files.quantized_checkpoint import format_text
from lean_finetune.model.fused_kernels import memory_note
from lean_finetune.model.model_config import max_positions
from lean_finetune.model.precision import PRECISION
from lean_finetune.run.assets import Assets
from lean_finetune.step.evaluation_limits import EvaluationLimits
from lean_finetune.step.token_rows import read_lengths, read_supervised

RESULTS = ("fits", "peak_gib_predicted")
"""Figures in metrics/estimate.json, by which runs are compared."""
FOR_PEOPLE = ("tiers.json", "process.json", "what_fits.json")
"""Documents that no other stage reads."""


def run_stage(
    p: Params, plan_path: Path, index: Path, heldout_index: Path, model_lock: Path, out: Path, metrics: Path
) -> None:
    """Predict the run of a plan, whose rows `index` lists, and judge it; writes the directory `out` and `metrics`.

    `heldout_index` lists the rows of held-out losses and answers.
    """
    assets = Assets.pinned(model_lock, weights=False)
    run = read_run(p, plan_path, index, assets)
    assert run.planned is not None
    plan = run.planned.plan
    _echo_choices(run)
    prediction, explanation = run.explain()
    memory, replayed = run.replay(prediction)
    _echo_verdict(run, prediction, memory)
    switches = sweep_switches(run, prediction)
    # Advice varies the micro-batches that set the peak; a pipeline's figures are those of its fullest stage.
    run, fullest = replace(run, steps=prediction.steps_of_peak), replace(run, setting=prediction.setting)
    by_phase = _phases(fullest, prediction, heldout_index, continued=assets.adapter is not None)
    duration = duration_text(run, len(plan.steps))
    if duration is not None:
        steps = len(plan.steps)
        tokens = round(int(plan.padded_tokens.sum()) / steps)
        echo(f"training: {counted(steps, 'step')} of about {counted(tokens, 'token')}: {duration}")
    found = answer(run, prediction, memory)
    states = list(closed_form(fullest.model))
    documents: dict[str, Any] = {
        "verdict.json": {**found.verdict.as_json(), **_stage_layers(prediction)},
        PRECISION: {"precision": run.setting.train.precision},
        "advice.json": {**found.as_json(), "single_changes": as_advice(switches)},
        "breakdown.json": {phase: peak.by_category for phase, peak in {**by_phase, "peak": prediction.peak}.items()},
        "explanation.json": {**explanation.as_json(), "states": states},
        "tiers.json": _tiers(fullest, prediction, memory),
        "process.json": _process(fullest, prediction),
        "what_fits.json": _what_fits(run, prediction),
    }
    fits: dict[str, Any] = {
        "fits": found.verdict.fits,
        "verdict": found.verdict.state,
        "why_tight": found.verdict.why_tight,
        "deciding_tier": deciding_tier(prediction, memory, run.device, p.estimate.headroom_percent),
        "reserved_replayed": replayed,
        "duration": duration,
    }
    if (traffic := traffic_of(run)) is not None:
        fits |= {name: size for name, size in traffic.as_json(1).items() if "node" not in name}
    figures = {**_figures(fullest, prediction, by_phase, documents), **(memory.metrics() if memory else {}), **fits}
    with atomic_directory(out) as aside:
        for name, content in {**documents, FIGURES: figures}.items():
            (write_json if name in FOR_PEOPLE else write_sealed)(aside / name, content)
        write_csv(aside / "advice.csv", ADVICE_COLUMNS, [remedy.as_row() for remedy in found.remedies])
        if memory is not None:  # Else DVC would draw an empty plot.
            write_csv(aside / "reserved.csv", RESERVED_COLUMNS, memory.rows())
        write_csv(aside / "timeline.csv", TIMELINE_COLUMNS, explanation.timeline)
        write_csv(aside / "switches.csv", ["switch", "peak_gib"], as_rows(switches))
        seal_tables(aside)
    write_json(metrics, {name: figures[name] for name in RESULTS})
    if found.verdict.refusal is not None:
        echo(f"{found.verdict.state}: {found.verdict.refusal}", err=True)


def _echo_choices(run: Run) -> None:
    """Report the precision that `auto` chose, what is not loaded, and notes on kernels and the environment."""
    if run.params.train.precision == "auto":
        echo(f"train.precision: auto is {run.setting.train.precision}: {run.reasons['precision']}")
    if (left_out := not_loaded(run)) is not None:
        echo(f"not loaded: {left_out}")
    for note in notes_of(run):
        echo(f"note: {note}", err=True)


def _echo_verdict(run: Run, prediction: Prediction, memory: PlanMemory | None) -> None:
    """Report that a run does not fit before the search for advice, which takes longer than the prediction."""
    verdict = judge_run(run, prediction, memory)
    if not verdict.fits:
        sizes = f"{readable_size(prediction.peak.bytes)} of {readable_size(run.usable_bytes)} usable"
        sizes += "" if verdict.why_tight is None else f", {verdict.why_tight}"
        lack = run.shortage(prediction.offloaded_bytes) or sizes
        echo(f"{verdict.state} on {run.device.name}: {lack}; searching for what would", err=True)


def _phases(run: Run, prediction: Prediction, heldout_index: Path, *, continued: bool) -> dict[str, Peak]:
    """Peak of every phase; notes if another phase needs more than training. `continued`: adapters go on."""
    assert run.planned is not None
    p, plan, model = run.params, run.planned.own_plan, run.model
    limits = EvaluationLimits.from_params(p, read_supervised(heldout_index))
    prompts, in_training = p.evaluate.generate_rows, int(plan.padded_tokens[plan.step == 0].max())
    lengths, attached = read_lengths(heldout_index), read_attached(heldout_index) if plan.attached else ()
    longest = max(run.longest, int(lengths.max(initial=0)))
    losses = [[heldout_shape(budget, longest)] for budget in (in_training, limits.max_tokens)]
    generation = generation_shapes(limits, prompts=prompts, longest=longest, positions=max_positions(run.config))
    model = replace(model, fakes=model.fakes.with_rows(attached, plan.attached))
    losses[0] += shapes_carried(lengths, attached, in_training, run.planned.plan.most)
    losses[1] += shapes_carried(lengths, attached, limits.max_tokens)
    if generation:
        generation += tuple(prompts_carried(lengths, attached, limits))
    around = OtherPhases(
        stored_dtype=run.stored,
        in_training=tuple(losses[0]),
        evaluation=tuple(losses[1]),
        logits_chunk=limits.logits_chunk,
        generation=generation,
        merged=p.evaluate.merged,
        reference=reference_shape(longest) if run.setting.train.goal.has_reference else None,
        continued=continued,
    )
    training = prediction.by_phase
    phases = {**training, **other_phases(model, around, training["optimizer"])}
    peak_bytes = prediction.peak.bytes
    notes = (
        loading_note(phases[LOAD].bytes, peak_bytes),
        reference_note(phases, peak_bytes),
        evaluation_note(phases, peak_bytes, limits.max_tokens, longest),
    )
    for note in filter(None, notes):
        echo(f"note: {note}", err=True)
    return phases


def _tiers(run: Run, prediction: Prediction, memory: PlanMemory | None) -> dict[str, Any] | None:
    """Content of tiers.json for a GPU; of the worst micro-batches if no plan was replayed."""
    if run.device.kind != "cuda":
        return None
    if memory is None:
        steps = prediction.steps_of_peak
        events, _ = step_events(run.model, steps)
        memory = replay_steps(events, steps, expandable=run.expandable, device=run.device, gpus=run.setting.gpus)
    return memory.tiers()


def _process(run: Run, prediction: Prediction) -> dict[str, Any] | None:
    """Content of process.json for a GPU: memory of its process and of the host besides tensors."""
    if run.device.kind != "cuda":
        return None
    tokens, offloaded_bytes = run.most_tokens, prediction.offloaded_bytes
    host = on_host(run.config, run.setting, run.stored, batch_tokens=tokens, offloaded_bytes=offloaded_bytes)
    return as_json(run.device, run.setting, host)


def _what_fits(run: Run, prediction: Prediction) -> dict[str, Any]:
    """Content of what_fits.json."""
    if run.device.kind != "cuda":
        return {"reason": "searched for GPUs only: name one in hardware.gpu, or use `lean-finetune fit`"}
    return {"reason": None, **asdict(find_limits(run, prediction.peak.bytes))}


def _stage_layers(prediction: Prediction) -> dict[str, list[int]]:
    """The part of verdict.json by which train splits the layers; empty without a pipeline."""
    return {"stage_layers": [layers for layers, _ in prediction.stages]} if prediction.stages else {}


def _figures(
    run: Run, prediction: Prediction, by_phase: Mapping[str, Peak], documents: Mapping[str, Any]
) -> dict[str, Any]:
    """Content of figures.json, without the verdict and the replay."""
    process = documents["process.json"]
    of_model = {
        "experts": run.experts,
        "fused_kernels": memory_note(run.params.train.fused_kernels),
        "linear_attention": run.linear_attention,
        "not_loaded": not_loaded(run),
        "weights": format_text(run.config),
    }
    return {
        "peak_bytes_predicted": prediction.peak.bytes,
        "peak_gib_predicted": round(prediction.peak.bytes / GIB, 6),
        "offloaded_bytes_predicted": prediction.offloaded_bytes,
        "disk_bytes_predicted": disk_state_bytes(run.config, run.setting),
        "predicted_by_phase": {phase: peak.bytes for phase, peak in by_phase.items()},
        "worst_phase": prediction.worst_phase,
        "layers_traced": prediction.layers_traced,
        **({"peak_bytes_by_stage": [peak for _, peak in prediction.stages]} if prediction.stages else {}),
        "gpu": run.device.name,
        "gpu_reason": run.reasons["gpu"],
        "capacity_gib": round(run.device.memory_bytes / GIB, 2),
        "attention": run.attention,
        **{name: text for name, text in of_model.items() if text is not None},
        "host_bytes_predicted": process and process["host_needed_bytes"],
        "host_of_process": process and process["host_of_process"],
        "processes_per_host": process and process["processes_per_host"],
        **tiers_metrics(documents["tiers.json"], expandable=run.expandable),
    }
