"""A small training as a process of its own, as slow as signals need it: `python -m tests.train.trainer`."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from stages.params_file import load_params
from stages.step.batches import Batch
from stages.train.orphan import end_with_parent
from stages.train.resume import Checkpoints, opened
from stages.train.signals import Stop, stopped_by_signals
from tests.conftest import ROOT
from tests.train.interrupted import finish, small_job

BATCH_SECONDS = 0.1
LINES, BEGUN, ENDED = "lines.txt", "begun", "ended.txt"
"""Files in its directory: what the user is told; there once steps are under way; a hash of the weights."""


def main(model: Path, directory: Path, batch_seconds: float = BATCH_SECONDS) -> None:
    """Train, or go on with it, in `directory`, waiting before each batch."""
    torch.set_num_threads(1)
    between = Checkpoints.between

    def slowly(keeper: Checkpoints, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in between(keeper, batches):
            (directory / BEGUN).touch()
            time.sleep(batch_seconds)
            yield batch

    def told(line: str) -> None:
        with open(directory / LINES, "a") as file:
            file.write(line + "\n")

    Checkpoints.between = slowly  # type: ignore[method-assign, assignment]
    job = small_job(model, directory / "tokens", lora_dropout=0.1)
    stop, run = Stop(), load_params(ROOT / "params.yaml").run
    with stopped_by_signals(stop), opened(directory / "kept", run=run, stop=stop, told=told) as keeper:
        ended = finish(job, keeper)
        (directory / ENDED).write_text(ended.weights_sha256())


if __name__ == "__main__":
    end_with_parent()
    main(Path(sys.argv[1]), Path(sys.argv[2]))
