"""Closed forms of what train.offload moves off the device: bytes in host memory and on disk."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from transformers import PretrainedConfig

from lean_finetune.memory.predict.optimizer_states import IN_RAM, Line, Trained, by_type, optimizer_tensors
from lean_finetune.memory.predict.setting import Setting
from lean_finetune.memory.predict.state_formulas import (
    ModelShapes,
    model_shapes,
    paged_lines,
    state_lines,
    trained_tensors,
)
from lean_finetune.memory.trace.cuda_kernels import Target
from lean_finetune.memory.trace.memory_trace import ADAPTERS, OPTIMIZER, WEIGHTS
from lean_finetune.step.offload.host_transfer import STAGING_BYTES
from lean_finetune.step.offload.state_file import BLOCK_BYTES

ON_HOST = "host_optimizer"
"""Category of optimizer state and weights in host memory (train.offload)."""
ON_DISK = "disk_optimizer"
"""Category of optimizer state and copies of weights in a file (train.offload_to=disk)."""


def host_lines(shapes: ModelShapes, setting: Setting) -> tuple[Line, ...]:
    """What train.offload moves to the host's memory, and what it needs there."""
    trained = trained_tensors(shapes, setting.model)
    largest = max(tensor.bytes for tensor in trained)
    on_disk, lines = setting.offload_to == "disk", []
    if setting.offload == "parameters":
        everything = state_lines(shapes, replace(setting, offload="none"), cuda=False)
        on_device = state_lines(shapes, setting, cuda=False)
        moved = (line for line in everything if line not in on_device and not (on_disk and line.category == OPTIMIZER))
        lines = [_page_locked(line, setting) if line.category in (WEIGHTS, ADAPTERS) else line for line in moved]
        if setting.optimizer_in_backward:
            lines.append(Line.of(ON_HOST, "the largest gradient", (largest,)))
    else:
        lines.append(Line.of(ON_HOST, "buffer on the way, page-locked", (min(STAGING_BYTES, largest),)))
    if on_disk:
        buffer = min(setting.offload_buffer_bytes, sum(line.total_bytes(1) for line in disk_lines(shapes, setting)))
        lines.append(Line(category=ON_HOST, what="buffer of state on disk", tensor_bytes=(buffer,), divides=False))
    elif setting.offload == "optimizer":
        copies, states = _copies_and_states(shapes, setting)
        room = Line.of(ON_HOST, "room for the largest gradient", (max(tensor.bytes for tensor in copies),))
        lines = [*by_type(ON_HOST, "copies of the weights, {type}", copies), *states, room, *lines]
    return tuple(replace(line, category=ON_HOST) for line in lines if line.tensor_bytes)


def _page_locked(line: Line, setting: Setting) -> Line:
    """Shards in page-locked memory, which PyTorch's CachingHostAllocator gives in powers of two."""
    parts = 1 if setting.sharing is None else setting.sharing.holders
    sizes = (parts << (-(-size // parts) - 1).bit_length() for size in line.tensor_bytes)
    return replace(line, what=f"{line.what}, page-locked in powers of two", tensor_bytes=tuple(sizes))


def disk_lines(shapes: ModelShapes, setting: Setting) -> tuple[Line, ...]:
    """The file of train.offload_to=disk: whole blocks for each tensor."""
    if setting.offload_to != "disk":
        return ()
    copies, states = _copies_and_states(shapes, setting)
    lines = (*by_type(ON_DISK, "copies of the weights, {type}", copies), *states)
    return tuple(replace(line, category=ON_DISK) for line in lines if line.tensor_bytes and line.what not in IN_RAM)


def _copies_and_states(shapes: ModelShapes, setting: Setting) -> tuple[list[Trained], list[Line]]:
    """Copies of the weights that are updated, and their state."""
    copies = trained_tensors(shapes, setting.model, masters=setting.master_weights)
    return copies, list(optimizer_tensors(copies, setting.optimizer, cuda=False))


def closed_form(config: PretrainedConfig, setting: Setting, target: Target) -> Iterator[dict[str, Any]]:
    """State on a GPU from step to step: category, why, number of tensors, bytes; host and disk are last.

    A sharded tensor counts with an equal part per GPU: uneven divisions are ignored.
    """
    shapes, cuda = model_shapes(config, setting.tensor_parallel), target.foreach
    on_device = state_lines(shapes, setting, cuda=cuda)
    outside = paged_lines(shapes, setting, cuda=cuda)
    if setting.offload != "none":
        outside = (*host_lines(shapes, setting), *disk_lines(shapes, setting))
    for line in (*on_device, *outside):
        category = OPTIMIZER if line in outside else line.category
        parts = setting.sharing.holders_of(category) if setting.sharing and line.divides else 1
        why = line.what if parts == 1 else f"{line.what}, divided among {parts} GPUs"
        size = line.total_bytes(target.granularity_bytes, parts)
        yield {"category": line.category, "why": why, "tensors": len(line.tensor_bytes), "bytes": size}


def host_state_bytes(config: PretrainedConfig, setting: Setting) -> int:
    """Host memory that train.offload takes in one process."""
    return offloaded_state_bytes(model_shapes(config, setting.tensor_parallel), setting)[0]


def disk_state_bytes(config: PretrainedConfig, setting: Setting) -> int:
    """Disk space that train.offload_to=disk takes in one process."""
    return offloaded_state_bytes(model_shapes(config, setting.tensor_parallel), setting)[1]


def offloaded_state_bytes(shapes: ModelShapes, setting: Setting) -> tuple[int, int]:
    """Host memory and disk space that train.offload takes in one process."""
    if setting.offload == "none":
        return 0, 0
    holders = 1 if setting.sharing is None else setting.sharing.holders_of(OPTIMIZER)
    in_memory = sum(line.total_bytes(1, holders) for line in host_lines(shapes, setting))
    return in_memory, sum(line.total_bytes(BLOCK_BYTES, holders) for line in disk_lines(shapes, setting))
