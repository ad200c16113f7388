"""What a trace skips, parts of a loop and a small first micro-batch, changes no result; what differs runs."""

from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lean_finetune.memory.advice.full_rows import largest_steps
from lean_finetune.memory.predict import traced_step
from lean_finetune.memory.predict.depth_extrapolation import WindowTrace
from lean_finetune.memory.predict.explanation import OriginWindowTrace
from lean_finetune.memory.predict.peak import predict
from lean_finetune.memory.predict.traced_step import TracedModel, _trace_steps
from lean_finetune.memory.trace.alike_parts import PartsDiffer, part_loop, skipping_parts
from lean_finetune.memory.trace.gradients_alone import FIRST, first_left_out, leaves_gradients_alone
from lean_finetune.memory.trace.memory_trace import MemoryTrace, OpRules
from lean_finetune.step import head_loss
from lean_finetune.step.head_loss import in_parts
from lean_finetune.step.parallel_model import ParallelModel
from tests.memory.common import CPU_TARGET, gpu_target, llama, setting_of, shape

CONFIG = llama(hidden_size=32, intermediate_size=64, vocab_size=128)
STEPS = ((shape(1, 96, 90), shape(4, 96, 380)),)


def in_order(events: Any) -> list[Any]:
    """Events, with those that follow each other sorted if they are frees: autocast forgets its copies in any order."""
    runs = groupby(events, key=lambda event: event[1] < 0)
    return [event for freed, run in runs for event in (sorted(run) if freed else run)]


@pytest.mark.parametrize(
    ("changes", "target"),
    [
        ({"method": "full", "precision": "bf16"}, gpu_target("H100")),
        ({"method": "full", "precision": "fp16"}, gpu_target("T4")),  # The head's gradient is summed in blocks.
        ({"method": "qlora", "precision": "bf16", "grad_ckpt": True}, gpu_target("T4")),
        ({"method": "lora", "precision": "fp32", "gpus": 2, "sharding": "zero3"}, gpu_target("H100")),
        ({"method": "full", "precision": "bf16", "gpus": 2, "sharding": "zero3", "tensor_parallel": 2}, CPU_TARGET),
    ],
)
def test_skipping_parts_changes_no_event_origin_or_window(changes, target, monkeypatch):
    """A prediction, an explanation or a replay of reserved memory that depends on what was skipped."""
    monkeypatch.setattr(head_loss, "BLOCK_BYTES", 4 * 128 * 4)  # Four rows of logits.
    model = TracedModel(CONFIG, setting_of(**changes), target)
    every, skipped = (_trace_steps(OriginWindowTrace, model, STEPS, skip) for skip in (False, True))
    assert skipped[1] == every[1]
    assert in_order(skipped[0].events) == in_order(every[0].events)
    for name in ("origins", "exact_bytes", "streams", "phases", "micro_batches", "_categories", "_fullest"):
        assert getattr(skipped[0], name) == getattr(every[0], name), name
    assert skipped[0].peaks() == every[0].peaks() and skipped[0].windows() == every[0].windows()


def test_three_parts_of_each_size_run(monkeypatch):
    """A trace of a row of 131,072 tokens that takes a minute."""
    calls: list[int] = []
    block: Callable[..., torch.Tensor] = head_loss.Head._differentiate_block
    monkeypatch.setattr(head_loss, "BLOCK_BYTES", 4 * 128 * 4)

    def counted(head: head_loss.Head, *args: Any, **given: Any) -> torch.Tensor:
        calls.append(len(args))
        return block(head, *args, **given)

    monkeypatch.setattr(head_loss.Head, "_differentiate_block", counted)
    model = TracedModel(CONFIG, setting_of(method="full", precision="bf16"), CPU_TARGET)
    for chunks in (30, 1000):  # Of 32 tokens in 8 blocks, and a last one of 7 tokens.
        calls.clear()
        _trace_steps(WindowTrace, model, ((shape(1, 32 * chunks + 8, 32 * chunks + 7),),), True)
        assert len(calls) == 3 * 3 + 2


def traced(
    work: Callable[[torch.Tensor], torch.Tensor | None], parts: int, *, skip: bool, all_events: bool = True
) -> tuple[MemoryTrace, int]:
    """A trace of work on parts, and how many of them ran."""
    trace, ran = MemoryTrace(granularity_bytes=512, rules=OpRules(), vocab_size=-1), 0

    def counted(part: torch.Tensor) -> torch.Tensor | None:
        nonlocal ran
        ran += 1
        return work(part)

    with (
        FakeTensorMode(),
        trace.recording(),
        part_loop(trace, skip=skip, all_events=all_events),
        trace.phase("forward"),
    ):
        values = torch.empty(parts, 8)
        results = in_parts(counted, [(part,) for part in values.split(1)])
        if results[0] is not None:
            results[2] = None  # Freed before the others.
            torch.cat([result for result in results if result is not None])
    return trace, ran


@pytest.mark.parametrize(
    "work", [lambda part: part.exp().sum(1), lambda part: None if part.exp_().add(1).requires_grad else None]
)
def test_results_of_skipped_parts_are_freed_as_real_ones(work):
    (every, all_parts), (skipped, ran) = (traced(work, 9, skip=skip) for skip in (False, True))
    assert (all_parts, ran) == (9, 3)
    assert skipped.events == every.events and skipped.peaks() == every.peaks() and skipped.current_bytes == 0
    results, ran = traced(work, 9, skip=True, all_events=False)
    assert ran == 3 and len(results.events) < len(every.events)
    assert results.peaks() == every.peaks() and results.current_bytes == 0


def keeps_memory(kept: list[torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def work(part: torch.Tensor) -> torch.Tensor:
        kept.append(part.exp())
        return part.sum(1)

    return work


def grows(sizes: list[int]) -> Callable[[torch.Tensor], torch.Tensor]:
    def work(part: torch.Tensor) -> torch.Tensor:
        sizes.append(part.new_empty(1000 * len(sizes)).numel())
        return part.sum(1)

    return work


@pytest.mark.parametrize("make", [keeps_memory, grows])
def test_parts_that_are_not_alike_all_run(make):
    """Memory that a repeated part would not have."""
    (every, _), (skipped, ran) = (traced(make([]), 9, skip=skip) for skip in (False, True))
    assert ran == 9 and skipped.events == every.events


def test_a_last_part_with_other_memory_is_found():
    """Two parts that are alike by chance."""

    def work_of(calls: list[int]) -> Callable[[torch.Tensor], torch.Tensor]:
        def work(part: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return part.new_empty(len(calls) // 3 * 1000).sum() + part.sum(1)

        return work

    with pytest.raises(PartsDiffer):
        traced(work_of([]), 9, skip=True)
    found, ran = skipping_parts(lambda skip: traced(work_of([]), 9, skip=skip))
    assert ran == 9 and found.events == traced(work_of([]), 9, skip=False)[0].events


SMALL_FIRST = largest_steps(shape(4, 96, 380), several=True)
TWO_STEPS = (*SMALL_FIRST, *largest_steps(replace(shape(1, 96, 95), packed_lengths=(96,)), several=True))


@pytest.mark.parametrize(
    ("changes", "target"),
    [
        ({"method": "full", "optimizer": "adamw_8bit"}, CPU_TARGET),
        ({"method": "full", "precision": "fp16", "loss_chunk": None, "offload": "optimizer"}, gpu_target("T4")),
        ({"method": "qlora", "precision": "bf16", "grad_ckpt": True, "offload_activations": "cpu"}, gpu_target("H100")),
    ],
)
def test_a_small_first_micro_batch_that_is_left_out_changes_no_prediction(changes, target, monkeypatch):
    """Gradients that do not exist at the peak, or memory of the first micro-batch that is missing there."""
    model = TracedModel(llama(), setting_of(**changes), target)
    left_out = predict(model, TWO_STEPS)
    monkeypatch.setattr(traced_step, "leaves_gradients_alone", lambda shapes: False)
    assert predict(model, TWO_STEPS) == left_out


def test_a_first_micro_batch_is_left_out_only_before_larger_ones():
    """A peak in the first micro-batch of rows that are hardly longer."""
    assert all(map(leaves_gradients_alone, TWO_STEPS))
    for shapes in [(FIRST,), (shape(1, 96, 95),) * 2, largest_steps(shape(1, 32, 31), several=True)[0]]:
        assert not leaves_gradients_alone(shapes)


class HalfUsed(ParallelModel):
    """A model of which a micro-batch uses one of two parameters."""

    def __init__(self) -> None:
        super().__init__(nn.ParameterList(nn.Parameter(torch.ones(2)) for _ in range(2)))

    def step(self, used: int) -> None:
        for _ in range(2):
            loss = self.run(lambda model: torch.stack(tuple(model.parameters())[:used]).sum())
            loss.backward()


def test_a_parameter_without_a_gradient_gets_none_from_a_micro_batch_that_is_left_out():
    """Gradients of layers that a text model does not use, counted at the peak."""
    model = HalfUsed()
    with first_left_out(model):
        model.step(used=2)
    with pytest.raises(PartsDiffer), first_left_out(model):
        model.step(used=1)
