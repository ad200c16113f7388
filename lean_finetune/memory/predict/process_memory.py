"""Memory outside of PyTorch's allocator: the process on the GPU, the RAM of the host, and what is offloaded there."""

from bisect import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import accumulate
from typing import Any

import torch
from transformers import PretrainedConfig

from cuda_memory.gpus import Device, Figure
from cuda_memory.units import MIB, readable_size
from lean_finetune.memory.predict.state_formulas import (
    IN_RAM,
    ModelShapes,
    StateLine,
    Trained,
    by_type,
    model_shapes,
    optimizer_tensors,
    paged_lines,
    state_lines,
    trained_tensors,
    trained_values,
    updated_tensors,
    weight_lines,
)
from lean_finetune.memory.predict.traced_step import TracedModel
from lean_finetune.memory.trace.cuda_kernels import CUBLAS_HANDLES, target_of
from lean_finetune.memory.trace.memory_trace import OPTIMIZER, WEIGHTS
from lean_finetune.memory.trace.setting import Setting
from lean_finetune.model.precision import adapter_dtype, base_dtype
from lean_finetune.step.batches import BATCHES_AHEAD
from lean_finetune.step.offload.disk_weights import BLOCK_BYTES
from lean_finetune.step.offload.master_weights import STAGING_BYTES
from lean_finetune.step.parallel_model import assign_owners, host_bytes, layer_of

ON_HOST = "host_optimizer"
"""Category of optimizer state and weights in host memory (train.offload)."""
ON_DISK = "disk_optimizer"
"""Category of optimizer state and copies of weights in a file (train.offload_to=disk)."""


def host_lines(shapes: ModelShapes, setting: Setting) -> tuple[StateLine, ...]:
    """What train.offload moves to the host's memory, and what it needs there; of the process that needs most."""
    return max((_host_lines(shapes, setting, own) for own in _of_processes(shapes, setting)), key=_total_bytes)


def disk_lines(shapes: ModelShapes, setting: Setting) -> tuple[StateLine, ...]:
    """The file of train.offload_to=disk: whole blocks for each tensor; of the process that needs most."""
    return max((_disk_lines(setting, own) for own in _of_processes(shapes, setting)), key=_total_bytes)


def _of_processes(shapes: ModelShapes, setting: Setting) -> Iterator[list[Trained]]:
    """The trained tensors that each process updates: one list where all processes have as many values."""
    trained = trained_tensors(shapes, setting.train)
    if setting.layout.pipeline > 1:
        yield from filter(None, _of_stages(shapes, trained, setting))
    elif setting.mode == "zero1":
        count = min(setting.gpus, len(trained))  # A run with fewer tensors than GPUs is refused.
        owners = assign_owners([tensor.values for tensor in trained], count)
        for process in range(count):
            yield [tensor for tensor, owner in zip(trained, owners, strict=True) if owner == process]
    else:  # The first process gets the larger part of rows that do not divide.
        parts = setting.shards_of_weights
        yield [replace(t, shape=(*(-(-rows // parts) for rows in t.shape[:1]), *t.shape[1:])) for t in trained]


def _of_stages(shapes: ModelShapes, trained: Sequence[Trained], setting: Setting) -> list[list[Trained]]:
    """The trained tensors of each stage of a pipeline, with equal numbers of layers unless they are decided."""
    layers = list(dict.fromkeys(filter(None, (layer_of(parameter.name) for parameter in shapes.parameters))))
    stages, count = setting.layout.pipeline, len(layers)
    last = stages - 1
    ends = list(accumulate(setting.stage_layers or ())) or [count * (stage + 1) // stages for stage in range(stages)]
    found: list[list[Trained]] = [[] for _ in ends]
    for tensor in trained:
        layer = layer_of(tensor.name)
        stage = bisect(ends, layers.index(layer)) if layer else last * any(found)
        found[stage].append(tensor)
    if shapes.tied and not layer_of(trained[0].name):  # The last stage has a copy of the embedding.
        found[last].append(trained[0])
    return found


def _host_lines(shapes: ModelShapes, setting: Setting, trained: list[Trained]) -> tuple[StateLine, ...]:
    """`host_lines` of a process that updates `trained`."""
    largest = max(tensor.bytes for tensor in trained)
    on_disk, lines = setting.train.offload_to == "disk", []
    if setting.train.offload == "parameters":
        everything = state_lines(shapes, setting.with_train(offload="none"), cuda=False, trained=trained)
        on_device = state_lines(shapes, setting, cuda=False)
        moved = (line for line in everything if line not in on_device and not (on_disk and line.category == OPTIMIZER))
        lines = [_page_locked(line, setting) for line in moved]
        if setting.train.optimizer_in_backward:
            lines.append(StateLine.of(ON_HOST, "the largest gradient", (largest,)))
    else:
        lines.append(StateLine.of(ON_HOST, "buffer on the way, page-locked", (min(STAGING_BYTES, largest),)))
    if on_disk:
        buffer = min(setting.offload_buffer_bytes, _total_bytes(_disk_lines(setting, trained)))
        lines.append(StateLine.of(ON_HOST, "buffer of state on disk", (buffer,)))
    elif setting.train.offload == "optimizer":
        copies, states = _copies_and_states(setting, trained)
        room = StateLine.of(ON_HOST, "room for the largest gradient", (max(tensor.bytes for tensor in copies),))
        lines = [*by_type(ON_HOST, "copies of the weights, {type}", copies), *states, room, *lines]
    return tuple(replace(line, category=ON_HOST) for line in lines if line.tensor_bytes)


def _page_locked(line: StateLine, setting: Setting) -> StateLine:
    """Shards and gradients in page-locked memory: PyTorch's CachingHostAllocator gives powers of two."""
    if line.category == OPTIMIZER:
        return line
    parts = setting.shards_of_weights if line.category == WEIGHTS else 1
    sizes = (1 << (-(-size // parts) - 1).bit_length() for size in line.tensor_bytes)
    return replace(line, what=f"{line.what}, page-locked in powers of two", tensor_bytes=tuple(sizes))


def _disk_lines(setting: Setting, trained: list[Trained]) -> tuple[StateLine, ...]:
    """`disk_lines` of a process that updates `trained`."""
    if setting.train.offload_to != "disk":
        return ()
    copies, states = _copies_and_states(setting, trained)
    lines = (*by_type(ON_DISK, "copies of the weights, {type}", copies), *states)
    return tuple(replace(line, category=ON_DISK) for line in lines if line.tensor_bytes and line.what not in IN_RAM)


def _copies_and_states(setting: Setting, trained: list[Trained]) -> tuple[Sequence[Trained], list[StateLine]]:
    """Copies of the weights that are updated, and their state."""
    copies = updated_tensors(trained, masters=setting.train.master_weights)
    return copies, list(optimizer_tensors(copies, setting.train.optimizer, cuda=False))


def _total_bytes(lines: Iterable[StateLine]) -> int:
    return sum(sum(line.tensor_bytes) for line in lines)


def closed_form(model: TracedModel) -> Iterator[dict[str, Any]]:
    """State on a GPU from step to step: category, why, number of tensors, bytes; host and disk are last.

    On a GPU, a sharded tensor counts with an equal part: uneven divisions are ignored.
    """
    setting, target = model.setting, model.target
    shapes, cuda = model_shapes(model.config, setting.layout.tensor), target.foreach
    on_device = state_lines(shapes, setting, cuda=cuda)
    outside = paged_lines(shapes, setting, cuda=cuda)
    if setting.train.offload != "none":
        outside = (*host_lines(shapes, setting), *disk_lines(shapes, setting))
    for line in (*on_device, *outside):
        category = OPTIMIZER if line in outside else line.category
        parts = setting.shards_of(category) if line.divides else 1
        why = line.what if parts == 1 else f"{line.what}, in {parts} shards"
        size = line.total_bytes(target.granularity_bytes, 1 if line.category in (ON_HOST, ON_DISK) else parts)
        yield {"category": line.category, "why": why, "tensors": len(line.tensor_bytes), "bytes": size}


def host_state_bytes(config: PretrainedConfig, setting: Setting) -> int:
    """Host memory that train.offload takes in one process."""
    return offloaded_state_bytes(model_shapes(config, setting.layout.tensor), setting)[0]


def disk_state_bytes(config: PretrainedConfig, setting: Setting) -> int:
    """Disk space that train.offload_to=disk takes in one process."""
    return disk_bytes(model_shapes(config, setting.layout.tensor), setting)


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


# The process: CUDA context, libraries, RAM of the host. None of this can be traced. Every figure says whether it was
# measured, and on what, or assumed. Assumed figures have a margin, which is reported beside them and never added.

IMPORTS_BYTES = 426 * MIB
"""RAM of a process after the imports of stage train, measured with PyTorch 2.13 for CPUs."""
CUDA_HOST_MARGIN_BYTES = 3072 * MIB
"""Margin for the CUDA libraries and the driver."""
LOADING_THREADS = 4
"""Weights that transformers moves to a GPU at the same time; one where weights are quantised on the way."""
LOADING = ("loading", "model")
"""Host memory that is needed only while weights are read."""
GPUS_OF_A_NODE = 8
"""GPUs of a host, if their number is not known."""
BATCH_TOKEN_BYTES = 100
"""RAM of a batch per token (see lean_finetune.step.batch_stream)."""


def _derived(count: int, why: str) -> Figure:
    """An exact figure."""
    return Figure(bytes=count, margin_bytes=0, basis="derived", why=why)


def on_device(device: Device, gpus: int = 1) -> dict[str, Figure]:
    """GPU memory of the process, outside of the blocks that PyTorch reserves unless `why` says otherwise."""
    why = f"{CUBLAS_HANDLES} handles (forward, backward), PyTorch's default size; inside what tensors count"
    cublas = Figure(bytes=target_of(device).constant_bytes, margin_bytes=0, basis="documented", why=why)
    nccl = _derived(0, "one GPU: no communicator is made")
    if gpus > 1:
        why = "buffers of its channels, outside of PyTorch's blocks; never measured here: they depend on links and GPUs"
        nccl = Figure(bytes=256 * MIB, margin_bytes=768 * MIB, basis="assumed", why=why)
    return {"cuda_context": device.context, "cublas_workspaces": cublas, "nccl": nccl}


def outside_of_blocks(device: Device, gpus: int = 1) -> tuple[Figure, ...]:
    """GPU memory of the process outside of the blocks that PyTorch reserves."""
    figures = on_device(device, gpus)
    return figures["cuda_context"], figures["nccl"]


def on_host(
    config: PretrainedConfig, setting: Setting, stored: torch.dtype, *, batch_tokens: int, offloaded_bytes: int = 0
) -> dict[str, Figure]:
    """Host RAM of a GPU run's process; `loading` and `model` only where the process reads weights.

    `stored` is the type of the weights in the model's files. The largest micro-batch has `batch_tokens`. The step
    offloads activations of `offloaded_bytes`.
    """
    shapes, train = model_shapes(config), setting.train
    largest = max(parameter.values for parameter in shapes.parameters)
    threads = 1 if train.method in ("qlora", "int8_lora") else LOADING_THREADS
    figures: dict[str, Figure] = {}
    if setting.train.offload_activations == "cpu" and offloaded_bytes:
        why = "what layers keep for backward, page-locked in blocks of powers of two"
        figures["activations"] = _derived(offloaded_bytes, why)
    if optimizer_bytes := host_state_bytes(config, setting):
        what = "weights or their copies, their optimizer's state, gradients or the largest one"
        figures["optimizer"] = _derived(optimizer_bytes, f"{what}, buffers that tensors pass")
    why = "after imports, measured with PyTorch for CPUs; the margin is for CUDA's libraries"
    figures["process"] = Figure(bytes=IMPORTS_BYTES, margin_bytes=CUDA_HOST_MARGIN_BYTES, basis="measured", why=why)
    why = f"{threads} weight(s) on their way, as stored and converted; the largest has {largest} values"
    figures["loading"] = _derived(threads * largest * (stored.itemsize + base_dtype(train).itemsize), why)
    if setting.shards_of_weights > 1 or setting.layout.tensor > 1:
        # One process reads the model on its host and sends it to the GPUs layer by layer.
        model_bytes = sum(line.total_bytes(1) for line in weight_lines(shapes, train))
        if train.adapted:
            model_bytes += trained_values(shapes, train) * adapter_dtype(train).itemsize
        figures["model"] = _derived(model_bytes, "all weights, until each layer is sent to its GPUs")
    batches = (1 + BATCHES_AHEAD) * batch_tokens * BATCH_TOKEN_BYTES
    figures["batches"] = _derived(batches, "one in use, and one thread's ahead; page-locked")
    return figures


def as_json(device: Device, setting: Setting, host: Mapping[str, Figure]) -> dict[str, Any]:
    """Content of process.json; `host` is that of `on_host`."""
    return {
        "device": {name: asdict(figure) for name, figure in on_device(device, setting.gpus).items()},
        "host": {name: asdict(figure) for name, figure in host.items()},
        "host_of_process": of_process(host),
        "processes_per_host": processes_per_host(setting),
        "host_needed_bytes": needed_bytes(setting, host),
    }


def of_process(host: Mapping[str, Figure]) -> dict[str, int]:
    """RAM of a process, as `host_bytes` adds it up; `host` is that of `on_host`."""
    loading = sum(host[name].bytes for name in LOADING if name in host)
    training = sum(figure.bytes for name, figure in host.items() if name not in (*LOADING, "process"))
    return {"imports": host["process"].bytes, "loading": loading, "training": training}


def processes_per_host(setting: Setting, nodes: int = 1) -> int:
    """GPUs of each of `nodes` hosts; 1 is the number that stage estimate takes, as it does not know them."""
    return setting.gpus // nodes if nodes > 1 else min(setting.gpus, GPUS_OF_A_NODE)


def needed_bytes(setting: Setting, host: Mapping[str, Figure], nodes: int = 1) -> int:
    """RAM that all processes of the first host need, without margins; `host` is that of `on_host`."""
    return host_bytes(of_process(host), setting.train.method, processes_per_host(setting, nodes))


def host_shortage(
    there: int | None,
    config: PretrainedConfig,
    setting: Setting,
    stored: torch.dtype,
    *,
    batch_tokens: int,
    offloaded_bytes: int,
    nodes: int = 1,
) -> str | None:
    """What hosts with RAM of `there` bytes lack; None if that suffices or is not known.

    `nodes` as for `processes_per_host`, the others as for `on_host`.
    """
    if there is None:
        return None
    host = on_host(config, setting, stored, batch_tokens=batch_tokens, offloaded_bytes=offloaded_bytes)
    if (needed := needed_bytes(setting, host, nodes)) <= there:
        return None
    count = processes_per_host(setting, nodes)
    return (
        f"hardware.host_ram_gib: the run needs {readable_size(needed)} of RAM on a host with {count} of its GPUs, "
        f"which has {readable_size(there)}"
    )
