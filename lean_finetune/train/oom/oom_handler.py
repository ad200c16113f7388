"""Handle out-of-memory errors: report them, or repeat the step in smaller micro-batches (run.oom_recovery).

A repeated step has the same rows, the same loss divisor and the same random numbers. Only the order in which gradients
are summed differs from the plan.
"""

import gc
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import nn

from lean_finetune.plan.batch_plan import MicroBatch, Plan
from lean_finetune.step.batches import Batch, TokenPart, load, own_micro_batches
from lean_finetune.step.token_rows import TokenRows
from lean_finetune.train.oom.oom_state import Failure, OutOfMemory, RunPosition, is_out_of_memory

Result = TypeVar("Result")
Attempt = Callable[[list[MicroBatch], Iterator[Batch]], Result]
"""Runs a step with these micro-batches. It changes no weight before the last backward pass has finished, and
restores the random state if it raises."""


class BatchStream:
    """The batches of one process, step by step in order. Close it to end its reader threads."""

    def __init__(
        self,
        rows: TokenRows,
        plan: Plan,
        *,
        start_step: int,
        rank: int,
        pad_id: int,
        pin_memory: bool,
        threads: int,
        part: TokenPart | None = None,
    ):
        """Start reading ahead at a step; arguments as `load`."""
        self._rows, self._plan, self._rank = rows, plan, rank
        self._load = partial(
            load, rows, plan, rank=rank, pad_id=pad_id, pin_memory=pin_memory, threads=threads, part=part
        )
        self._batches: Generator[Batch] = self._load(start_step=start_step)
        self._max_tokens: int | None = None

    def step(self, step: int) -> tuple[list[MicroBatch], Iterator[Batch]]:
        """Return this process's micro-batches of the next step, and an iterator over their tensors.

        Raises:
            UserError: from the iterator: the plan was made for other tokens, or the token files are damaged.
        """
        micro_batches = own_micro_batches(self._rows, self._plan, step, self._rank, self._max_tokens)
        return micro_batches, islice(self._batches, len(micro_batches))

    def split(self, step: int, max_tokens: int) -> None:
        """Restart at `step` with at most `max_tokens` padded tokens in a micro-batch of several rows.

        This applies to all later steps: their micro-batches are as large and would fail first.
        """
        self._batches.close()
        self._max_tokens = max_tokens
        self._batches = self._load(start_step=step, max_tokens=max_tokens)

    def close(self) -> None:
        """End the reader threads."""
        self._batches.close()


def plain_report(failure: Failure) -> OutOfMemory:
    """Return an error with the allocator's message, without a prediction."""
    message = f"bucket.max_tokens: out of memory in {failure.phase} ({failure.message}); lower it"
    return OutOfMemory(message, weights_intact=failure.weights_intact)


class OomHandler:
    """Catches every out-of-memory error of a run."""

    def __init__(
        self,
        device: torch.device,
        *,
        updates_in_backward: bool,
        split: bool = False,
        report: Callable[[Failure], OutOfMemory] = plain_report,
        on_step: Callable[[int], None] = lambda step: None,
        on_failure: Callable[[], object] = lambda: None,
    ):
        """Create it before the model is loaded.

        `split`: repeat a step that failed in smaller micro-batches. `updates_in_backward`: weights change during a
        step. `report` returns the error for the user. `on_step` is called as each step starts, `on_failure` before
        `report`, while the tensors that fill the memory still exist.
        """
        self._device, self._split, self._report = device, split, report
        self._on_step, self._on_failure = on_step, on_failure
        self.position = RunPosition(device, updates_in_backward=updates_in_backward)

    def step(
        self, step: int, stream: BatchStream, model: nn.Module, attempt: Attempt[Result]
    ) -> tuple[Result, list[MicroBatch]]:
        """Run a step, with micro-batches halved until they fit; return the result of `attempt` and those micro-batches.

        Raises:
            OutOfMemory: memory ran out, and splitting cannot help.
        """
        self._on_step(step)
        while True:
            micro_batches, batches = stream.step(step)
            self.position.start_step(step, micro_batches)
            try:
                return attempt(micro_batches, batches), micro_batches
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                failure = self.position.failure(error)
                recovers = self._split and failure.can_split
                if not recovers:
                    self._on_failure()
            # The exception is gone here, and with it the frames that referenced the step's tensors.
            model.zero_grad(set_to_none=True)
            gc.collect()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            if not recovers:
                raise self._report(failure)
            stream.split(step, failure.padded_tokens // 2)

    @contextmanager
    def reported(self) -> Iterator[None]:
        """Turn an out-of-memory error inside the block into an `OutOfMemory` with a remedy."""
        try:
            yield
            return
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failure = self.position.failure(error)
            self._on_failure()
        raise self._report(failure)


def split_figures(plan: Plan, curves: list[dict[str, Any]]) -> Mapping[str, int] | None:
    """Count the steps that ran in smaller micro-batches than planned; None without any."""
    planned = {row["step"]: len(plan.steps[row["step"]]) for row in curves}
    split = [row for row in curves if row["micro_batches"] != planned[row["step"]]]
    if not split:
        return None
    return {
        "first_step": split[0]["step"],
        "steps": len(split),
        "micro_batches_planned": sum(planned[row["step"]] for row in split),
        "micro_batches_run": sum(row["micro_batches"] for row in split),
    }
