"""Memory of a GPU run's process outside of PyTorch's allocator: CUDA context, libraries, and RAM of the host.

None of this can be traced. Every figure says whether it was measured, and on what, or assumed. Assumed figures have a
margin, which is reported beside them and never added to them.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from transformers import PretrainedConfig

from cuda_memory.gpus import Device, Figure
from cuda_memory.units import MIB, readable_size
from lean_finetune.distributed.sharding_modes import host_bytes
from lean_finetune.memory.predict.offloaded_states import host_state_bytes
from lean_finetune.memory.predict.setting import Setting
from lean_finetune.memory.predict.state_formulas import model_shapes, trained_values, weight_lines
from lean_finetune.memory.trace.cuda_kernels import CUBLAS_HANDLES, target_of
from lean_finetune.model.precision import adapter_dtype, base_dtype
from lean_finetune.step.batches import BATCHES_AHEAD

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
"""RAM of a batch per token (see lean_finetune.step.batches)."""


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
    if setting.sharing is not None and (setting.sharing.holders > 1 or setting.tensor_parallel > 1):
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
    gpus = 1 if setting.sharing is None else setting.sharing.gpus
    return {
        "device": {name: asdict(figure) for name, figure in on_device(device, gpus).items()},
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
    gpus = 1 if setting.sharing is None else setting.sharing.gpus
    return gpus // nodes if nodes > 1 else min(gpus, GPUS_OF_A_NODE)


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
