"""Traces runs of the real training step on fake tensors as timelines, cut into the units of a replay."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PretrainedConfig

from stages.estimate.kernels import Target
from stages.estimate.predict import Setting, _hold_state, _phase, optim_of
from stages.estimate.step_units import step_units
from stages.estimate.templates import UPDATE, Timeline, Unit
from stages.estimate.trace import WORKSPACE, MemoryTrace
from stages.model.load import fake_model
from stages.step.batches import Batch, empty_batch
from stages.step.optim import build_optimizer
from stages.step.step import StepSpec, training_step
from tests.estimate.common import shape

CPU = torch.device("cpu")
Shape = tuple[int, int, int]
"""Rows, length, supervised tokens."""


def record(config: PretrainedConfig, setting: Setting, target: Target, steps: Sequence[Sequence[Shape]]) -> Timeline:
    """Trace these steps with exact sizes: rounding is the allocator's."""
    exact = replace(target, granularity_bytes=1)
    trace = MemoryTrace(granularity_bytes=1, rules=exact.rules, vocab_size=config.get_text_config().vocab_size)
    marks: list[tuple[int, Unit]] = []
    gc.collect()
    with FakeTensorMode(allow_non_fake_inputs=True), exact.attention():
        model = fake_model(config, setting.model, CPU)
        optimizer = build_optimizer(model, optim_of(setting))
        _hold_state(trace, model, optimizer, setting, cuda=target.foreach)
        trace.hold_bytes(exact.constant_bytes, WORKSPACE)
        spec = StepSpec(loss_chunk=setting.loss_chunk, max_grad_norm=setting.max_grad_norm, foreach=exact.foreach)

        def batches(shapes: Sequence[Shape], units: Sequence[Unit]) -> Iterator[Batch]:
            for wanted, unit in zip(shapes, units, strict=False):
                marks.append((len(trace._events), unit))
                yield empty_batch(shape(*wanted), CPU)

        @contextmanager
        def phase(name: str, update: Unit) -> Iterator[None]:
            if name == "clip":
                marks.append((len(trace._events), update))
            with _phase(trace, name, like_cuda=exact.foreach and setting.model.autocast_dtype is not None):
                yield

        with trace.recording():
            for shapes in steps:
                units = step_units(shapes, setting.loss_chunk)
                assert units[-1].role == UPDATE
                training_step(
                    model,
                    optimizer,
                    batches(shapes, units),
                    supervised_tokens=1,
                    model_spec=setting.model,
                    spec=spec,
                    phase=lambda name, update=units[-1]: phase(name, update),  # type: ignore[misc]
                    guard=lambda losses, norm: None,
                )
    return Timeline(events=tuple(trace._events), units=tuple(marks))
