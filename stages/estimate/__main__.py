"""Predict the peak memory of training before training: `python -m stages.estimate`."""

import stages.endings  # noqa: F401 - first: Ctrl-C ends in silence from here on, and the others take seconds to import

# isort: split
from pathlib import Path
from typing import Any

import click
import torch

from stages.bucket.run_cut import RunCut
from stages.declared import read_params
from stages.errors import StageCommand, UserError
from stages.estimate.answer import answer
from stages.estimate.devices import Device
from stages.estimate.explain import host_state_bytes, trace_origins
from stages.estimate.gpus import GPUS
from stages.estimate.kernels import target_of
from stages.estimate.phases import note_of_asking, other_phases
from stages.estimate.plan_memory import PlanMemory
from stages.estimate.planned import Confirmation
from stages.estimate.predict import Prediction
from stages.estimate.process import as_json, on_device, on_host
from stages.estimate.publish import Found, publish
from stages.estimate.read_run import Asked, read_run
from stages.estimate.standalone import tell_what_fits
from stages.estimate.switches import Switch, halving_flag, trace_switches
from stages.estimate.tiers import tiers
from stages.estimate.trace import Peak
from stages.estimate.verdict import judge, usable_bytes
from stages.estimate.what_fits import turn_round
from stages.estimate.workload import Workload
from stages.model.segments import notes_on_environment
from stages.params import Params
from stages.step.limits import Limits
from stages.units import GIB, readable_size

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
    asked = read_run(p, plan_path, index, model_lock)
    planned, auto_precision = asked.planned, p.train.precision == "auto"
    if auto_precision:
        click.echo(f"train.precision: auto is {asked.precision}: {asked.precision_reason}")
    for note in notes_on_environment(p.train.expandable_segments) if planned.device.kind == "cuda" else ():
        click.echo(f"note: {note}", err=True)
    prediction, explanation = planned.predict()
    memory, replayed = planned.replay(prediction)
    _tell_verdict(p, prediction, planned.device, memory)
    switches = _switches(p, asked, prediction)
    run = asked.workload(p, prediction)
    headroom, cut = p.estimate.headroom_percent, RunCut.from_params(p)
    confirm = Confirmation(planned=planned, run=run, cut=cut, index=index, headroom_percent=headroom)
    process, worst = _beside_tensors(asked, prediction)
    found = Found(
        prediction=prediction,
        explanation=explanation,
        by_phase=_phases(p, asked, prediction),
        switches=switches,
        memory=memory,
        replayed=replayed,
        answer=answer(run, prediction, planned.device, p, memory, lambda candidate, _: confirm(candidate.run)),
        inverse=_inverse(p, asked, run, prediction),
        process=process,
        reserved=worst if memory is None or worst is None else memory.tiers(worst),
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


def _switches(p: Params, asked: Asked, prediction: Prediction) -> list[Switch]:
    """What each single switch would make of the peak."""
    device = asked.planned.device
    return trace_switches(
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
    note = note_of_asking(phases, prediction.peak.bytes, Limits.from_params(p).max_tokens, asked.longest)
    if note is not None:
        click.echo(f"note: {note}", err=True)
    return phases


def _beside_tensors(asked: Asked, prediction: Prediction) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """(process.json, tiers.json of the worst micro-batches) of a GPU; nothing for a CPU, which reserves nothing."""
    config, setting, device = asked.config, asked.setting, asked.planned.device
    if device.kind != "cuda":
        return None, None
    host = on_host(
        config,
        setting.model,
        asked.stored,
        batch_tokens=int(asked.planned.own_plan.padded_tokens.max()),
        sharding="none" if setting.sharing is None else setting.sharing.spec.mode,
        pinned_bytes=prediction.offloaded_bytes if setting.offload_activations == "cpu" else 0,
        optimizer_bytes=host_state_bytes(config, setting),
    )
    origins = trace_origins(config, setting, prediction.steps_of_peak, target_of(device))
    gpus = 1 if setting.sharing is None else setting.sharing.gpus
    process = as_json(on_device(device, gpus), host, gpus, setting.model.method)
    return process, tiers(origins, device.memory_bytes, device.context)


def _inverse(p: Params, asked: Asked, run: Workload, prediction: Prediction) -> dict[str, Any]:
    """The content of what_fits.json."""
    device = asked.planned.device
    if device.kind != "cuda":
        return {"reason": "asked of GPUs only: name one in hardware.gpu, or see --what-fits"}
    positions = getattr(asked.config.get_text_config(), "max_position_embeddings", None)
    headroom = p.estimate.headroom_percent
    found = turn_round(run, device, peak_bytes=prediction.peak.bytes, headroom_percent=headroom, positions=positions)
    return {"reason": None, **found.as_json()}


def _list_gpus() -> None:
    """Print the table of known GPUs."""
    click.echo(f"{'name':<18}{'memory GiB':>11}{'bf16':>6}{'compute capability':>20}")
    for gpu in GPUS:
        major, minor = gpu.compute_capability
        bf16 = "yes" if gpu.native_bf16 else "no"
        click.echo(f"{gpu.name:<18}{gpu.memory_bytes / GIB:>11.2f}{bf16:>6}{f'{major}.{minor}':>20}")


if __name__ == "__main__":
    main()
