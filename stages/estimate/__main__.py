"""Predict the peak memory of training before training: `python -m stages.estimate`."""

import stages.endings  # noqa: F401 - first: Ctrl-C ends in silence from here on, and the others take seconds to import

# isort: split
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from transformers import PretrainedConfig

from stages.bucket.plan import Plan, read_plan
from stages.declared import read_params
from stages.errors import StageCommand, UserError
from stages.estimate.advice import ADVICE_COLUMNS
from stages.estimate.answer import Answer, answer
from stages.estimate.devices import GIB, GPUS, Device, attention_on, precision_on, resolve_gpu
from stages.estimate.explain import TIMELINE_COLUMNS, Explanation, closed_form, host_state_bytes, trace_origins
from stages.estimate.kernels import target_of
from stages.estimate.outputs import breakdown, metrics_of
from stages.estimate.phases import (
    Surroundings,
    generation_shapes,
    heldout_shape,
    note_of_asking,
    other_phases,
    stored_dtype,
)
from stages.estimate.plan_memory import RESERVED_COLUMNS, PlanMemory, replay_plan, tensors_alone
from stages.estimate.predict import Prediction, Setting
from stages.estimate.process import as_json, on_device, on_host
from stages.estimate.shapes import longest_row, traced_steps
from stages.estimate.standalone import tell_what_fits
from stages.estimate.switches import Switch, as_advice, halving_flag, trace_switches
from stages.estimate.tiers import tiers, tiers_metrics
from stages.estimate.unrolled import predict_explained
from stages.estimate.what_fits import turn_round
from stages.estimate.workload import Workload
from stages.files import atomic_directory, read_json, write_csv, write_json
from stages.model.attention import keeps_scores
from stages.model.load import attention_window, read_config, refuse_joined_rows, refuse_long_rows
from stages.params import Params
from stages.pin.locate import config_directory
from stages.step.batches import refuse_other_tokens
from stages.step.host import refuse_offloaded_state
from stages.step.in_backward import refuse_in_backward
from stages.step.limits import Limits
from stages.step.offload import refuse_offload
from stages.step.tokens import read_lengths

PATH = click.Path(path_type=Path)


@click.command(cls=StageCommand)
@click.option("--plan", "plan_path", type=PATH, default="data/batches/plan.arrow", show_default=True)
@click.option("--index", type=PATH, default="data/tokens/train-index.arrow", show_default=True, help="Row lengths.")
@click.option("--model-lock", type=PATH, default="locks/model.json", show_default=True, help="The pinned base.")
@click.option("--out", type=PATH, default="data/estimate", show_default=True, help="Directory for the verdict.")
@click.option("--metrics", type=PATH, default="metrics/estimate.json", show_default=True)
@click.option("--list-gpus", is_flag=True, help="List the known GPUs and end.")
@click.option("--what-fits", is_flag=True, help="Tell what fits, from params.yaml and a config alone, and end.")
@click.option("--gpu", help="With --what-fits: the device in place of hardware.gpu.")
@click.option("--model", type=PATH, help="With --what-fits: a directory or config.json in place of model.name.")
def main(
    plan_path: Path,
    index: Path,
    model_lock: Path,
    out: Path,
    metrics: Path,
    list_gpus: bool,
    what_fits: bool,
    gpu: str | None,
    model: Path | None,
) -> None:
    """Predict the peak memory of training before training.

    The training step itself runs on tensors without storage, over the worst micro-batches of the real plan; every
    allocation and free is counted. A run that does not fit ends this stage well: its verdict makes train refuse.
    """
    if list_gpus:
        return _list_gpus()
    if (gpu is not None or model is not None) and not what_fits:
        raise UserError("--gpu, --model: have an effect only with --what-fits; the stage reads params.yaml; add it")
    p = read_params()
    if what_fits:
        for line in tell_what_fits(p, gpu, model):
            click.echo(line)
        return
    _estimate(p, plan_path, index, model_lock, out, metrics)


def _estimate(p: Params, plan_path: Path, index: Path, model_lock: Path, out: Path, metrics: Path) -> None:
    """The stage."""
    torch.set_num_threads(p.run.cpu_threads or torch.get_num_threads())  # As train: CPU kernels buffer per thread.
    device, reason = resolve_gpu(p.hardware.gpu)
    precision, why = precision_on(device, p.train.precision)
    plan = read_plan(plan_path)
    lengths = read_lengths(index)
    refuse_other_tokens(plan, lengths)
    config = read_config(config_directory(read_json(model_lock)))
    stored = stored_dtype(config)
    longest = longest_row(plan, lengths)
    refuse_long_rows(config, longest)
    if plan.flat:
        refuse_joined_rows(config, longest)
    beyond_window = longest >= (attention_window(config) or math.inf)
    windowed = keeps_scores(config, p.train.attention) or beyond_window
    steps = traced_steps(plan, lengths, tiled=device.kind == "cuda", windowed=windowed)
    refuse_offload(p.train.offload_activations, device.kind)
    refuse_offloaded_state(p.train.offload, device.kind)
    several_turns = bool((np.diff(plan.step_bounds) > plan.ranks).any())
    setting = Setting.from_params(p, precision, several_turns=several_turns)
    plan = plan.of_rank(0) if plan.ranks > 1 else plan
    if setting.optimizer_in_backward:
        refuse_in_backward(setting.model, np.diff(plan.step_bounds))
    attention = attention_on(device, config, setting.model, masked=beyond_window and not plan.flat)
    target = target_of(device)
    prediction, explanation = predict_explained(config, setting, steps, target)
    switches = trace_switches(
        config,
        setting,
        target,
        prediction,
        smaller_batch=halving_flag(p.bucket, longest),
        native_bf16=device.native_bf16,
        progress=p.run.progress,
    )
    run = _workload(p, config, setting, prediction, plan, longest)
    chosen = None
    if p.train.precision == "auto":
        chosen = precision
        click.echo(f"train.precision: auto is {precision}: {why}")
    memory, replayed = None, None
    if device.kind == "cuda":
        memory, replayed = replay_plan(
            plan,
            lengths,
            config,
            setting,
            target,
            prediction,
            windowed=windowed,
            expandable=p.train.expandable_segments,
            capacity_bytes=device.memory_bytes,
        )
    found = answer(run, prediction, device, p, memory)
    inverse = _inverse(run, device, prediction.peak.bytes, p)
    around = _surroundings(p, plan, config, stored, longest)
    by_phase = {
        **prediction.by_phase,
        **other_phases(config, setting, around, target, prediction.by_phase["optimizer"]),
    }
    if (note := note_of_asking(by_phase, prediction.peak.bytes, Limits.from_params(p).max_tokens, longest)) is not None:
        click.echo(f"note: {note}", err=True)
    process, reserved = _beside_tensors(config, setting, prediction, plan, device, stored)
    with atomic_directory(out) as aside:
        write_json(aside / "verdict.json", found.verdict.as_json(chosen))
        write_json(aside / "breakdown.json", breakdown(by_phase, prediction.peak))
        states = list(closed_form(config, setting, target))
        write_json(aside / "explanation.json", {**explanation.as_json(), "states": states})
        write_json(aside / "tiers.json", reserved)
        write_json(aside / "process.json", process)
        write_json(aside / "what_fits.json", inverse)
        _write_tables(aside, found, explanation, switches, memory, prediction.peak.bytes)
    host_bytes = None if process is None else process["host_needed_bytes"]
    told = metrics_of(prediction, by_phase, device, reason, verdict=found.verdict)
    told |= tiers_metrics(reserved, p.train.expandable_segments)
    told |= {"attention": attention, "host_bytes_predicted": host_bytes, "reserved_replayed": replayed}
    write_json(metrics, told if memory is None else {**told, **memory.metrics()})
    if found.verdict.refusal is not None:
        click.echo(f"does not fit: {found.verdict.refusal}", err=True)


def _surroundings(p: Params, plan: Plan, config: PretrainedConfig, stored: torch.dtype, longest: int) -> Surroundings:
    """What runs besides the training step."""
    limits = Limits.from_params(p)
    return Surroundings(
        stored_dtype=stored,
        in_training=heldout_shape(int(plan.padded_tokens[plan.step == 0].max()), longest),
        evaluation=heldout_shape(limits.max_tokens, longest),
        logits_chunk=limits.logits_chunk,
        generation=generation_shapes(
            limits,
            prompts=p.evaluate.generate_rows,
            longest=longest,
            positions=getattr(config.get_text_config(), "max_position_embeddings", None),
        ),
        merged=p.evaluate.merged,
    )


def _beside_tensors(
    config: PretrainedConfig, setting: Setting, prediction: Prediction, plan: Plan, device: Device, stored: torch.dtype
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """(process.json, tiers.json) of a GPU; nothing for a CPU, which reserves nothing."""
    if device.kind != "cuda":
        return None, None
    pinned = prediction.offloaded_bytes if setting.offload_activations == "cpu" else 0
    host = on_host(
        config,
        setting.model,
        stored,
        batch_tokens=int(plan.padded_tokens.max()),
        pinned_bytes=pinned,
        optimizer_bytes=host_state_bytes(config, setting),
    )
    origins = trace_origins(config, setting, prediction.steps_of_peak, target_of(device))
    gpus = 1 if setting.sharing is None else setting.sharing.gpus
    return as_json(on_device(device, gpus), host, gpus), tiers(origins, device.memory_bytes)


def _write_tables(
    aside: Path,
    found: Answer,
    explanation: Explanation,
    switches: Sequence[Switch],
    memory: PlanMemory | None,
    peak_bytes: int,
) -> None:
    """Advice, and the data of the plots."""
    write_json(aside / "advice.json", {**found.as_json(), "single_changes": as_advice(switches)})
    write_csv(aside / "advice.csv", ADVICE_COLUMNS, [remedy.as_row() for remedy in found.remedies])
    by_step = [tensors_alone(peak_bytes)] if memory is None else memory.rows()
    write_csv(aside / "reserved.csv", RESERVED_COLUMNS, by_step)
    write_csv(aside / "timeline.csv", TIMELINE_COLUMNS, explanation.timeline)
    rows = [{"switch": switch.label, "peak_gib": round(switch.peak_bytes / GIB, 6)} for switch in switches]
    write_csv(aside / "switches.csv", ["switch", "peak_gib"], rows)


def _workload(
    p: Params, config: PretrainedConfig, setting: Setting, prediction: Prediction, plan: Plan, longest: int
) -> Workload:
    """The run as planned, for advice."""
    steps = len(plan.steps)
    return Workload(
        config=config,
        setting=setting,
        steps=prediction.steps_of_peak,
        mode=p.bucket.mode,
        max_tokens=p.bucket.max_tokens,
        fixed_rows=p.bucket.fixed_rows,
        longest=longest,
        tokens_per_step=float(plan.padded_tokens.sum()) / steps,
        micro_batches_per_step=len(plan) / steps,
    )


def _inverse(run: Workload, device: Device, peak_bytes: int, p: Params) -> dict[str, Any]:
    """The content of what_fits.json."""
    if device.kind != "cuda":
        return {"reason": "asked of GPUs only: name one in hardware.gpu, or see --what-fits"}
    positions = getattr(run.config.get_text_config(), "max_position_embeddings", None)
    headroom = p.estimate.headroom_percent
    found = turn_round(run, device, peak_bytes=peak_bytes, headroom_percent=headroom, positions=positions)
    return {"reason": None, **found.as_json()}


def _list_gpus() -> None:
    """Print the table of known GPUs."""
    click.echo(f"{'name':<14}{'memory GiB':>11}{'bf16':>6}{'compute capability':>20}")
    for gpu in GPUS:
        major, minor = gpu.compute_capability
        bf16 = "yes" if gpu.native_bf16 else "no"
        click.echo(f"{gpu.name:<14}{gpu.memory_bytes / GIB:>11.2f}{bf16:>6}{f'{major}.{minor}':>20}")


if __name__ == "__main__":
    main()
