"""Stage estimate: predict the planned run, judge whether it fits, search for advice, and write the results."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import torch

from lean_finetune.config.schema import Params
from lean_finetune.core.units import readable_size
from lean_finetune.memory.advice.largest_that_fits import find_limits
from lean_finetune.memory.advice.one_change_sweep import SweepPoint, halving_flag, sweep_switches
from lean_finetune.memory.advice.verdict import answer, judge
from lean_finetune.memory.advice.workload import Workload
from lean_finetune.memory.allocator.plan_memory import PlanMemory, replay_steps
from lean_finetune.memory.devices import Device
from lean_finetune.memory.estimate.planned_inputs import EstimateInputs, read_run
from lean_finetune.memory.estimate.planned_run import FitCheck
from lean_finetune.memory.estimate.publish_estimate import EstimateResults, publish
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
    """Predict the planned run, judge it, and write the directory `out` and the file `metrics`.

    It reads the plan of stage bucket, the index of the training rows and the lock file of the base model.
    """
    # As in train: CPU kernels have buffers per thread.
    torch.set_num_threads(p.run.cpu_threads or torch.get_num_threads())
    inputs = read_run(p, plan_path, index, model_lock)
    planned, auto_precision = inputs.planned, p.train.precision == "auto"
    if auto_precision:
        click.echo(f"train.precision: auto is {inputs.precision}: {inputs.precision_reason}")
    for note in environment_notes(p.train.expandable_segments) if planned.device.kind == "cuda" else ():
        click.echo(f"note: {note}", err=True)
    prediction, explanation = planned.predict()
    memory, replayed = planned.replay(prediction)
    _echo_verdict(p, prediction, planned.device, memory)
    switches = _switches(p, inputs, prediction)
    run = inputs.workload(p, prediction)
    headroom, plan_settings = p.estimate.headroom_percent, PlanSettings.from_params(p)
    confirm = FitCheck(planned=planned, run=run, plan_settings=plan_settings, index=index, headroom_percent=headroom)
    results = EstimateResults(
        prediction=prediction,
        explanation=explanation,
        by_phase=_phases(p, inputs, prediction),
        switches=switches,
        memory=memory,
        replayed=replayed,
        answer=answer(run, prediction, planned.device, p, memory, lambda candidate, _: confirm(candidate.run)),
        inverse=_inverse(p, inputs, run, prediction),
        process=_process(inputs, prediction),
        reserved=_tiers(inputs, prediction, memory),
    )
    publish(inputs, results, out, metrics, auto_precision=auto_precision)
    if (refusal := results.answer.verdict.refusal) is not None:
        click.echo(f"does not fit: {refusal}", err=True)


def _echo_verdict(p: Params, prediction: Prediction, device: Device, memory: PlanMemory | None) -> None:
    """Report that a run does not fit before the search for advice, which takes longer than the prediction."""
    headroom = p.estimate.headroom_percent
    verdict = judge(prediction, device, (), headroom_percent=headroom, enforce=p.estimate.enforce, memory=memory)
    if not verdict.fits:
        usable = readable_size(device.usable_bytes(headroom))
        peak = readable_size(prediction.peak.bytes)
        click.echo(f"does not fit {device.name}: {peak} of {usable} usable; searching for what would", err=True)


def _switches(p: Params, inputs: EstimateInputs, prediction: Prediction) -> list[SweepPoint]:
    """The peak after each single change of a switch."""
    device = inputs.planned.device
    return sweep_switches(
        inputs.config,
        inputs.setting,
        target_of(device),
        prediction,
        smaller_batch=halving_flag(p.bucket, inputs.longest),
        native_bf16=device.native_bf16,
        progress=p.run.progress,
    )


def _phases(p: Params, inputs: EstimateInputs, prediction: Prediction) -> dict[str, Peak]:
    """Peak of every phase, with loading, evaluation and saving; notes if evaluation needs more than training."""
    target, training = target_of(inputs.planned.device), prediction.by_phase
    others = other_phases(inputs.config, inputs.setting, inputs.other_phases(p), target, training["optimizer"])
    phases = {**training, **others}
    note = evaluation_note(phases, prediction.peak.bytes, EvaluationLimits.from_params(p).max_tokens, inputs.longest)
    if note is not None:
        click.echo(f"note: {note}", err=True)
    return phases


def _tiers(inputs: EstimateInputs, prediction: Prediction, memory: PlanMemory | None) -> dict[str, Any] | None:
    """Content of tiers.json for a GPU; of the worst micro-batches if no plan was replayed."""
    planned = inputs.planned
    if planned.device.kind != "cuda":
        return None
    if memory is None:
        steps = prediction.steps_of_peak
        trace = trace_origins(inputs.config, inputs.setting, steps, target_of(planned.device))
        memory = replay_steps(trace, steps, expandable=planned.expandable, device=planned.device)
    return memory.tiers()


def _process(inputs: EstimateInputs, prediction: Prediction) -> dict[str, Any] | None:
    """Content of process.json for a GPU: memory of its process and of the host besides tensors."""
    config, setting, device = inputs.config, inputs.setting, inputs.planned.device
    if device.kind != "cuda":
        return None
    host = on_host(
        config,
        setting.model,
        inputs.stored,
        batch_tokens=int(inputs.planned.own_plan.padded_tokens.max()),
        sharding="none" if setting.sharing is None else setting.sharing.spec.mode,
        pinned_bytes=prediction.offloaded_bytes if setting.offload_activations == "cpu" else 0,
        optimizer_bytes=host_state_bytes(config, setting),
    )
    gpus = 1 if setting.sharing is None else setting.sharing.gpus
    return as_json(on_device(device, gpus), host, gpus, setting.model.method)


def _inverse(p: Params, inputs: EstimateInputs, run: Workload, prediction: Prediction) -> dict[str, Any]:
    """Content of what_fits.json."""
    device = inputs.planned.device
    if device.kind != "cuda":
        return {"reason": "asked of GPUs only: name one in hardware.gpu, or ask `lean-finetune fit`"}
    positions = getattr(inputs.config.get_text_config(), "max_position_embeddings", None)
    headroom = p.estimate.headroom_percent
    found = find_limits(run, device, peak_bytes=prediction.peak.bytes, headroom_percent=headroom, positions=positions)
    return {"reason": None, **asdict(found)}
