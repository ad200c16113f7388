"""Closed forms of what train.offload moves off the device: bytes in host memory and on disk."""

from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from transformers import PretrainedConfig

from lean_finetune.distributed.replicated import assign_owners, layer_of
from lean_finetune.distributed.sharding_modes import ShardSpec
from lean_finetune.memory.predict.optimizer_states import (
    IN_RAM,
    Line,
    Trained,
    by_type,
    optimizer_tensors,
    updated_tensors,
)
from lean_finetune.memory.predict.setting import Setting
from lean_finetune.memory.predict.state_formulas import (
    ModelShapes,
    model_shapes,
    paged_lines,
    state_lines,
    trained_tensors,
)
from lean_finetune.memory.trace.cuda_kernels import Target
from lean_finetune.memory.trace.memory_trace import OPTIMIZER, WEIGHTS
from lean_finetune.step.offload.disk_weights import BLOCK_BYTES
from lean_finetune.step.offload.master_weights import STAGING_BYTES

ON_HOST = "host_optimizer"
"""Category of optimizer state and weights in host memory (train.offload)."""
ON_DISK = "disk_optimizer"
"""Category of optimizer state and copies of weights in a file (train.offload_to=disk)."""


def host_lines(shapes: ModelShapes, setting: Setting) -> tuple[Line, ...]:
    """What train.offload moves to the host's memory, and what it needs there; of the process that needs most."""
    return max((_host_lines(shapes, setting, own) for own in _of_processes(shapes, setting)), key=_total_bytes)


def disk_lines(shapes: ModelShapes, setting: Setting) -> tuple[Line, ...]:
    """The file of train.offload_to=disk: whole blocks for each tensor; of the process that needs most."""
    return max((_disk_lines(setting, own) for own in _of_processes(shapes, setting)), key=_total_bytes)


def _of_processes(shapes: ModelShapes, setting: Setting) -> Iterator[list[Trained]]:
    """The trained tensors that each process updates: one list where all processes have as many values."""
    trained, sharing = trained_tensors(shapes, setting.train), setting.sharing
    if sharing is None:
        yield trained
    elif setting.pipeline_stages > 1:
        yield from filter(None, _of_stages(shapes, trained, sharing.spec))
    elif sharing.spec.mode == "zero1":
        count = min(sharing.gpus, len(trained))  # A run with fewer tensors than GPUs is refused.
        owners = assign_owners([tensor.values for tensor in trained], count)
        for process in range(count):
            yield [tensor for tensor, owner in zip(trained, owners, strict=True) if owner == process]
    else:  # The first process gets the larger part of rows that do not divide.
        parts = sharing.holders
        yield [replace(t, shape=(*(-(-rows // parts) for rows in t.shape[:1]), *t.shape[1:])) for t in trained]


def _of_stages(shapes: ModelShapes, trained: Sequence[Trained], spec: ShardSpec) -> list[list[Trained]]:
    """The trained tensors of each stage of a pipeline, with equal numbers of layers unless they are decided."""
    layers = list(dict.fromkeys(filter(None, (layer_of(parameter.name) for parameter in shapes.parameters))))
    last, count = spec.pipeline_stages - 1, len(layers)
    ends = list(accumulate(spec.stage_layers or ())) or [count * (stage + 1) // (last + 1) for stage in range(last + 1)]
    found: list[list[Trained]] = [[] for _ in ends]
    for tensor in trained:
        layer = layer_of(tensor.name)
        stage = bisect(ends, layers.index(layer)) if layer else last * any(found)
        found[stage].append(tensor)
    if shapes.tied and not layer_of(trained[0].name):  # The last stage has a copy of the embedding.
        found[last].append(trained[0])
    return found


def _host_lines(shapes: ModelShapes, setting: Setting, trained: list[Trained]) -> tuple[Line, ...]:
    """`host_lines` of a process that updates `trained`."""
    largest = max(tensor.bytes for tensor in trained)
    on_disk, lines = setting.train.offload_to == "disk", []
    if setting.train.offload == "parameters":
        everything = state_lines(shapes, setting.with_train(offload="none"), cuda=False, trained=trained)
        on_device = state_lines(shapes, setting, cuda=False)
        moved = (line for line in everything if line not in on_device and not (on_disk and line.category == OPTIMIZER))
        lines = [_page_locked(line, setting) for line in moved]
        if setting.train.optimizer_in_backward:
            lines.append(Line.of(ON_HOST, "the largest gradient", (largest,)))
    else:
        lines.append(Line.of(ON_HOST, "buffer on the way, page-locked", (min(STAGING_BYTES, largest),)))
    if on_disk:
        buffer = min(setting.offload_buffer_bytes, _total_bytes(_disk_lines(setting, trained)))
        lines.append(Line.of(ON_HOST, "buffer of state on disk", (buffer,)))
    elif setting.train.offload == "optimizer":
        copies, states = _copies_and_states(setting, trained)
        room = Line.of(ON_HOST, "room for the largest gradient", (max(tensor.bytes for tensor in copies),))
        lines = [*by_type(ON_HOST, "copies of the weights, {type}", copies), *states, room, *lines]
    return tuple(replace(line, category=ON_HOST) for line in lines if line.tensor_bytes)


def _page_locked(line: Line, setting: Setting) -> Line:
    """Shards and gradients in page-locked memory: PyTorch's CachingHostAllocator gives powers of two."""
    if line.category == OPTIMIZER:
        return line
    parts = setting.sharing.holders if setting.sharing is not None and line.category == WEIGHTS else 1
    sizes = (1 << (-(-size // parts) - 1).bit_length() for size in line.tensor_bytes)
    return replace(line, what=f"{line.what}, page-locked in powers of two", tensor_bytes=tuple(sizes))


def _disk_lines(setting: Setting, trained: list[Trained]) -> tuple[Line, ...]:
    """`disk_lines` of a process that updates `trained`."""
    if setting.train.offload_to != "disk":
        return ()
    copies, states = _copies_and_states(setting, trained)
    lines = (*by_type(ON_DISK, "copies of the weights, {type}", copies), *states)
    return tuple(replace(line, category=ON_DISK) for line in lines if line.tensor_bytes and line.what not in IN_RAM)


def _copies_and_states(setting: Setting, trained: list[Trained]) -> tuple[Sequence[Trained], list[Line]]:
    """Copies of the weights that are updated, and their state."""
    copies = updated_tensors(trained, masters=setting.train.master_weights)
    return copies, list(optimizer_tensors(copies, setting.train.optimizer, cuda=False))


def _total_bytes(lines: Iterable[Line]) -> int:
    return sum(sum(line.tensor_bytes) for line in lines)


def closed_form(config: PretrainedConfig, setting: Setting, target: Target) -> Iterator[dict[str, Any]]:
    """State on a GPU from step to step: category, why, number of tensors, bytes; host and disk are last.

    On a GPU, a sharded tensor counts with an equal part: uneven divisions are ignored.
    """
    shapes, cuda = model_shapes(config, setting.tensor_parallel), target.foreach
    on_device = state_lines(shapes, setting, cuda=cuda)
    outside = paged_lines(shapes, setting, cuda=cuda)
    if setting.train.offload != "none":
        outside = (*host_lines(shapes, setting), *disk_lines(shapes, setting))
    for line in (*on_device, *outside):
        category = OPTIMIZER if line in outside else line.category
        parts = setting.sharing.holders_of(category) if setting.sharing and line.divides else 1
        why = line.what if parts == 1 else f"{line.what}, divided among {parts} GPUs"
        size = line.total_bytes(target.granularity_bytes, 1 if line.category in (ON_HOST, ON_DISK) else parts)
        yield {"category": line.category, "why": why, "tensors": len(line.tensor_bytes), "bytes": size}


def host_state_bytes(config: PretrainedConfig, setting: Setting) -> int:
    """Host memory that train.offload takes in one process."""
    return offloaded_state_bytes(model_shapes(config, setting.tensor_parallel), setting)[0]


def disk_state_bytes(config: PretrainedConfig, setting: Setting) -> int:
    """Disk space that train.offload_to=disk takes in one process."""
    return disk_bytes(model_shapes(config, setting.tensor_parallel), setting)


def offloaded_state_bytes(shapes: ModelShapes, setting: Setting) -> tuple[int, int]:
    """Host memory and disk space that train.offload takes in one process."""
    if setting.train.offload == "none":
        return 0, 0
    in_memory = sum(line.total_bytes(1) for line in host_lines(shapes, setting))
    return in_memory, disk_bytes(shapes, setting)


def disk_bytes(shapes: ModelShapes, setting: Setting) -> int:
    """Disk space that train.offload_to=disk takes in one process."""
    if setting.train.offload == "none" or setting.train.offload_to != "disk":
        return 0
    return sum(line.total_bytes(BLOCK_BYTES) for line in disk_lines(shapes, setting))
