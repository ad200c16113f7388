"""Predict the peak memory of training before training: `python -m stages.estimate`."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import torch

from stages.bucket.plan import read_plan
from stages.declared import read_params
from stages.errors import StageCommand
from stages.estimate.devices import GIB, GPUS, Device, check_precision, resolve_gpu
from stages.estimate.explain import TIMELINE_COLUMNS, closed_form, explain, trace_origins
from stages.estimate.kernels import target_of
from stages.estimate.phases import Surroundings, heldout_shape, other_phases, stored_dtype
from stages.estimate.predict import Prediction, Setting, predict
from stages.estimate.shapes import longest_row, traced_steps
from stages.estimate.switches import halving_flag, trace_switches
from stages.estimate.tiers import tiers
from stages.estimate.trace import Peak
from stages.estimate.verdict import judge
from stages.files import atomic_directory, read_json, write_csv, write_json
from stages.model.load import attention_window, read_config, refuse_joined_rows, refuse_long_rows
from stages.model.spec import ModelSpec
from stages.pin.locate import config_directory
from stages.step.batches import refuse_other_tokens, refuse_several_ranks
from stages.step.tokens import read_lengths

PATH = click.Path(path_type=Path)


@click.command(cls=StageCommand)
@click.option("--plan", "plan_path", type=PATH, default="data/batches/plan.arrow", show_default=True)
@click.option("--index", type=PATH, default="data/tokens/train-index.arrow", show_default=True, help="Row lengths.")
@click.option("--model-lock", type=PATH, default="locks/model.json", show_default=True, help="The pinned base.")
@click.option("--out", type=PATH, default="data/estimate", show_default=True, help="Directory for the verdict.")
@click.option("--metrics", type=PATH, default="metrics/estimate.json", show_default=True)
@click.option("--list-gpus", is_flag=True, help="List the known GPUs and end.")
def main(plan_path: Path, index: Path, model_lock: Path, out: Path, metrics: Path, list_gpus: bool) -> None:
    """Predict the peak memory of training before training.

    The training step itself runs on tensors without storage, over the worst micro-batches of the real plan; every
    allocation and free is counted. A run that does not fit ends this stage well: its verdict makes train refuse.
    """
    if list_gpus:
        return _list_gpus()
    p = read_params()
    torch.set_num_threads(p.run.cpu_threads or torch.get_num_threads())  # As train: CPU kernels buffer per thread.
    device, reason = resolve_gpu(p.hardware.gpu)
    check_precision(device, p.train.precision)
    plan = read_plan(plan_path)
    refuse_several_ranks(plan)
    lengths = read_lengths(index)
    refuse_other_tokens(plan, lengths)
    config = read_config(config_directory(read_json(model_lock)))
    stored = stored_dtype(config)
    longest = longest_row(plan, lengths)
    refuse_long_rows(config, longest)
    if plan.flat:
        refuse_joined_rows(config, longest)
    windowed = longest >= (attention_window(config) or math.inf)
    steps = traced_steps(plan, lengths, tiled=device.kind == "cuda", windowed=windowed)
    setting = Setting(
        model=ModelSpec.from_params(p),
        optimizer=p.train.optimizer,
        loss_chunk=p.train.loss_chunk,
        max_grad_norm=p.train.max_grad_norm,
    )
    target = target_of(device)
    prediction = predict(config, setting, steps, target)
    switches = trace_switches(
        config,
        setting,
        target,
        prediction,
        smaller_batch=halving_flag(p.bucket, longest),
        native_bf16=device.native_bf16,
        progress=p.run.progress,
    )
    verdict = judge(
        prediction,
        device,
        switches,
        headroom_percent=p.estimate.headroom_percent,
        enforce=p.estimate.enforce,
    )
    around = Surroundings(
        stored_dtype=stored,
        in_training=heldout_shape(int(plan.padded_tokens[plan.step == 0].max()), longest),
        evaluation=heldout_shape(p.evaluate.max_tokens, longest),
        logits_chunk=p.evaluate.logits_chunk,
    )
    by_phase = {**prediction.by_phase, **other_phases(config, setting, around, target)}
    origins = trace_origins(config, setting, prediction.steps_of_peak, target)
    explanation = explain(origins)
    reserved = tiers(origins, device.memory_bytes) if device.kind == "cuda" else None
    with atomic_directory(out) as aside:
        write_json(aside / "verdict.json", verdict.as_json())
        write_json(aside / "breakdown.json", _breakdown(by_phase, prediction.peak))
        states = list(closed_form(config, setting, target.granularity_bytes))
        write_json(aside / "explanation.json", {**explanation.as_json(), "states": states})
        write_json(aside / "tiers.json", reserved)
        write_csv(aside / "timeline.csv", TIMELINE_COLUMNS, explanation.timeline)
        rows = [{"switch": switch.label, "peak_gib": round(switch.peak_bytes / GIB, 6)} for switch in switches]
        write_csv(aside / "switches.csv", ["switch", "peak_gib"], rows)
    write_json(metrics, _metrics(prediction, by_phase, device, reason, reserved, fits=verdict.fits))
    if verdict.refusal is not None:
        click.echo(f"does not fit: {verdict.refusal}", err=True)


def _breakdown(by_phase: Mapping[str, Peak], highest: Peak) -> dict[str, dict[str, int]]:
    """Bytes by category at the peak of each phase, and at the highest of the training step as `peak`."""
    phases = {phase: dict(peak.by_category) for phase, peak in by_phase.items()}
    return {**phases, "peak": dict(highest.by_category)}


def _metrics(
    prediction: Prediction,
    by_phase: Mapping[str, Peak],
    device: Device,
    reason: str,
    reserved: dict[str, Any] | None,
    *,
    fits: bool,
) -> dict[str, Any]:
    """The content of metrics/estimate.json; `reserved` is what a GPU reserves, None on a CPU, which does not."""
    return {
        "peak_bytes_predicted": prediction.peak.bytes,
        "peak_gib_predicted": round(prediction.peak.bytes / GIB, 6),
        "predicted_by_phase": {phase: peak.bytes for phase, peak in by_phase.items()},
        "reserved_bytes_predicted": None if reserved is None else reserved["native"]["reserved_bytes"],
        "reserved_bytes_predicted_expandable": None if reserved is None else reserved["expandable"]["reserved_bytes"],
        "process_bytes_predicted": None if reserved is None else reserved["native"]["process_bytes"],
        "worst_phase": prediction.worst_phase,
        "fits": fits,
        "gpu": device.name,
        "gpu_reason": reason,
        "capacity_gib": round(device.memory_bytes / GIB, 2),
    }


def _list_gpus() -> None:
    """Print the table of known GPUs."""
    click.echo(f"{'name':<14}{'memory GiB':>11}{'bf16':>6}{'compute capability':>20}")
    for gpu in GPUS:
        major, minor = gpu.compute_capability
        bf16 = "yes" if gpu.native_bf16 else "no"
        click.echo(f"{gpu.name:<14}{gpu.memory_bytes / GIB:>11.2f}{bf16:>6}{f'{major}.{minor}':>20}")


if __name__ == "__main__":
    main()
