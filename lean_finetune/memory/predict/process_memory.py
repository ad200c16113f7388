"""What a GPU run's process takes beside PyTorch's blocks: the CUDA context, libraries, and RAM of the host.

None of this can be traced. Every figure says whether it was measured, and on what, or is assumed; assumed ones have a
margin, which is told beside them and never added in silence.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from transformers import PretrainedConfig

from lean_finetune.config.field_types import Method, Sharding
from lean_finetune.config.sharding_rules import CUTTING
from lean_finetune.core.units import MIB
from lean_finetune.distributed.sharding_modes import READ_BY_EVERY_PROCESS
from lean_finetune.memory.gpus import Device
from lean_finetune.memory.predict.state_formulas import ModelShapes, model_shapes, state_bytes, state_lines
from lean_finetune.memory.trace.cuda_kernels import CUBLAS_HANDLES, target_of
from lean_finetune.memory.trace.memory_trace import ADAPTERS, QUANTISATION_STATE, WEIGHTS
from lean_finetune.model.model_spec import ModelSpec
from lean_finetune.step.batch_loader import BATCHES_AHEAD

Basis = Literal["measured", "assumed", "documented", "derived"]

IMPORTS_BYTES = 426 * MIB
"""RAM of a process after the imports of stage train, measured with PyTorch 2.13 for CPUs."""
CUDA_HOST_MARGIN_BYTES = 3072 * MIB
"""What the CUDA libraries and the driver may add to it."""
LOADING_THREADS = 4
"""transformers moves so many weights to a GPU at a time; one where weights are packed on the way."""
NCCL_BYTES = 256 * MIB
NCCL_MARGIN_BYTES = 768 * MIB
NCCL_WHY = "buffers of its channels, outside of PyTorch's blocks; never measured here: they depend on links and GPUs"
LOADING = ("loading", "model")
"""Of the host's RAM, what is needed only while weights are read."""
GPUS_OF_A_NODE = 8
"""Processes that share a host, at most: what servers hold."""
BATCH_TOKEN_BYTES = 100
"""RAM of a batch, per token (see lean_finetune.step.batch_loader)."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A figure of process.json."""

    bytes: int
    margin_bytes: int
    """So much more it may be; 0 for what is exact."""
    basis: Basis
    why: str


def on_device(device: Device, gpus: int = 1) -> dict[str, Part]:
    """What the process takes on a GPU besides the blocks that PyTorch reserves, or inside them where it says so."""
    context = Part(**asdict(device.context))
    workspaces = f"{CUBLAS_HANDLES} handles (forward, backward), PyTorch's default size; inside what tensors count"
    cublas = Part(bytes=target_of(device).constant_bytes, margin_bytes=0, basis="documented", why=workspaces)
    nccl = Part(bytes=0, margin_bytes=0, basis="derived", why="one GPU: no communicator is made")
    if gpus > 1:
        nccl = Part(bytes=NCCL_BYTES, margin_bytes=NCCL_MARGIN_BYTES, basis="assumed", why=NCCL_WHY)
    return {"cuda_context": context, "cublas_workspaces": cublas, "nccl": nccl}


def on_host(
    config: PretrainedConfig,
    spec: ModelSpec,
    stored: torch.dtype,
    *,
    batch_tokens: int,
    sharding: Sharding = "none",
    pinned_bytes: int = 0,
    optimizer_bytes: int = 0,
) -> dict[str, Part]:
    """RAM that a process of a GPU run needs on its host: `loading` and `model` while it reads weights, and only then.

    Args:
        config: the model's config.
        spec: how it is loaded.
        stored: type of the weights in its files.
        sharding: train.sharding.
        batch_tokens: of the largest micro-batch.
        pinned_bytes: of activations that wait there.
        optimizer_bytes: of train.offload.
    """
    shapes = model_shapes(config)
    largest = max(parameter.values for parameter in shapes.parameters)
    packed = spec.method in ("qlora", "int8_lora")
    threads = 1 if packed else LOADING_THREADS
    moving = f"{threads} weight(s) on their way, as stored and converted; the largest has {largest} values"
    loading = threads * largest * (stored.itemsize + spec.dtype.itemsize)
    batches = (1 + BATCHES_AHEAD) * batch_tokens * BATCH_TOKEN_BYTES
    imports = "after imports, measured with PyTorch for CPUs; the margin is for CUDA's libraries"
    pinned = {} if not pinned_bytes else {"activations": _activations(pinned_bytes)}
    optimizer = {} if not optimizer_bytes else {"optimizer": _optimizer(optimizer_bytes)}
    return {
        **pinned,
        **optimizer,
        "process": Part(bytes=IMPORTS_BYTES, margin_bytes=CUDA_HOST_MARGIN_BYTES, basis="measured", why=imports),
        "loading": Part(bytes=loading, margin_bytes=0, basis="derived", why=moving),
        **({"model": _whole_model(shapes, spec)} if sharding in CUTTING else {}),
        "batches": Part(
            bytes=batches, margin_bytes=0, basis="derived", why="one in use, and one thread's ahead; page-locked"
        ),
    }


def _activations(count: int) -> Part:
    """What train.offload_activations=cpu keeps there."""
    why = "what layers keep for backward, page-locked in blocks of powers of two"
    return Part(bytes=count, margin_bytes=0, basis="derived", why=why)


def _optimizer(count: int) -> Part:
    """What train.offload keeps there."""
    why = "weights or their copies, their optimizer's state, gradients or the largest one, buffers that tensors pass"
    return Part(bytes=count, margin_bytes=0, basis="derived", why=why)


def _whole_model(shapes: ModelShapes, spec: ModelSpec) -> Part:
    """All weights, where they are cut: read on the host, and handed out from there layer by layer.

    A layer's parts are made as the whole layer is freed, so that this is the most at any instant. Other processes have
    only addresses for it until a layer comes.
    """
    lines = state_lines(shapes, spec, "sgd", cuda=True, master_weights=False)
    held = state_bytes(lines, granularity_bytes=1)
    whole = sum(held.get(category, 0) for category in (WEIGHTS, QUANTISATION_STATE, ADAPTERS))
    return Part(bytes=whole, margin_bytes=0, basis="derived", why="all weights, until each layer is handed out")


def needed_bytes(parts: dict[str, Part], processes: int = 1, readers: int = 1) -> int:
    """RAM of all processes on a host, without margins: loading is over before batches are made.

    Args:
        parts: of a process that reads weights.
        processes: on the host.
        readers: of these, how many read weights.
    """
    loading = sum(parts[name].bytes for name in LOADING if name in parts)
    training = sum(part.bytes for name, part in parts.items() if name not in (*LOADING, "process"))
    return processes * parts["process"].bytes + max(readers * loading, processes * training)


def as_json(device: dict[str, Part], host: dict[str, Part], gpus: int = 1, method: Method = "full") -> dict[str, Any]:
    """The content of process.json; what the host needs is of all processes that are on one: the first one of a run."""
    processes = min(gpus, GPUS_OF_A_NODE)
    readers = processes if method in READ_BY_EVERY_PROCESS else 1
    return {
        "device": {name: asdict(part) for name, part in device.items()},
        "host": {name: asdict(part) for name, part in host.items()},
        "processes_per_host": processes,
        "processes_that_read_weights": readers,
        "host_needed_bytes": needed_bytes(host, processes, readers),
    }
