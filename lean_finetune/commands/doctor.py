"""The command `lean-finetune doctor`: check this machine."""

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import click

from cuda_memory.gpus import BF16_CAPABILITY, gpu_names
from cuda_memory.terminal import echo, echo_json, echo_text
from cuda_memory.units import GIB, labelled, readable_size
from lean_finetune.core.errors import UsageFault
from lean_finetune.core.memory_limits import free_host_bytes, memory_limits
from lean_finetune.core.stage_command import StageCommand
from lean_finetune.core.systems import usable_cores
from lean_finetune.core.versions import PROJECT, installed_version, wrong_library

OLDEST_PYTHON = (3, 11)
LEAST_DISK_BYTES, ENOUGH_DISK_BYTES = 2 * GIB, 40 * GIB
"""Below the first nothing but the shipped model fits; an 8B model with its checkpoints needs the second."""
LEAST_RAM_BYTES = 2 * GIB
"""A process with PyTorch and a tiny model."""
BUSY_SHARE = 0.05
"""Share of a GPU's memory that a desktop takes; more means that another program computes there."""
SECONDS = 10
"""Longest wait for another program."""
SHOWN_PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "datasets", "dvc")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of a check."""

    level: Literal["ok", "note", "fail"]
    """note: it works, with less than possible."""
    what: str
    text: str
    remedy: str | None = None
    """What to do about a note or a failure."""


def _output(*command: str) -> str | None:
    """Standard output of a command; None if it is missing, fails or hangs."""
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def check_python() -> Iterator[Finding]:
    """The version of Python."""
    text = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.version_info < OLDEST_PYTHON:
        remedy = f"install Python {'.'.join(map(str, OLDEST_PYTHON))} or later"
        yield Finding(level="fail", what="Python", text=text, remedy=remedy)
        return
    yield Finding(level="ok", what="Python", text=text)


def check_packages() -> Iterator[Finding]:
    """Versions of the libraries against those that this version of the project accepts."""
    found = {name: installed_version(name) for name in SHOWN_PACKAGES}
    text = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    try:
        wrong = wrong_library()
    except importlib.metadata.PackageNotFoundError:
        remedy = "install it: `pip install` its wheel, or `pip install .` in a clone of its repository"
        yield Finding(level="note", what="packages", text=f"{text}; {PROJECT} itself is not installed", remedy=remedy)
        return
    if wrong is not None:
        yield Finding(level="fail", what="packages", text=wrong.fault, remedy=wrong.remedy)
        return
    yield Finding(level="ok", what="packages", text=text)


def check_memory() -> Iterator[Finding]:
    """RAM, and the memory limit of a container or job."""
    free, where = free_host_bytes()
    limits = [limit.limit_bytes for limit in memory_limits()]
    text = f"{readable_size(free)} free {where}"
    if limits:
        text += f"; the container or job may use {readable_size(min(limits))}"
    if free < LEAST_RAM_BYTES:
        remedy = "end other programs, or give the container more memory (docker run --memory, SLURM --mem)"
        yield Finding(level="fail", what="RAM", text=text, remedy=remedy)
        return
    yield Finding(level="ok", what="RAM", text=text)


def check_cores() -> Iterator[Finding]:
    """CPU cores that this process may use."""
    usable, all_of_them = usable_cores(), os.cpu_count() or 1
    text = f"{usable} of {all_of_them} cores" if usable < all_of_them else f"{usable} cores"
    yield Finding(level="ok", what="CPU", text=text)


def check_disk() -> Iterator[Finding]:
    """Free space where results and the hub's files are stored."""
    from huggingface_hub.constants import HF_HUB_CACHE

    for what, path, move in (
        ("disk", Path.cwd(), "free space, or work in a directory on another disk"),
        ("hub cache", Path(HF_HUB_CACHE), "free space, or set HF_HOME to a directory on another disk"),
    ):
        there = next(each for each in (path, *path.parents) if each.exists())
        free = shutil.disk_usage(there).free
        text = f"{readable_size(free)} free for {path}"
        if not os.access(there, os.W_OK):
            yield Finding(level="fail", what=what, text=f"{there} cannot be written", remedy=move)
        elif free < ENOUGH_DISK_BYTES:
            level: Literal["fail", "note"] = "fail" if free < LEAST_DISK_BYTES else "note"
            text += f"; an 8B model with its checkpoints takes about {readable_size(ENOUGH_DISK_BYTES)}"
            yield Finding(level=level, what=what, text=text, remedy=move)
        else:
            yield Finding(level="ok", what=what, text=text)


def check_git() -> Iterator[Finding]:
    """The identity that `dvc exp run` needs for its commits."""
    version = _output("git", "--version")
    if version is None:
        remedy = "install git; only `lean-finetune fit` and `chat` work without it"
        yield Finding(level="fail", what="git", text="not found", remedy=remedy)
        return
    missing = [key for key in ("user.name", "user.email") if not _output("git", "config", key)]
    if missing:
        remedy = "git config --global user.name you && git config --global user.email you@example.org"
        text = f"{' and '.join(missing)} not set, which `dvc exp run` needs for its commits"
        yield Finding(level="fail", what="git", text=text, remedy=remedy)
        return
    yield Finding(level="ok", what="git", text=f"{version.removeprefix('git version ')}, with a name and an address")


def check_dvc() -> Iterator[Finding]:
    """Whether this directory is a pipeline."""
    if not Path("dvc.yaml").is_file():
        remedy = "to train, run in a project's directory; `lean-finetune init` makes one"
        text = "no dvc.yaml here: fit, chat, generate and export work, training does not"
        yield Finding(level="note", what="pipeline", text=text, remedy=remedy)
    elif not Path(".dvc").is_dir():
        yield Finding(level="fail", what="pipeline", text="dvc.yaml without .dvc", remedy="dvc init")
    elif shutil.which("dvc") is None:
        remedy = "source .venv/bin/activate, or pip install dvc"
        yield Finding(level="fail", what="pipeline", text="the command dvc is not on PATH", remedy=remedy)
    else:
        yield Finding(level="ok", what="pipeline", text="dvc.yaml, .dvc and the command dvc")


def check_hub() -> Iterator[Finding]:
    """Environment variables that keep the hub's client offline. Makes no request."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if os.environ.get(name, "").lower() in ("1", "true", "yes", "on"):
            text = f"{name} is set: models come from the cache and local directories only"
            yield Finding(level="note", what="hub", text=text, remedy=f"unset {name} to download models")
            return
    from huggingface_hub import get_token

    signed_in = "signed in" if get_token() else "not signed in (gated models need `hf auth login`)"
    yield Finding(level="ok", what="hub", text=signed_in)


def check_gpus() -> Iterator[Finding]:
    """GPUs as the driver and as PyTorch see them, and which number formats and kernels they have. Imports torch."""
    query = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    seen = [line for line in (_output(*query) or "").splitlines() if line]
    import torch

    if not torch.cuda.is_available():
        if seen:
            build = (
                "is built for CPUs" if torch.version.cuda is None else f"needs a driver for CUDA {torch.version.cuda}"
            )
            remedy = "install the build of PyTorch for this driver: https://pytorch.org/get-started/locally/"
            text = f"the driver has {len(seen)} ({seen[0]}), but torch {torch.__version__} {build}"
            yield Finding(level="fail", what="GPU", text=text, remedy=remedy)
            return
        remedy = "`lean-finetune fit` needs none; to train, use a machine with an NVIDIA GPU of 4 GB or more"
        yield Finding(level="note", what="GPU", text="none: training runs on the CPU", remedy=remedy)
        return
    driver = f", driver {seen[0].rpartition(', ')[2]}" if seen else ""
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        text = f"{torch.cuda.get_device_name(number)}: {readable_size(free)} free of {readable_size(total)}{driver}"
        what = f"GPU {number}"
        if total - free > BUSY_SHARE * total + GIB:
            remedy = "end other programs on it (nvidia-smi lists them), or choose another: CUDA_VISIBLE_DEVICES"
            yield Finding(level="note", what=what, text=text, remedy=remedy)
        else:
            yield Finding(level="ok", what=what, text=text)
        capability = torch.cuda.get_device_capability(number)
        version = ".".join(map(str, capability))
        if capability >= BF16_CAPABILITY:
            yield Finding(level="ok", what="kernels", text=f"bf16, flash attention (compute capability {version})")
        else:
            text = f"no bf16, no flash attention (compute capability {version}, Ampere has 8.0)"
            remedy = "train.precision=auto takes fp16; attention uses the memory-efficient kernel"
            yield Finding(level="note", what="kernels", text=text, remedy=remedy)


def check_imports() -> Iterator[Finding]:
    """Whether the libraries can be imported together: one that was built for another torch breaks all of them."""
    try:
        import peft  # noqa: F401 - imports transformers' models
    except Exception as error:  # Whatever a broken library raises.
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        remedy = "reinstall the library that it names for this torch, or uninstall it (torchvision is not needed here)"
        text = f"transformers and peft cannot be imported: {str(cause).splitlines()[0]}"
        yield Finding(level="fail", what="imports", text=text, remedy=remedy)
        return
    yield Finding(level="ok", what="imports", text="torch, transformers and peft can be imported together")


def check_quantisation() -> Iterator[Finding]:
    """Whether bitsandbytes quantises a small weight on the device that would train."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        import bitsandbytes as bnb

        bnb.functional.quantize_4bit(torch.zeros(64, 64, device=device))
    except Exception as error:  # Its loader raises whatever the system's linker does.
        text = f"bitsandbytes does not quantise on {device}: {str(error).splitlines()[0]}"
        remedy = "pip install --force-reinstall bitsandbytes; until then use train.method=lora and a plain optimizer"
        yield Finding(level="fail", what="4 and 8 bits", text=text, remedy=remedy)
        return
    yield Finding(level="ok", what="4 and 8 bits", text=f"bitsandbytes quantises on {device}")


def check_allocator() -> Iterator[Finding]:
    """Settings of PyTorch's allocator in the environment that change reserved memory."""
    from lean_finetune.model.allocator_settings import environment_notes

    for note in environment_notes(True):
        yield Finding(level="note", what="allocator", text=note, remedy="unset PYTORCH_CUDA_ALLOC_CONF")


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    check_python,
    check_packages,
    check_memory,
    check_cores,
    check_disk,
    check_git,
    check_dvc,
    check_hub,
    check_gpus,
    check_imports,
    check_quantisation,
    check_allocator,
)
"""In the order of printing; those that import torch are last."""


LABEL_WIDTH = 19


@click.command(cls=StageCommand)
@click.option("--model", help="Say what this model can do instead: a hub id, a directory, or a shipped one.")
@click.option("--gpu", shell_complete=gpu_names, help="With --model: on this GPU. Default: this machine's.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor(model: str | None, gpu: str | None, as_json: bool) -> None:
    """Check this machine. Exits with 1 if something fails.

    Checks GPUs, kernels, memory, disk, versions, DVC and git. Each line starts with ok, note (it works, with less
    than possible) or fail. The line below says what to do.

    With --model, tries each method, objective, switch and way to share a run with few layers of the model, without
    weights, and says what is refused and why. Takes some seconds.
    """
    if gpu is not None and model is None:
        raise UsageFault("--gpu: belongs to --model; `lean-finetune doctor` checks the GPUs of this machine")
    findings = []
    for finding in _of_machine() if model is None else _of_model(model, gpu or "auto"):
        findings.append(finding)
        if as_json:
            continue
        first = f"{finding.level:<5} {finding.what:<13}"
        echo_text(labelled(first, finding.text, LABEL_WIDTH))
        if finding.remedy:
            echo_text(labelled(" " * LABEL_WIDTH + "→", finding.remedy, LABEL_WIDTH + 2))
    fails = sum(finding.level == "fail" for finding in findings)
    if as_json:
        echo_json({"ok": not fails, "findings": list(map(asdict, findings))})
    elif model is None:
        done = "this machine can do it; `lean-finetune fit` says which runs fit"
        echo(f"{fails} of {len(findings)} checks failed" if fails else done)
    sys.exit(1 if fails else 0)


def _of_machine() -> Iterator[Finding]:
    for check in CHECKS:
        yield from check()


def _of_model(name: str, gpu: str) -> Iterator[Finding]:
    """What a model can do on a GPU, and what is refused."""
    from lean_finetune.commands.without_compiler import importing_without_compiler
    from lean_finetune.config.load import COMMON_PARAMS, load_params, with_flags
    from lean_finetune.memory.gpu_names import named_gpu
    from lean_finetune.pinning.locate import find_model

    if gpu.lower() != "auto":
        named_gpu(gpu)
    flags = [f"{key}={json.dumps(value)}" for key, value in (("model.name", name), ("hardware.gpu", gpu))]
    p = with_flags(load_params(COMMON_PARAMS), flags)
    find_model(p.model.name, p.model.revision)  # Wrong names are refused before torch is imported.
    with importing_without_compiler():
        from lean_finetune.memory.advice.full_rows import fit_run
        from lean_finetune.memory.choice.model_abilities import abilities, described

    run = fit_run(p, shorten=True)
    yield from (Finding(level="ok", what=what, text=text) for what, text in described(run))
    for ability in abilities(run.params, run.config, run.device):
        if ability.works:
            yield Finding(level="ok", what=ability.what, text=", ".join(ability.works))
        level: Literal["note", "fail"] = "fail" if ability.what == "methods" and not ability.works else "note"
        for reason, refused in ability.refused.items():
            rule, _, remedy = reason.rpartition("; ")
            yield Finding(level=level, what=ability.what, text=f"not {', '.join(refused)}: {rule}", remedy=remedy)
