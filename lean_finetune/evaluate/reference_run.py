"""Run stage reference: log-probabilities of all rows under the model before training."""

import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from cuda_memory.terminal import echo
from lean_finetune.config.declared_params import read_params
from lean_finetune.config.schema import Train
from lean_finetune.core.atomic_files import atomic_directory, atomic_path, read_sealed, sha256_json, write_errors
from lean_finetune.core.errors import DoesNotFit, UserError
from lean_finetune.core.file_locks import clear
from lean_finetune.core.progress import progress_bar
from lean_finetune.distributed.processes import uses_cuda
from lean_finetune.evaluate.generate import batch_rows
from lean_finetune.model.precision import autocast, precision_of, resolved
from lean_finetune.pinning.code import code_hashes
from lean_finetune.run.assets import Assets
from lean_finetune.step.batches import collate
from lean_finetune.step.evaluation_limits import LOGITS_CHUNK, ROWS_OF_LONGEST
from lean_finetune.step.loss import check_head, token_losses
from lean_finetune.step.reference_table import SPLITS, identity, read_table, write_table
from lean_finetune.step.token_rows import Split, TokenRows
from lean_finetune.train.monitor.out_of_memory import is_out_of_memory
from lean_finetune.train.process.training_device import refuse_missing_bf16

MODULE = "lean_finetune.evaluate.reference_run"
SAVE_SECONDS = 60.0
"""Time between two writes of unfinished work."""
SCRATCH = Path("scratch/reference")


def run_stage(*, tokens: Path, model_lock: Path, precision: Path, out: Path) -> None:
    """Compute the log-probability of the trained tokens of every row, and write one table for each split.

    `precision` is the file of stage estimate: the weights have the types that they have in training.
    """
    p = read_params()
    torch.set_num_threads(p.run.cpu_threads or torch.get_num_threads())
    device = torch.device("cuda" if uses_cuda(p.run.device) else "cpu")
    weights = resolved(p, precision_of(p, precision))
    refuse_missing_bf16(device, weights)
    assets = Assets.pinned(model_lock)
    verified = assets.verify()
    splits = {split: TokenRows(tokens, split, p.train.row_kind) for split in SPLITS}
    of = identity(tokens, assets.lock, weights)
    key = sha256_json({"of": of, "code": code_hashes(MODULE), "device": device.type})[:32]
    with _unfinished(SCRATCH / key, splits, of) as logps:
        model = assets.load(assets.config(weights), weights, device)
        check_head(model, device)
        for files in verified:
            files.refuse_change()
        pad_id = read_sealed(tokens / "meta.json")["pad_id"]
        try:
            for split, rows in splits.items():
                unfinished = Unfinished(SCRATCH / key / f"{split}.arrow", logps[split], of)
                _compute(model, weights, rows, unfinished, pad_id, device, split, p.run.progress)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise DoesNotFit(
                f"data.max_length: the model without training ran out of memory on {device} at its longest rows; use "
                "train.method=qlora, or lower data.max_length"
            ) from None
        with atomic_directory(out) as aside:
            for split in SPLITS:
                write_table(aside / f"{split}.arrow", logps[split], of)


@contextmanager
def _unfinished(directory: Path, splits: Mapping[Split, TokenRows], of: str) -> Iterator[dict[Split, np.ndarray]]:
    """The log-probabilities of each split, NaN where a row is not computed yet; kept until the work is done."""
    logps = {split: np.full(len(rows), np.nan, np.float32) for split, rows in splits.items()}
    for split, values in logps.items():
        path = directory / f"{split}.arrow"
        if not os.path.lexists(path):
            continue
        try:
            values[:] = read_table(path, of, len(values), finished=False)
        except UserError as error:
            echo(f"note: unfinished work is not used: {str(error).partition(';')[0]}", err=True)
            _remove(path)
    with write_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        yield logps
        clear(directory)
        directory.rmdir()


def _remove(path: Path) -> None:
    """Remove what is in the place of a file."""
    with write_errors(path):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


@dataclass(frozen=True)
class Unfinished:
    """The log-probabilities of a split, float32 and NaN where a row is not computed yet, and their file."""

    path: Path
    logps: np.ndarray
    of: str

    def save(self) -> None:
        """Write the file."""
        with atomic_path(self.path) as aside:
            write_table(aside, self.logps, self.of)


def _compute(
    model: nn.Module,
    weights: Train,
    rows: TokenRows,
    unfinished: Unfinished,
    pad_id: int,
    device: torch.device,
    split: str,
    progress: bool,
) -> None:
    """Fill in the log-probabilities of the rows that are used; the batches are the same if some are known already."""
    used, logps = rows.used.tolist(), unfinished.logps
    longest = int(rows.lengths.max(initial=1))
    saved = time.monotonic()
    try:
        with progress_bar(total=len(used), desc=f"reference {split}", unit=" rows", disable=not progress) as bar:
            for numbers in batch_rows(rows.lengths, used, ROWS_OF_LONGEST * longest):
                if np.isnan(logps[numbers]).any():
                    logps[numbers] = row_logps(model, weights, rows, numbers, pad_id, device)
                bar.update(len(numbers))
                if time.monotonic() - saved > SAVE_SECONDS:
                    unfinished.save()
                    saved = time.monotonic()
    except BaseException:
        unfinished.save()
        raise
    unfinished.save()
    logps[rows.dropped] = 0.0  # Never read.
    if not np.isfinite(logps).all():
        row = int(np.isfinite(logps).argmin())
        raise UserError(
            f"{rows.path}: the log-probability of row {row} under the model before training must be finite; use "
            "train.precision=bf16 or fp32"
        )


def row_logps(
    model: nn.Module, weights: Train, rows: TokenRows, numbers: list[int], pad_id: int, device: torch.device
) -> np.ndarray:
    """Sums of the log-probabilities of each row's trained tokens, summed as the training step sums them."""
    batch = collate(rows.gather(np.array(numbers)), int(rows.lengths[numbers[0]]), pad_id)
    with torch.no_grad(), autocast(weights, device.type):
        losses_N = token_losses(model, batch.to(device), LOGITS_CHUNK)
    counts: Any = rows.supervised[numbers].tolist()
    return torch.stack([-row.sum() for row in losses_N.split(counts)]).cpu().numpy()
