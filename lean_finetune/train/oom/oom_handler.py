"""What is done when memory ends: it is told, or the step is cut smaller and done again (run.oom_recovery).

A step that is done again has the same rows and the same divisor of its loss, and random numbers are drawn again from
where they were: but for the order in which gradients are summed, it is the step that was planned.
"""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from lean_finetune.plan.batch_plan import MicroBatch, Plan
from lean_finetune.step.batches import Batch
from lean_finetune.step.oom_errors import is_out_of_memory
from lean_finetune.train.oom.batch_stream import Feed
from lean_finetune.train.oom.oom_state import Failure, OutOfMemory, Whereabouts

Result = TypeVar("Result")
Attempt = Callable[[list[MicroBatch], Iterator[Batch]], Result]
"""Does a whole step with these micro-batches. It changes no weight before the last of them has passed backward, and
leaves random states as they were when it raises."""


class Ending:
    """The one place where the end of memory is met."""

    def __init__(
        self,
        device: torch.device,
        *,
        split: bool,
        updates_in_backward: bool,
        report: Callable[[Failure], OutOfMemory],
        begun: Callable[[int], None] = lambda step: None,
    ):
        """Begin before the model is loaded.

        Args:
            device: of the run.
            split: whether a step is cut smaller and done again.
            updates_in_backward: weights change while a step is under way.
            report: makes of a failure what the user is told.
            begun: hears of each step as it begins.
        """
        self._device, self._split, self._report, self._begun = device, split, report, begun
        self.place = Whereabouts(device, updates_in_backward=updates_in_backward)

    def step(
        self, step: int, feed: Feed, model: nn.Module, attempt: Attempt[Result]
    ) -> tuple[Result, list[MicroBatch]]:
        """Do a step; its micro-batches are halved as often as it takes.

        Returns what `attempt` returned, and the micro-batches with which it did.

        Raises:
            OutOfMemory: memory ended, and no cut helps.
        """
        self._begun(step)
        while True:
            micro_batches, batches = feed.step(step)
            self.place.begin_step(step, micro_batches)
            try:
                return attempt(micro_batches, batches), micro_batches
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                failure = self.place.failure(error)
            # The exception is gone here, and with it the frames that held the step's tensors.
            _let_go(model, self._device)
            if not (self._split and failure.can_be_cut):
                raise self._report(failure)
            feed.cut(step, failure.padded_tokens // 2)

    @contextmanager
    def told(self) -> Iterator[None]:
        """Inside, the end of memory is a fault that the user can mend.

        Raises:
            OutOfMemory: memory ended.
        """
        try:
            yield
            return
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failure = self.place.failure(error)
        raise self._report(failure)


def plain_ending(device: torch.device, *, updates_in_backward: bool) -> Ending:
    """One that tells what the allocator said."""

    def report(failure: Failure) -> OutOfMemory:
        told = f"bucket.max_tokens: memory ended in {failure.phase} ({failure.message}); lower it"
        return OutOfMemory(told, weights_whole=failure.weights_whole)

    return Ending(device, split=False, updates_in_backward=updates_in_backward, report=report)


def _let_go(model: nn.Module, device: torch.device) -> None:
    """Free what the failed step left."""
    model.zero_grad(set_to_none=True)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def splits(plan: Plan, curves: list[dict[str, Any]]) -> Mapping[str, int] | None:
    """How far steps were cut smaller than planned, by the rows of the curves; None where none was."""
    planned = {row["step"]: len(plan.steps[row["step"]]) for row in curves}
    cut = [row for row in curves if row["micro_batches"] != planned[row["step"]]]
    if not cut:
        return None
    return {
        "first_step": cut[0]["step"],
        "steps": len(cut),
        "micro_batches_planned": sum(planned[row["step"]] for row in cut),
        "micro_batches_run": sum(row["micro_batches"] for row in cut),
    }
