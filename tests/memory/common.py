"""What the tests of the estimate share: settings, shapes, devices and real batches of a shape."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from lean_finetune.core.units import MIB
from lean_finetune.memory.devices import cpu_device, resolve_gpu
from lean_finetune.memory.gpus import BF16_CAPABILITY, context_of
from lean_finetune.memory.predict.setting import Setting
from lean_finetune.memory.trace.cuda_kernels import Target, target_of
from lean_finetune.plan.batch_plan import MicroBatch, Plan
from lean_finetune.step.batches import BatchShape
from tests.small_model import spec_of

CPU_TARGET = target_of(cpu_device(2**34))


def gpu_target(name: str) -> Target:
    return target_of(resolve_gpu(name)[0])


def card_for(tensor_bytes: float) -> str:
    """A size for hardware.gpu with room for these bytes of tensors and a CUDA context."""
    return f"{(tensor_bytes + context_of(BF16_CAPABILITY).max_bytes) / MIB:.3f}MiB"


def setting_of(
    *,
    optimizer: str = "adamw",
    loss_chunk: int | None = 32,
    max_grad_norm: float | None = 1.0,
    master_weights: bool = False,
    offload_activations: str = "none",
    offload: str = "none",
    optimizer_in_backward: bool = False,
    **model: Any,
) -> Setting:
    return Setting(
        model=spec_of(**model),
        optimizer=optimizer,
        loss_chunk=loss_chunk,
        max_grad_norm=max_grad_norm,
        master_weights=master_weights,
        offload_activations=offload_activations,  # type: ignore[arg-type]
        offload=offload,  # type: ignore[arg-type]
        optimizer_in_backward=optimizer_in_backward,
    )


def shape(rows: int, length: int, supervised: int) -> BatchShape:
    return BatchShape(rows=rows, length=length, supervised=supervised, joined_lengths=None)


def joined(lengths: tuple[int, ...], supervised: int) -> BatchShape:
    return BatchShape(rows=1, length=sum(lengths), supervised=supervised, joined_lengths=lengths)


def plan_of(steps: Iterable[Iterable[tuple[int, int, int]]]) -> Plan:
    """A plan from (rows, length, supervised) of each step's micro-batches."""
    return Plan.of(
        [
            MicroBatch(
                epoch=0,
                step=number,
                rows=np.arange(rows, dtype=np.int32),
                length=length,
                supervised=supervised,
                rank=0,
                flat=False,
            )
            for number, step in enumerate(steps)
            for rows, length, supervised in step
        ]
    )
