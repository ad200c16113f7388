"""The stage: predictions of the planned run, its verdict, advice, and what is written of them."""

from pathlib import Path
from typing import Any

import click
import torch

from lean_finetune.config.schema import Params
from lean_finetune.core.units import readable_size
from lean_finetune.memory.advice.largest_that_fits import find_limits
from lean_finetune.memory.advice.one_change_sweep import SweepPoint, halving_flag, sweep_switches
from lean_finetune.memory.advice.verdict import judge, usable_bytes
from lean_finetune.memory.advice.verdict_with_advice import answer
from lean_finetune.memory.advice.workload import Workload
from lean_finetune.memory.allocator.plan_memory import PlanMemory, replay_steps
from lean_finetune.memory.devices import Device
from lean_finetune.memory.estimate.planned_inputs import Asked, read_run
from lean_finetune.memory.estimate.planned_run import Confirmation
from lean_finetune.memory.estimate.publish_estimate import Found, publish
from lean_finetune.memory.predict.other_phases import evaluation_note, other_phases
from lean_finetune.memory.predict.peak import Prediction
from lean_finetune.memory.predict.peak_explanation import trace_origins
from lean_finetune.memory.predict.process_memory import as_json, on_device, on_host
from lean_finetune.memory.predict.state_formulas import host_state_bytes
from lean_finetune.memory.trace.cuda_kernels import target_of
from lean_finetune.memory.trace.memory_trace import Peak
from lean_finetune.model.allocator_settings import environment_notes
from lean_finetune.plan.planner import PlanSettings
from lean_finetune.step.evaluation_limits import EvaluationLimits


def run_stage(p: Params, plan_path: Path, index: Path, model_lock: Path, out: Path, metrics: Path) -> None:
    """Predict the planned run, judge it, and write data/estimate and the metrics.

    Args:
        p: the parameters.
        plan_path: the plan of stage bucket.
        index: lengths of the rows.
        model_lock: the pinned base.
        out: directory of the verdict and its details.
        metrics: file of the results.
    """
    torch.set_num_threads(p.run.cpu_threads or torch.get_num_threads())  # As train: CPU kernels buffer per thread.
    asked = read_run(p, plan_path, index, model_lock)
    planned, auto_precision = asked.planned, p.train.precision == "auto"
    if auto_precision:
        click.echo(f"train.precision: auto is {asked.precision}: {asked.precision_reason}")
    for note in environment_notes(p.train.expandable_segments) if planned.device.kind == "cuda" else ():
        click.echo(f"note: {note}", err=True)
    prediction, explanation = planned.predict()
    memory, replayed = planned.replay(prediction)
    _tell_verdict(p, prediction, planned.device, memory)
    switches = _switches(p, asked, prediction)
    run = asked.workload(p, prediction)
    headroom, cut = p.estimate.headroom_percent, PlanSettings.from_params(p)
    confirm = Confirmation(planned=planned, run=run, cut=cut, index=index, headroom_percent=headroom)
    found = Found(
        prediction=prediction,
        explanation=explanation,
        by_phase=_phases(p, asked, prediction),
        switches=switches,
        memory=memory,
        replayed=replayed,
        answer=answer(run, prediction, planned.device, p, memory, lambda candidate, _: confirm(candidate.run)),
        inverse=_inverse(p, asked, run, prediction),
        process=_process(asked, prediction),
        reserved=_tiers(asked, prediction, memory),
    )
    publish(asked, found, out, metrics, auto_precision=auto_precision)
    if (refusal := found.answer.verdict.refusal) is not None:
        click.echo(f"does not fit: {refusal}", err=True)


def _tell_verdict(p: Params, prediction: Prediction, device: Device, memory: PlanMemory | None) -> None:
    """Say at once that a run does not fit: what would is searched for longer than the prediction takes."""
    headroom = p.estimate.headroom_percent
    verdict = judge(prediction, device, (), headroom_percent=headroom, enforce=p.estimate.enforce, memory=memory)
    if not verdict.fits:
        usable = readable_size(usable_bytes(device, headroom))
        peak = readable_size(prediction.peak.bytes)
        click.echo(f"does not fit {device.name}: {peak} of {usable} usable; searching for what would", err=True)


def _switches(p: Params, asked: Asked, prediction: Prediction) -> list[SweepPoint]:
    """What each single switch would make of the peak."""
    device = asked.planned.device
    return sweep_switches(
        asked.config,
        asked.setting,
        target_of(device),
        prediction,
        smaller_batch=halving_flag(p.bucket, asked.longest),
        native_bf16=device.native_bf16,
        progress=p.run.progress,
    )


def _phases(p: Params, asked: Asked, prediction: Prediction) -> dict[str, Peak]:
    """The peak of every phase, also of loading, asking and saving; tells where asking takes more than training."""
    target, training = target_of(asked.planned.device), prediction.by_phase
    others = other_phases(asked.config, asked.setting, asked.surroundings(p), target, training["optimizer"])
    phases = {**training, **others}
    note = evaluation_note(phases, prediction.peak.bytes, EvaluationLimits.from_params(p).max_tokens, asked.longest)
    if note is not None:
        click.echo(f"note: {note}", err=True)
    return phases


def _tiers(asked: Asked, prediction: Prediction, memory: PlanMemory | None) -> dict[str, Any] | None:
    """Return the content of tiers.json for a GPU, of the worst micro-batches where no plan was replayed."""
    planned = asked.planned
    if planned.device.kind != "cuda":
        return None
    if memory is None:
        steps = prediction.steps_of_peak
        trace = trace_origins(asked.config, asked.setting, steps, target_of(planned.device))
        memory = replay_steps(trace, steps, expandable=planned.expandable, device=planned.device)
    return memory.tiers()


def _process(asked: Asked, prediction: Prediction) -> dict[str, Any] | None:
    """Return the content of process.json for a GPU: what its process and the host hold besides tensors."""
    config, setting, device = asked.config, asked.setting, asked.planned.device
    if device.kind != "cuda":
        return None
    host = on_host(
        config,
        setting.model,
        asked.stored,
        batch_tokens=int(asked.planned.own_plan.padded_tokens.max()),
        sharding="none" if setting.sharing is None else setting.sharing.spec.mode,
        pinned_bytes=prediction.offloaded_bytes if setting.offload_activations == "cpu" else 0,
        optimizer_bytes=host_state_bytes(config, setting),
    )
    gpus = 1 if setting.sharing is None else setting.sharing.gpus
    return as_json(on_device(device, gpus), host, gpus, setting.model.method)


def _inverse(p: Params, asked: Asked, run: Workload, prediction: Prediction) -> dict[str, Any]:
    """The content of what_fits.json."""
    device = asked.planned.device
    if device.kind != "cuda":
        return {"reason": "asked of GPUs only: name one in hardware.gpu, or ask `lean-finetune fit`"}
    positions = getattr(asked.config.get_text_config(), "max_position_embeddings", None)
    headroom = p.estimate.headroom_percent
    found = find_limits(run, device, peak_bytes=prediction.peak.bytes, headroom_percent=headroom, positions=positions)
    return {"reason": None, **found.as_json()}
