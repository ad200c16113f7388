"""Devices: the table of GPUs, names, sizes, this machine, and precisions that a device lacks."""

import re
from itertools import chain

import psutil
import pytest

from cuda_memory.gpus import GPUS, PCIE_5, gpu_row
from cuda_memory.units import GIB
from lean_finetune.commands.fit import fit
from lean_finetune.core.errors import UserError
from lean_finetune.core.memory_limits import MemoryLimit
from lean_finetune.memory import devices
from lean_finetune.memory.advice.step_cost import ranking_speed
from lean_finetune.memory.devices import cpu_device, precision_on, resolve_gpu
from tests.conftest import ROOT
from tests.workspace import invoke, lay_out


def test_a_new_gpu_is_one_row(small_llama, tmp_path, monkeypatch, request):
    """A card in the table that `fit` refuses, or whose speed the cost model does not know."""
    card = gpu_row("NEW-1000", 2.0, (9, 0), 100, 2000, 100, 9000, PCIE_5, aliases=("NEW 1000 Special Edition",))
    GPUS.append(card)
    request.addfinalizer(lambda: GPUS.remove(card))
    lay_out(tmp_path, data__max_length=128, bucket__max_tokens=256, run__progress=False)
    monkeypatch.chdir(tmp_path)
    answer = invoke(
        fit, "--params", "params.yaml", "--model", str(small_llama), "--gpu", "NVIDIA New 1000 Special Edition"
    )
    assert answer.exit_code == 0 and "NEW-1000: 2 GiB, less" in answer.stdout, answer.output
    assert answer.stdout.startswith("verdict              fits: ")
    assert ranking_speed(card)[1] == "by the speed of NEW-1000"
    assert "NEW-1000" in invoke(fit, "--list-gpus").stdout


def test_memory_is_below_the_nominal_size():
    """Sizes that no GPU reports; a name that occurs twice."""
    names = list(chain.from_iterable((gpu.name, *gpu.aliases) for gpu in GPUS))
    assert len(set(names)) == len(names)
    nominal = {"T4": 16, "P4": 8, "V100-32GB": 32, "A100-80GB": 80, "H100": 80, "L4": 24, "RTX-4090": 24}
    for name, size_gib in nominal.items():
        assert 0.9 * size_gib < resolve_gpu(name)[0].memory_bytes / GIB < size_gib


def test_the_documented_cards_are_those_of_the_table():
    """A card that nobody finds, or one that is promised and refused."""
    text = (ROOT / "docs/models.md").read_text().split("| generation | names |")[1].split("\n\n")[0]
    named = [name.strip() for row in text.splitlines()[2:] for name in row.split("|")[2].split(",")]
    assert sorted(named) == sorted(gpu.name for gpu in GPUS)


@pytest.mark.parametrize(
    ("printed", "name"),
    [
        ("rtx 4090", "RTX-4090"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA RTX A6000", "A6000"),
        ("NVIDIA GeForce RTX 4090 D", "RTX-4090-D"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("AMD Instinct MI300X", "MI300X"),
        ("Tesla V100-SXM3-32GB", "V100-32GB"),
        ("4090", "RTX-4090"),
        ("1080 ti", "GTX-1080-Ti"),
    ],
)
def test_a_name_as_the_driver_prints_it_is_its_row(printed, name):
    """A user who copies what nvidia-smi prints is refused."""
    device, reason = resolve_gpu(printed)
    assert device.name == name and reason == "named by hardware.gpu"


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ("A100", "could be: A100-40GB, A100-80GB; all: "),
        ("RTX 4060 Ti", "could be: RTX-4060-Ti-16GB; all: "),
        ("309", "could be: RTX-3090; all: "),
        ("A100-90GB", "nearest: .*A100-80GB.*--list-gpus"),
        ("RTX-4095", "nearest: .*RTX-4090.*--list-gpus"),
        ("???", "known: P4, P100"),
        # Other memory than the card of a similar name: a slice, a laptop's chip, digits that only look alike.
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", ".*--list-gpus"),
        ("NVIDIA H100 64GB HBM2", ".*--list-gpus"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", ".*--list-gpus"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", ".*--list-gpus"),
        ("A1\uff10\uff10-80GB", ".*--list-gpus"),
    ],
)
def test_an_unknown_name_is_refused_with_what_it_could_be(wrong, hint):
    """An A100 of the wrong size chosen, or a remedy that names nothing."""
    with pytest.raises(UserError, match=rf"hardware.gpu: .*got '{re.escape(wrong)}'; {hint}"):
        resolve_gpu(wrong)


@pytest.mark.parametrize(
    ("size", "expected"),
    [("24 gib", 24 * GIB), ("80GB", 80 * 10**9), ("7.5GiB", 7.5 * GIB), ("81559MiB", 81559 * 2**20)],
)
def test_a_size_is_a_gpu_of_that_size(size, expected):
    """GiB and GB mixed up: 7% of the memory."""
    assert resolve_gpu(size)[0].memory_bytes == expected


@pytest.mark.parametrize(
    ("size", "rule"),
    [
        *((size, "a size must be above the 525 MiB .* at most 100000 GiB") for size in ("0GiB", "525MiB", "100001GiB")),
        ("9" * 5000 + "GiB", "a size must be above"),
        # Other digits, a letter without a dot, and what is no size.
        *(
            (size, "must be auto, a size such as 24GiB")
            for size in ("\u0662\u0664GiB", "24G\u0131B", "-24GiB", "9" * 5000)
        ),
    ],
)
def test_a_size_that_no_device_has_is_one_short_line(size, rule):
    """A division by zero later on, an overflow's traceback, or pages of digits repeated."""
    with pytest.raises(UserError, match=rule) as caught:
        resolve_gpu(size)
    assert len(str(caught.value).split("; known: ")[0].split("; nearest: ")[0]) < 240


@pytest.mark.parametrize(
    ("limit_bytes", "reason"),
    [(None, "this machine's RAM"), (2**59, "this machine's RAM"), (2**30, "this container's memory limit")],
)
def test_auto_without_a_gpu_is_this_machines_ram_or_its_containers_limit(monkeypatch, limit_bytes, reason):
    """A container killed because the host has more memory than it may use."""
    limits = [] if limit_bytes is None else [MemoryLimit(limit_bytes=limit_bytes, room_bytes=0)]
    monkeypatch.setattr(devices.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("lean_finetune.core.memory_limits.memory_limits", lambda: limits)
    expected = 2**30 if limit_bytes == 2**30 else psutil.virtual_memory().total
    assert resolve_gpu("auto") == (cpu_device(expected), f"auto: no CUDA device here, so {reason}")


def test_bf16_needs_ampere_or_a_cpu():
    """The case of eight P4 with bf16 set, discovered after hours of queueing; or a refusal that hits too much."""
    for device in (*GPUS, resolve_gpu("24GiB")[0], cpu_device(GIB)):
        if device.kind == "cpu" or device.compute_capability >= (8, 0):
            precision_on(device, "bf16")
        else:
            with pytest.raises(UserError, match=f"got bf16 for {device.name}; set train.precision to fp16"):
                precision_on(device, "bf16")
            precision_on(device, "fp32")
