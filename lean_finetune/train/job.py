"""The training job: its input, made from parameters, locks and plan, and its result."""

import math
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PretrainedConfig

from cuda_memory.units import MIB, significant
from lean_finetune.config.declared_params import tracked_values
from lean_finetune.config.schema import Params, Train
from lean_finetune.core.atomic_files import read_sealed, sha256_json
from lean_finetune.core.errors import UserError
from lean_finetune.core.regular_files import read_regular
from lean_finetune.distributed.processes import SINGLE_PROCESS, World
from lean_finetune.distributed.sharding_modes import division
from lean_finetune.model.allocator_settings import use_segments
from lean_finetune.model.empty_model import meta_model
from lean_finetune.model.merge_adapters import refuse_merge
from lean_finetune.model.model_config import chunk_tokens
from lean_finetune.pinning.locate import CHAT_TEMPLATE, NO_FILES, FileVersions, ModelFault
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
from lean_finetune.step.batches import TokenPart, token_part
from lean_finetune.step.offload.activation_offload import KeptActivations, make_offload
from lean_finetune.step.offload.disk_weights import DiskPlace
from lean_finetune.step.parallel_model import ParallelModel, host_bytes
from lean_finetune.step.run_optimizer import paging_note
from lean_finetune.step.token_rows import Split, TokenRows
from lean_finetune.step.unsupported import refuse_unsupported
from lean_finetune.train.monitor.growth_advice import Settings
from lean_finetune.train.monitor.memory_monitor import HostPeak
from lean_finetune.train.process.training_device import (
    check_attention,
    check_device,
    check_host,
    check_offload,
    other_device_note,
)

USUAL_LRS: tuple[tuple[float, float, float], ...] = (
    (20e6, 3e-3, 3e-3),
    (3e9, 3e-4, 2e-5),
    (20e9, 2e-4, 1e-5),
    (math.inf, 1e-4, 5e-6),
)
"""Parameters of models below this size, learning rate of adapters, and of all weights.

Adapters from 7 B: Dettmers et al. 2023 (arXiv 2305.14314, table 9: 2e-4 at 7 B and 13 B, 1e-4 at 33 B and 65 B). All
weights: 2e-5 at 7 B (Alpaca, 2023), 5e-6 at 8 B and 2e-6 at 70 B (Lambert et al. 2024, arXiv 2411.15124), and between.
The first line is what suits the shipped model."""

PREFERENCE_LR_SHARE = 1 / 40
"""Share of these rates for objectives of preferences: 5e-6 for adapters and 5e-7 for all weights at 7 B, as in
the recipes of Zephyr (Tunstall et al. 2023, arXiv 2310.16944) and Tülu 3 (Lambert et al. 2024)."""


def usual_lr(config: PretrainedConfig, train: Train) -> tuple[float, str]:
    """The learning rate for a model and a method, and the reason."""
    parameters = sum(parameter.numel() for parameter in meta_model(config).parameters())
    _, adapters, all_weights = next(line for line in USUAL_LRS if parameters < line[0])
    trained, lr = ("adapters on", adapters) if train.adapted else ("all weights of", all_weights)
    size = f"{significant(parameters / 1e9, 3)} B" if parameters >= 1e9 else f"{significant(parameters / 1e6, 3)} M"
    if train.goal.compares:
        return lr * PREFERENCE_LR_SHARE, f"usual for {train.objective} of {trained} {size} parameters"
    return lr, f"usual for {trained} {size} parameters"


# Input and output of the training loop.

CONTROL_STEPS = 4
"""Steps that are measured besides those predicted to be the worst."""


@dataclass(frozen=True, kw_only=True)
class TrainJob:
    """Input of one training run."""

    assets: Assets
    config: PretrainedConfig
    """Of the model as this run builds it."""
    plan: Plan
    rows: TokenRows
    heldout: TokenRows
    pad_id: int
    chat_template: Path | None = None
    """The file of the chat template that made the tokens; None for the tokenizer's."""
    train: Train
    """With the precision and the learning rate of this run, not `auto`."""
    seed: int
    foreach: bool
    """Compute norms and clip with the multi-tensor kernels, as PyTorch does on CUDA."""
    offload: KeptActivations
    """Where activations are stored between forward and backward; None = on the device."""
    disk: DiskPlace | None = None
    """The file of offloaded master weights and optimizer state; None = on the device or in host memory."""
    measured_steps: frozenset[int]
    """Steps whose peak memory is measured; always includes the first."""
    loader_threads: int
    """Threads that read batches ahead."""
    device: torch.device
    progress: bool
    world: World = SINGLE_PROCESS
    stage_layers: tuple[int, ...] | None = None
    """Number of layers of each stage of a pipeline; None without one."""
    rank_timeout: timedelta | None = None
    """Timeout of collectives in a group that is a subset of all processes; None = PyTorch's default."""
    part: TokenPart | None = None
    """This process's part of each row's tokens; None = complete rows."""
    settings: Settings = field(default_factory=dict)
    """Parameters of the run by dotted name, for callbacks and advice."""
    predicted_peak_bytes: int | None = None
    """Peak tensor memory predicted by stage estimate, for callbacks."""
    predicted_duration: str | None = None
    """How long all steps take as predicted by stage estimate, for callbacks; None on a CPU."""
    base_files: FileVersions = NO_FILES
    """Files of the base model, in the process that verified them."""
    adapter_files: FileVersions = NO_FILES
    """Files of the adapter that goes on, in the process that verified them."""
    note: str | None = None
    """A line for the user about the learning rate."""
    trackers: Sequence[str] = ()
    """Names of the trackers that receive the run's figures."""

    @property
    def division(self) -> str:
        """How the processes shard weights: a checkpoint resumes with the same division."""
        return division(self.train, self.world.size, self.stage_layers)


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """The trained model and the record of its training."""

    parallel: ParallelModel
    curves: list[dict[str, Any]]
    """One row per optimizer step, keys `CURVE_COLUMNS`."""
    skipped_steps: int | None
    """Updates skipped because fp16 gradients overflowed; None if the loss is not scaled."""
    memory_by_phase: Mapping[str, Mapping[str, int | None]]
    """Highest figures at the ends of each phase."""
    load_host: HostPeak
    """Host memory while the model was loaded."""

    @property
    def model(self) -> nn.Module:
        """The trained model, or this process's shard."""
        return self.parallel.model


def measured_steps(plan: Plan, lengths: np.ndarray, *, chunk: int) -> frozenset[int]:
    """Return the steps to measure where measuring costs time: the predicted worst ones, and controls.

    The controls are spread evenly over the run, regardless of size, so that a worst step that the prediction overlooks
    may be among them. `chunk` as in `memory_figures`.
    """
    last = len(plan.steps) - 1
    controls = {round(last * number / CONTROL_STEPS) for number in range(1, CONTROL_STEPS + 1)}
    return frozenset({*worst_steps(plan, lengths, chunk=chunk), *controls})


# Create the training job from parameters, locks and plan, and check it against the device.

SCRATCH = Path("scratch")


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
    lr, lr_note = _lr(train, config)
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


def _lr(train: Train, config: PretrainedConfig) -> tuple[float, str | None]:
    """What train.lr means, and a line that says so if it is automatic."""
    if train.lr != "auto":
        return train.lr, None
    lr, reason = usual_lr(config, train)
    return lr, f"train.lr: auto is {lr:g}: {reason}"


def _read_plan(params: Params, paths: Paths) -> tuple[Plan, TokenRows]:
    """Read the plan and its rows; refuse a plan for other rows or another number of GPUs."""
    plan = read_plan(paths.plan)
    refuse_other_ranks(plan, params.layout.data)
    rows = TokenRows(paths.tokens, "train", params.train.row_kind)
    refuse_other_tokens(plan, rows.lengths)
    refuse_other_objective(plan, params.train.row_kind)
    return replace(plan, attached=tuple(one.trained_by(params.train) for one in rows.attached)), rows
