"""Make the training job from parameters, locks and plan, and check it against the device."""

import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cuda_memory.units import MIB
from lean_finetune.config.declared_params import tracked_values
from lean_finetune.config.schema import Params, Train
from lean_finetune.core.atomic_files import read_sealed, sha256_json
from lean_finetune.core.errors import UserError
from lean_finetune.core.regular_files import read_regular
from lean_finetune.distributed.processes import World
from lean_finetune.model.allocator_settings import use_segments
from lean_finetune.model.merge_adapters import refuse_merge
from lean_finetune.model.model_config import chunk_tokens
from lean_finetune.pinning.locate import CHAT_TEMPLATE, NO_FILES, ModelFault
from lean_finetune.plan.batch_plan import (
    Plan,
    longest_row,
    read_plan,
    refuse_other_objective,
    worst_steps,
)
from lean_finetune.plan.row_checks import refuse_other_ranks, refuse_other_tokens
from lean_finetune.plan.step_tokens import planned_step_tokens
from lean_finetune.run.assets import Assets
from lean_finetune.run.rows import complete_rows
from lean_finetune.step.batches import token_part
from lean_finetune.step.offload.activation_offload import make_offload
from lean_finetune.step.offload.disk_weights import DiskPlace
from lean_finetune.step.parallel_model import host_bytes
from lean_finetune.step.run_optimizer import paging_note
from lean_finetune.step.token_rows import Split, TokenRows
from lean_finetune.step.unsupported import refuse_unsupported
from lean_finetune.train.job import TrainJob
from lean_finetune.train.process.training_device import (
    check_attention,
    check_device,
    check_host,
    check_offload,
    other_device_note,
)
from lean_finetune.train.usual_lr import lr_of

CONTROL_STEPS = 4
"""Steps that are measured besides those predicted to be the worst."""
SCRATCH = Path("scratch")


def measured_steps(plan: Plan, lengths: np.ndarray, *, chunk: int) -> frozenset[int]:
    """Return the steps to measure where measuring costs time: the predicted worst ones, and controls.

    The controls are spread evenly over the run, regardless of size, so that a worst step that the prediction overlooks
    may be among them. `chunk` as in `memory_figures`.
    """
    last = len(plan.steps) - 1
    controls = {round(last * number / CONTROL_STEPS) for number in range(1, CONTROL_STEPS + 1)}
    return frozenset({*worst_steps(plan, lengths, chunk=chunk), *controls})


@dataclass(frozen=True, kw_only=True)
class Paths:
    """Input files of the stage, then its outputs."""

    tokens: Path
    batches: Path
    verdict: Path
    precision: Path
    estimate: Path
    reference: Path
    model_lock: Path
    tokenizer_lock: Path
    data_lock: Path
    out: Path
    curves: Path
    metrics: Path

    @property
    def plan(self) -> Path:
        """The plan's file."""
        return self.batches / "plan.arrow"


def refuse_missing_inputs(paths: Paths, world: World) -> None:
    """Raise UserError if this node, which DVC does not run on, lacks what earlier stages wrote."""
    node = world.rank // world.local_size
    estimated = (paths.verdict, paths.precision, paths.estimate)
    needed = (paths.tokens, paths.plan, *estimated, paths.model_lock, paths.tokenizer_lock)
    if node and (missing := [path for path in needed if not path.exists()]):
        raise UserError(
            f"{missing[0]}: is not on node {node} ({platform.node()}); run `dvc pull tokenize bucket estimate` there "
            "after `dvc push` on node 0, or `dvc repro estimate`, which writes the same bytes; or use a shared disk"
        )


@contextmanager
def remedies_of_node(world: World) -> Iterator[None]:
    """Replace the remedies for a fault of the pinned model if DVC does not run on this node: `dvc repro` trains there.

    DVC does not store models, so that `dvc pull` fetches none.
    """
    try:
        yield
    except UserError as error:
        node = world.rank // world.local_size
        if not node:
            raise
        where = f"node {node} ({platform.node()})"
        if isinstance(error, ModelFault):
            raise UserError(f"{error.parameter}: on {where} {error.fault}; copy it there from node 0") from error
        raise UserError(f"{error}; or copy the hub's cache from node 0 to {where}") from error


def dotted(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested parameters to dotted names."""
    flat: dict[str, Any] = {}
    for name, value in section.items():
        flat |= dotted(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


def prepare_device(
    params: Params,
    train: Train,
    device: torch.device,
    world: World,
    paths: Paths,
    notify: Callable[[str], None],
) -> None:
    """Configure the device; `notify` gets a line for each setting that has another effect on it.

    Raises:
        UserError: the device cannot compute the run, or has too little memory.
    """
    predicted = read_sealed(paths.estimate)
    if (of_process := predicted["host_of_process"]) is not None:  # Stage estimate did not know this node's GPUs.
        count = world.local_size
        predicted["host_bytes_predicted"] = host_bytes(of_process, train.method, count, world.rank // count)
    segments = use_segments(train.expandable_segments, device)
    verdict = read_sealed(paths.verdict)
    check_device(device, train, verdict, predicted, world.local_size)
    check_offload(train.offload_activations, predicted["offloaded_bytes_predicted"] * world.local_size, SCRATCH)
    check_host(train.offload, device, predicted, train.sharding, train.offload_to)
    notes = (verdict.get("note"), segments, paging_note(train.optimizer, device), other_device_note(device, predicted))
    for note in notes:
        if note is not None:
            notify(f"note: {note}")


def make_job(params: Params, train: Train, device: torch.device, world: World, paths: Paths) -> TrainJob:
    """Create the job of one of the processes of `world`.

    Raises:
        UserError: the model's files are not the pinned ones, or do not suit the parameters or the device; or the plan
            was made for other rows.
    """
    with remedies_of_node(world):
        assets = Assets.pinned(paths.model_lock)
    plan, rows = _read_plan(params, paths)
    config, train = assets.config(train, rows.attached), assets.with_token_ids(train)
    check_attention(device, config, train)
    if train.merge:
        refuse_merge(assets.directory, train, experts=train.lora.experts == "all")
    assets.refuse_other_adapter(train, config)
    base_files = adapter_files = NO_FILES
    if world.local_rank == 0:  # All processes of a node read the same files.
        with remedies_of_node(world):
            base_files, adapter_files = assets.verify()
    heldout = TokenRows(paths.tokens, "heldout", train.row_kind)
    splits: dict[Split, TokenRows] = {"train": rows, "heldout": heldout}
    complete_rows(splits, assets, config, train, tokens=paths.tokens, reference=paths.reference)
    refuse_unsupported(
        train,
        config,
        device_type=device.type,
        longest=longest_row(plan, rows.lengths),
        packed=plan.flat,
        micro_batches=np.diff(plan.step_bounds) // plan.ranks,
        enforce=read_sealed(paths.verdict)["enforce"],
    )
    lr, lr_note = lr_of(train, config)
    chosen = {"lr": lr, "tokens_per_step": planned_step_tokens(paths.plan, train)}
    state_disk = DiskPlace(directory=SCRATCH, buffer_bytes=params.run.offload_buffer_mib * MIB)
    predicted, meta = read_sealed(paths.estimate), read_sealed(paths.tokens / "meta.json")
    return TrainJob(
        assets=assets,
        config=config,
        base_files=base_files,
        adapter_files=adapter_files,
        plan=plan,
        rows=rows,
        heldout=heldout,
        pad_id=meta["pad_id"],
        chat_template=_own_template(paths.tokens, meta),
        train=train.model_copy(update=chosen),
        seed=params.seed,
        foreach=device.type == "cuda",
        offload=make_offload(train.offload_activations, train.compress_activations, device, SCRATCH),
        disk=state_disk if train.offload_to == "disk" else None,
        measured_steps=measured_steps(plan, rows.lengths, chunk=chunk_tokens(config)),
        loader_threads=params.run.loader_threads,
        device=device,
        progress=params.run.progress and world.is_first,
        world=world,
        stage_layers=tuple(read_sealed(paths.verdict).get("stage_layers", ())) or None,
        rank_timeout=timedelta(seconds=params.run.rank_timeout_seconds),
        part=token_part(params.layout, world.rank),
        settings={
            **dotted(tracked_values(params)),
            "run.loader_threads": params.run.loader_threads,
            **{f"train.{name}": value for name, value in chosen.items()},
        },
        predicted_peak_bytes=predicted["peak_bytes_predicted"],
        predicted_duration=predicted["duration"],
        note=lr_note,
        trackers=params.run.trackers,
    )


def _own_template(tokens: Path, meta: Mapping[str, Any]) -> Path | None:
    """The file of the chat template that made the tokens, if it is not the tokenizer's; `meta` is meta.json.

    Raises:
        UserError: it is missing, or another one.
    """
    path = tokens / CHAT_TEMPLATE
    if not meta["own_chat_template"]:
        return None
    try:
        same = sha256_json(read_regular(path).decode()) == meta["chat_template_sha256"]
    except (OSError, UnicodeDecodeError):
        same = False
    if not same:
        raise UserError(
            f"{path}: is not the chat template that made the tokens; delete data/tokens and run `dvc repro`"
        )
    return path


def _read_plan(params: Params, paths: Paths) -> tuple[Plan, TokenRows]:
    """Read the plan and its rows; refuse a plan for other rows or another number of GPUs."""
    plan = read_plan(paths.plan)
    refuse_other_ranks(plan, params.layout.data)
    rows = TokenRows(paths.tokens, "train", params.train.row_kind)
    refuse_other_tokens(plan, rows.lengths)
    refuse_other_objective(plan, params.train.row_kind)
    return replace(plan, attached=tuple(one.trained_by(params.train) for one in rows.attached)), rows
