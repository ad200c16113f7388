"""Check the actual device and host against the prediction before anything is loaded."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from cuda_memory.units import MIB, readable_size
from lean_finetune.config.field_types import (
    SPLIT_WEIGHTS,
    DeviceChoice,
    OffloadActivations,
    OffloadState,
    OffloadTo,
    Sharding,
)
from lean_finetune.config.schema import Run, Train
from lean_finetune.core.atomic_files import write_errors
from lean_finetune.core.errors import DoesNotFit, UserError
from lean_finetune.core.memory_limits import free_host_bytes
from lean_finetune.distributed.processes import World, uses_cuda
from lean_finetune.memory.gpu_names import NAMED
from lean_finetune.model.attention_choice import choose_attention
from lean_finetune.step.offload.master_weights import refuse_offloaded_state

PROCESS_BYTES = 345 * MIB
"""RAM that a process alone uses after the imports of stage train, measured with PyTorch 2.13 for CPUs."""


def training_device(choice: DeviceChoice = "auto") -> torch.device:
    """Return the current CUDA device, else the CPU; `choice` is run.device."""
    return torch.device("cuda", torch.cuda.current_device()) if uses_cuda(choice) else torch.device("cpu")


def refuse_absent_gpu(choice: DeviceChoice, estimate: Mapping[str, Any]) -> None:
    """Refuse to train on the CPU a run that was planned for a named GPU: it would take hours or days.

    `choice` is run.device, and `estimate` data/estimate/figures.json.

    Raises:
        UserError: this machine has no CUDA device.
    """
    if choice == "auto" and estimate["gpu_reason"] == NAMED and not torch.cuda.is_available():
        raise UserError(
            f"hardware.gpu: the run is for {estimate['gpu']}, and this machine has no CUDA device that PyTorch can use "
            "(`lean-finetune doctor` says why); train on one that has, or set run.device=cpu to train on the CPU"
        )


def other_device_note(device: torch.device, estimate: Mapping[str, Any]) -> str | None:
    """A line if training runs on the CPU and the prediction, data/estimate/figures.json, is for a GPU."""
    if device.type == "cuda" or estimate["gpu"] == "cpu":
        return None
    return f"training runs on the CPU with {torch.get_num_threads()} threads; the prediction is for {estimate['gpu']}"


def check_device(
    device: torch.device,
    train: Train,
    verdict: Mapping[str, Any],
    estimate: Mapping[str, Any],
    processes: int = 1,
) -> None:
    """Refuse a run that this device cannot compute or has no memory for.

    Args:
        device: where training runs.
        train: method and precision of the model.
        verdict: data/estimate/verdict.json; its refusal was decided for `hardware.gpu`.
        estimate: data/estimate/figures.json; its peaks are compared with the free memory of device and host.
        processes: of the run on this machine; without GPUs they share its memory.

    Raises:
        DoesNotFit: with the breakdown.
        UserError: with the precision that this device lacks.
    """
    if verdict["refusal"]:
        raise DoesNotFit(verdict["refusal"])
    refuse_missing_bf16(device, train)
    if not verdict["enforce"]:
        return
    gpu, remedy = estimate["gpu"], "change the run, or set estimate.enforce=false"
    host, where = free_host_bytes()
    tensors = f"hardware.gpu: the run needs room for tensors on {gpu}"
    if device.type == "cuda":
        ram = f"hardware.gpu: the run needs room in RAM on the host of {gpu}"
        _check_free(estimate["host_bytes_predicted"], host, ram, where, remedy)
        free = torch.cuda.mem_get_info(device)[0]
        _check_free(estimate["peak_bytes_predicted"], free, tensors, f"on {device} here", remedy)
        return
    what = tensors + (f" in {processes} processes" if processes > 1 else "")
    _check_free(estimate["peak_bytes_predicted"] * processes, host, what, where, remedy)


def refuse_missing_bf16(device: torch.device, train: Train) -> None:
    """Raise UserError if a run computes in bf16, and this GPU does not."""
    native = device.type == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False)
    if train.needs_native_bf16 and not native:
        name = torch.cuda.get_device_name(device)
        raise UserError(f"train.precision: {name} has no native bf16; got {train.precision}; use fp16")


def claim_device(world: World, run: Run) -> torch.device:
    """Select this process's GPU, or its share of the CPU cores, and return the device."""
    check_gpus(world.local_size, run.device)
    if uses_cuda(run.device):
        torch.cuda.set_device(world.local_rank)
    torch.set_num_threads(run.cpu_threads or max(1, torch.get_num_threads() // world.local_size))
    return training_device(run.device)


def check_gpus(processes: int, choice: DeviceChoice) -> None:
    """Raise UserError for more processes on this node than it has GPUs; without GPUs, processes share the CPU."""
    if uses_cuda(choice) and processes > torch.cuda.device_count():
        raise UserError(
            f"hardware.num_gpus: must be at most the GPUs here; got {processes} for {torch.cuda.device_count()}; lower "
            "hardware.num_gpus, or use several machines (run.nodes)"
        )


def check_processes(processes: int, choice: DeviceChoice) -> None:
    """Refuse, before they start, more processes than this node has GPUs, or RAM for on the CPU. Raises UserError."""
    check_gpus(processes, choice)
    if not uses_cuda(choice):
        free, where = free_host_bytes()
        what = f"hardware.num_gpus: {processes} processes on a CPU need room in RAM"
        _check_free(processes * PROCESS_BYTES, free, what, where, "or lower hardware.num_gpus")


def _check_free(needed: int | None, free: int, what: str, where: str, remedy: str) -> None:
    """Compare predicted bytes (None: predicted for a device without a host) with free bytes."""
    if needed is not None and needed > free:
        raise DoesNotFit(
            f"{what}; {readable_size(needed)} are predicted and {readable_size(free)} are free {where}; free some, "
            f"{remedy}"
        )


def check_attention(device: torch.device, config: PretrainedConfig, train: Train) -> None:
    """Refuse attention kernels that this device cannot run; stage estimate has checked the masks."""
    cuda = device.type == "cuda"
    capability = torch.cuda.get_device_capability(device) if cuda else (0, 0)
    choose_attention(config, train, kind="cuda" if cuda else "cpu", capability=capability, masked=False)


def check_host(
    choice: OffloadState,
    device: torch.device,
    predicted: Mapping[str, Any],
    sharding: Sharding = "none",
    place: OffloadTo = "cpu",
) -> None:
    """Refuse offloading or sharding for which the host has too little memory.

    Where weights are sharded, the host holds all of them until they are distributed. `predicted` is figures.json.

    Raises:
        UserError: naming needed and free bytes, or that there is no GPU.
    """
    refuse_offloaded_state(choice, place, device.type)
    needed, (free, where) = predicted["host_bytes_predicted"], free_host_bytes()
    if choice != "none":
        what = f"train.offload: {choice} needs room in the host's memory"
        other_place = "" if place == "disk" else "train.offload_to=disk, "
        _check_free(needed, free, what, where, f"use {other_place}train.optimizer=adamw_8bit, or none")
    elif sharding in SPLIT_WEIGHTS and device.type == "cuda":
        what = f"train.sharding: {sharding} needs room in the host's memory for all weights until they are distributed"
        _check_free(needed, free, what, where, "use a host with more, or train.method=qlora (a quarter of 16 bits)")


def check_offload(choice: OffloadActivations, needed_bytes: int, scratch: Path) -> None:
    """Refuse to offload activations to a place with too little room.

    `needed_bytes` is the predicted maximum over all processes on this machine; files are below `scratch`.

    Raises:
        UserError: naming needed and free bytes.
    """
    if choice == "none":
        return
    free, where = free_disk_bytes(scratch) if choice == "disk" else free_host_bytes()
    what = f"train.offload_activations: {choice} needs room for activations"
    _check_free(needed_bytes, free, what, where, "set train.grad_ckpt=true, or use none")


def check_disk(needed_bytes: int, scratch: Path) -> None:
    """Refuse optimizer state on a disk with too little room.

    `needed_bytes` is predicted, of all processes on this machine; files are below `scratch`.

    Raises:
        UserError: naming needed and free bytes.
    """
    free, where = free_disk_bytes(scratch)
    what = "train.offload_to: disk needs room for master weights and optimizer state"
    _check_free(needed_bytes, free, what, where, "use train.optimizer=adamw_8bit, or cpu")


def free_disk_bytes(scratch: Path) -> tuple[int, str]:
    """Free bytes of a directory's disk, and the place for a message; creates the directory."""
    with write_errors(scratch):
        scratch.mkdir(parents=True, exist_ok=True)
    return shutil.disk_usage(scratch).free, f"below {scratch.resolve()}"
