"""Fine-tune as planned: `python -m stages.train`."""

import stages.endings  # noqa: F401 - first: Ctrl-C ends in silence from here on, and the others take seconds to import

# isort: split
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import click
import numpy as np
import torch
from tqdm import tqdm

from stages.bucket.plan import how_cut, read_plan
from stages.declared import parameter_values, read_params
from stages.dist.agree import Voices
from stages.dist.launch import as_one_of_many, launcher
from stages.dist.shard import ShardSpec
from stages.dist.world import World, joined, under_torchrun
from stages.errors import StageCommand
from stages.files import atomic_directory, read_json, write_csv, write_json, write_text
from stages.model.load import read_config
from stages.model.precision import precision_of
from stages.model.segments import use_segments
from stages.model.spec import ModelSpec
from stages.params import Params, Run
from stages.pin.locate import model_directory, verify_files
from stages.step.batches import refuse_other_ranks, refuse_other_tokens
from stages.step.in_backward import refuse_in_backward
from stages.step.offload import make_offload
from stages.step.optim import OptimSpec
from stages.step.optimizers import paging_note
from stages.step.step import StepSpec
from stages.step.tokens import TokenRows
from stages.train.card import model_card
from stages.train.device import check_attention, check_device, check_host, check_offload
from stages.train.heartbeat import heartbeat
from stages.train.identity import key_of_all, learnt_rows, run_key
from stages.train.loop import CURVE_COLUMNS, TrainJob, measured_steps, train
from stages.train.measure import make_meter
from stages.train.metrics import train_metrics
from stages.train.oom import SAVE, Failure, OutOfMemory
from stages.train.oom_report import Forecast, out_of_memory, read_forecast
from stages.train.orphan import end_with_parent
from stages.train.place import scratch_root
from stages.train.ranks import most_of_all, started_ranks, take_place, told_of_waiting
from stages.train.recorded import explained
from stages.train.recover import Ending
from stages.train.resume import opened
from stages.train.save import Merge, save_tuned
from stages.train.signals import Stop, stopped_by_signals
from stages.train.together import opened_together

PATH = click.Path(path_type=Path)
SCRATCH = Path("scratch")
SHARING = ("sharding", "shard_group_gpus")


@click.command(cls=StageCommand)
@click.option("--tokens", type=PATH, default="data/tokens", show_default=True, help="Token files of stage tokenize.")
@click.option("--batches", type=PATH, default="data/batches", show_default=True, help="Batch plan of stage bucket.")
@click.option("--verdict", type=PATH, default="data/estimate/verdict.json", show_default=True, help="Does it fit?")
@click.option("--estimate", type=PATH, default="metrics/estimate.json", show_default=True, help="Predicted peak.")
@click.option("--model-lock", type=PATH, default="locks/model.json", show_default=True, help="The pinned model.")
@click.option("--tokenizer-lock", type=PATH, default="locks/tokenizer.json", show_default=True, help="Its tokenizer.")
@click.option("--data-lock", type=PATH, default="locks/data.json", show_default=True, help="The pinned data.")
@click.option("--out", type=PATH, default="data/tuned", show_default=True, help="Adapter or model, safetensors.")
@click.option("--curves", type=PATH, default="data/train", show_default=True, help="Curves and model card.")
@click.option("--metrics", type=PATH, default="metrics/train.json", show_default=True, help="Metrics.")
@click.option("--explain", type=PATH, help="Train nothing: say why memory grows in a recorded curve (a CSV file).")
@click.option("--left-gib", type=click.FloatRange(min=0), help="With --explain: memory still free at its end.")
def main(explain: Path | None, left_gib: float | None, **paths: Path) -> None:
    """Fine-tune the pinned model on the planned batches.

    Refuses a run that is predicted not to fit (unless estimate.enforce is false), trains, and writes the weights, a
    model card, per-step curves and the measured peak memory.
    """
    if "DVC_STAGE" in os.environ or under_torchrun():
        end_with_parent(launcher())
    if explain is not None:
        click.echo("\n".join(explained(explain, left_gib)))
        return
    params = read_params()
    if started_ranks(params.hardware.num_gpus, SCRATCH / "train" / "ranks"):
        return
    world = World.here()
    threads = params.run.cpu_threads or torch.get_num_threads()
    with as_one_of_many(world):
        device = take_place(world, params.hardware.num_gpus, params.run.cpu_threads)
        with joined(world, device, params.run.rank_timeout_seconds):
            _run(params, world, device, threads, **paths)


def _run(
    params: Params,
    world: World,
    device: torch.device,
    threads: int,
    *,
    tokens: Path,
    batches: Path,
    verdict: Path,
    estimate: Path,
    model_lock: Path,
    tokenizer_lock: Path,
    data_lock: Path,
    out: Path,
    curves: Path,
    metrics: Path,
) -> None:
    """The stage, as one of the processes of `world`, which have so many `threads` on this machine."""
    if note := use_segments(params.train.expandable_segments, device):
        click.echo(f"note: {note}", err=True)
    spec = ModelSpec.from_params(params, precision_of(params, verdict))
    predicted = read_json(estimate)
    check_device(device, spec, read_json(verdict), predicted)
    check_offload(params.train.offload_activations, predicted["offloaded_bytes_predicted"], SCRATCH)
    check_host(params.train.offload, device, predicted)
    if note := paging_note(params.train.optimizer, device):
        click.echo(f"note: {note}", err=True)
    lock = read_json(model_lock)
    directory = model_directory(lock)
    check_attention(device, read_config(directory), spec)
    if world.local_rank == 0:  # Every process of a node reads the same files.
        verify_files(directory, lock["files"])
    plan_file = batches / "plan.arrow"
    plan = read_plan(plan_file)
    refuse_other_ranks(plan, world.size)
    rows = TokenRows(tokens, "train")
    refuse_other_tokens(plan, rows.lengths)
    if params.train.optimizer_in_backward:
        refuse_in_backward(spec, np.diff(plan.step_bounds))
    meter = make_meter(device)
    job = TrainJob(
        model_directory=directory,
        plan=plan,
        rows=rows,
        heldout=TokenRows(tokens, "heldout"),
        pad_id=read_json(tokens / "meta.json")["pad_id"],
        model_spec=spec,
        optim_spec=OptimSpec.from_params(params),
        step_spec=StepSpec(
            loss_chunk=params.train.loss_chunk,
            max_grad_norm=params.train.max_grad_norm,
            foreach=device.type == "cuda",
            optimizer_in_backward=params.train.optimizer_in_backward,
        ),
        offload=make_offload(params.train.offload_activations, device, SCRATCH),
        heldout_every_steps=params.train.heldout_every_steps,
        heldout_rows=params.train.heldout_rows,
        measured_steps=measured_steps(plan, rows.lengths),
        loader_threads=params.run.loader_threads,
        device=device,
        progress=params.run.progress and world.leads,
        world=world,
        sharing=ShardSpec.from_params(params),
    )
    values = {key: value for key, value in parameter_values(params).items() if key != "run"}
    read = {"tokens": tokens, "model": model_lock, "tokenizer": tokenizer_lock, "data": data_lock}
    decided = {
        "seed": values["seed"],
        # How GPUs share a step decides no more than rounding: another number of them goes on from the same checkpoint.
        "train": {name: value for name, value in values["train"].items() if name not in SHARING},
        "cut": how_cut(plan_file),
        "rows": learnt_rows(plan),
        "precision": spec.precision,
    }
    stop = Stop()
    with ExitStack() as stack:
        begun = stack.enter_context(heartbeat(scratch_root() / "running", _told)).begun
        stack.enter_context(stopped_by_signals(stop))
        voices = Voices(world, device)
        key = key_of_all(lambda: run_key(decided, read, device, threads), voices)
        if world.size == 1:
            keeper = stack.enter_context(opened(scratch_root() / key, run=params.run, stop=stop, told=_told))
        else:
            keeper = stack.enter_context(
                opened_together(
                    scratch_root() / key,
                    run=params.run,
                    stop=stop,
                    told=_told,
                    voices=voices,
                    sharding=params.train.sharding,
                )
            )
        ending = _ending(job, params.run, lambda: read_forecast(predicted, verdict.parent), begun)
        with told_of_waiting(ending.place, world, params.run.rank_timeout_seconds), ending.told():
            result = train(job, meter, keeper, ending)
            tokenizer_files = list(read_json(tokenizer_lock)["files"])
            merge = Merge(spec=spec, files=[*lock["files"], *tokenizer_files]) if params.train.merge else None
            with ending.place.inside(SAVE):
                save_tuned(result.team, lock["name"], directory, tokenizer_files, out, merge)
        numbers = train_metrics(result, most_of_all(meter.result(), result.team, device), device)
        if not world.leads:
            return
        with atomic_directory(curves) as aside:
            write_csv(aside / "curves.csv", CURVE_COLUMNS, result.curves)
            card = model_card(model_lock=lock, data_lock=read_json(data_lock), params=values, metrics=numbers)
            write_text(aside / "MODEL_CARD.md", card)
        write_json(metrics, numbers)


def _ending(job: TrainJob, run: Run, forecast: Callable[[], Forecast], begun: Callable[[int], None]) -> Ending:
    """What is done when memory ends; `forecast` is read then."""
    name = torch.cuda.get_device_name(job.device) if job.device.type == "cuda" else "this machine"
    split = run.oom_recovery == "split"

    def report(failure: Failure) -> OutOfMemory:
        record = scratch_root() / "oom.json"
        return out_of_memory(failure, forecast(), device=name, split=split, record=record)

    return Ending(
        job.device,
        split=split,
        updates_in_backward=job.step_spec.optimizer_in_backward,
        report=report,
        begun=begun,
    )


def _told(line: str) -> None:
    """A line for the user, above the progress bar where there is one."""
    tqdm.write(line, file=sys.stderr)


if __name__ == "__main__":
    main()
