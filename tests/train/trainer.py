"""A small training for a child process, which waits for signals."""

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch

from lean_finetune.config.load import load_params
from lean_finetune.step.batches import Batch
from lean_finetune.train.checkpoint.checkpointer import Checkpointer
from lean_finetune.train.checkpoint.scratch_dir import RunDirectory
from lean_finetune.train.process.stop_signals import StopRequest, handle_signals
from lean_finetune.train.resume_run import open_checkpointer
from tests.conftest import ROOT
from tests.train.interrupted import finish, small_job

WAITING_BATCH = 4
"""The batch at which it waits; one step is done by then."""
LONG_SECONDS = 600
LINES, BEGUN, ENDED = "lines.txt", "begun", "ended.txt"
"""Files in its directory: lines for the user; exists once it waits; a hash of the weights."""
Mode = Literal["run", "until signal", "stuck"]


def main(model: Path, directory: Path, mode: Mode) -> None:
    """Train or resume in `directory`; wait in a batch for a signal, or for long."""
    torch.set_num_threads(1)
    between, numbers = Checkpointer.between, itertools.count(1)
    stop, run = StopRequest(), load_params(ROOT / "params.yaml").run

    def waiting_between(checkpoints: Checkpointer, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in between(checkpoints, batches):
            if next(numbers) == WAITING_BATCH and mode != "run":
                (directory / BEGUN).touch()
                until = time.monotonic() + LONG_SECONDS
                while time.monotonic() < until and not (mode == "until signal" and stop.signal_number):
                    time.sleep(0.01)
            yield batch

    def notify(line: str) -> None:
        with open(directory / LINES, "a") as file:
            file.write(line + "\n")

    Checkpointer.between = waiting_between  # type: ignore[method-assign, assignment]
    job = small_job(model, directory / "tokens", lora_dropout=0.1)
    where = RunDirectory(directory=directory / "checkpoints")
    with handle_signals(stop), open_checkpointer(where, run=run, stop=stop, notify=notify) as checkpoints:
        ended = finish(job, checkpoints)
        (directory / ENDED).write_text(ended.weights_sha256())
