"""Run stage reference: log-probabilities of all rows under the model before training."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from lean_finetune.config.declared_params import read_params
from lean_finetune.config.schema import Train
from lean_finetune.core.atomic_files import atomic_directory, atomic_path, read_json, sha256_json
from lean_finetune.core.errors import DoesNotFit, UserError
from lean_finetune.core.progress import progress_bar
from lean_finetune.distributed.processes import uses_cuda
from lean_finetune.evaluate.generate import batch_rows
from lean_finetune.model.adapters import load_adapter
from lean_finetune.model.load_model import load_base
from lean_finetune.model.precision import autocast, precision_of, resolved
from lean_finetune.model.trained_rows import add_rows
from lean_finetune.pinning.code import code_hashes
from lean_finetune.pinning.locate import adapter_directory, model_directory, verify_adapter, verify_files
from lean_finetune.pinning.read_locks import read_model_lock
from lean_finetune.step.batches import collate
from lean_finetune.step.evaluation_limits import LOGITS_CHUNK, ROWS_OF_LONGEST
from lean_finetune.step.loss import check_head, token_losses
from lean_finetune.step.reference_table import SPLITS, identity, write_table
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
    weights, lock = resolved(p, precision_of(p, precision)), read_model_lock(model_lock)
    refuse_missing_bf16(device, weights)
    base, adapter = model_directory(lock), adapter_directory(lock)
    files, adapter_files = verify_files(base, lock["files"]), verify_adapter(lock, adapter)
    splits = {split: TokenRows(tokens, split, p.train.row_kind) for split in SPLITS}
    of = identity(tokens, lock, weights)
    key = sha256_json({"of": of, "code": code_hashes(MODULE), "device": device.type})[:32]
    with _unfinished(SCRATCH / key, splits) as logps:
        loaded = load_base(base, weights, device)
        add_rows(loaded, lock.get("trained_tokens", []))
        # The model before training has the adapter that goes on.
        model = (loaded if adapter is None else load_adapter(loaded, adapter, weights)).eval()
        check_head(model, device)
        files.refuse_change()
        adapter_files.refuse_change()
        pad_id = read_json(tokens / "meta.json")["pad_id"]
        try:
            for split, rows in splits.items():
                _compute(model, weights, rows, logps[split], pad_id, device, SCRATCH / key, split, p.run.progress)
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
def _unfinished(directory: Path, splits: Mapping[Split, TokenRows]) -> Iterator[dict[Split, np.ndarray]]:
    """The log-probabilities of each split, NaN where a row is not computed yet; kept until the work is done."""
    logps = {split: np.full(len(rows), np.nan, np.float32) for split, rows in splits.items()}
    for split, values in logps.items():
        path = directory / f"{split}.npy"
        if path.exists():
            found = np.load(path, allow_pickle=False)
            if found.shape == values.shape and found.dtype == values.dtype:
                values[:] = found
    directory.mkdir(parents=True, exist_ok=True)
    yield logps
    for split in splits:
        (directory / f"{split}.npy").unlink(missing_ok=True)
    directory.rmdir()


def _compute(
    model: nn.Module,
    weights: Train,
    rows: TokenRows,
    logps: np.ndarray,
    pad_id: int,
    device: torch.device,
    directory: Path,
    split: str,
    progress: bool,
) -> None:
    """Fill in the log-probabilities of the rows that are used; the batches are the same if some are known already."""
    used = rows.used.tolist()
    longest = int(rows.lengths.max(initial=1))
    saved = time.monotonic()

    def save() -> None:
        with atomic_path(directory / f"{split}.npy") as path, path.open("wb") as file:
            np.save(file, logps, allow_pickle=False)

    try:
        with progress_bar(total=len(used), desc=f"reference {split}", unit=" rows", disable=not progress) as bar:
            for numbers in batch_rows(rows.lengths, used, ROWS_OF_LONGEST * longest):
                if np.isnan(logps[numbers]).any():
                    logps[numbers] = row_logps(model, weights, rows, numbers, pad_id, device)
                bar.update(len(numbers))
                if time.monotonic() - saved > SAVE_SECONDS:
                    save()
                    saved = time.monotonic()
    except BaseException:
        save()
        raise
    save()
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
