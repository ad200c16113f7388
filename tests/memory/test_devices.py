"""Devices: names, sizes, this machine, and precisions that a device lacks."""

import psutil
import pytest

from lean_finetune.core.errors import UserError
from lean_finetune.core.memory_limits import MemoryLimit
from lean_finetune.core.units import GIB
from lean_finetune.memory import devices
from lean_finetune.memory.devices import precision_on, resolve_gpu
from lean_finetune.memory.gpus import GPUS
from tests.conftest import ROOT


def test_at_least_fifteen_gpus_are_known_with_memory_below_their_nominal_size():
    """A table too small to be of use, or with sizes that no GPU reports."""
    assert len({gpu.name for gpu in GPUS}) == len(GPUS) >= 15
    nominal = {"T4": 16, "P4": 8, "V100-32GB": 32, "A100-80GB": 80, "H100": 80, "L4": 24, "RTX-4090": 24}
    for gpu in GPUS:
        if gpu.name in nominal:
            assert 0.9 * nominal[gpu.name] < gpu.memory_bytes / GIB < nominal[gpu.name]


def test_the_documented_cards_are_those_of_the_table():
    """A card that nobody finds, or one that is promised and refused."""
    text = (ROOT / "docs/models.md").read_text().split("| generation | names |")[1].split("\n\n")[0]
    named = [name.strip() for row in text.splitlines()[2:] for name in row.split("|")[2].split(",")]
    assert sorted(named) == sorted(gpu.name for gpu in GPUS)


@pytest.mark.parametrize("name", ["RTX-4090", "rtx 4090", "NVIDIA GeForce RTX 4090", "RTX4090"])
def test_a_name_is_found_however_it_is_written(name):
    """A user sent away over a dash."""
    device, reason = resolve_gpu(name)
    assert device.name == "RTX-4090" and device.native_bf16
    assert reason == "named by hardware.gpu"


@pytest.mark.parametrize(
    ("printed", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB"),
        ("A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA H100 PCIe", "H100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA RTX A6000", "A6000"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA GeForce GTX 1080 Ti", "GTX-1080-Ti"),
        ("NVIDIA GeForce RTX 4070 Ti", "RTX-4070-Ti"),
        ("NVIDIA GeForce RTX 4090 D", "RTX-4090-D"),
        ("NVIDIA GeForce RTX 5070 Ti", "RTX-5070-Ti"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000"),
        ("NVIDIA A800-SXM4-80GB", "A800"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("AMD Instinct MI300X", "MI300X"),
        ("Tesla T4", "T4"),
        ("Tesla P100-PCIE-16GB", "P100"),
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
        ("Tesla V100-SXM3-32GB", "V100-32GB"),
    ],
)
def test_a_name_as_the_driver_prints_it_is_its_row(printed, name):
    """A user who copies what nvidia-smi says is sent away."""
    assert resolve_gpu(printed)[0].name == name


@pytest.mark.parametrize(
    "other",
    [
        "NVIDIA A100-SXM-64GB",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA H100 NVL",
        "NVIDIA H100 64GB HBM2",
        "NVIDIA GH200 144G HBM3e",
        "NVIDIA H20-3e",
        "NVIDIA GeForce RTX 4060 Ti",
        "NVIDIA GeForce RTX 4070 Ti SUPER",
        "NVIDIA A800-SXM4-40GB",
        "Tesla P100-PCIE-12GB",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 3080 Ti",
        "A1\uff10\uff10-80GB",
    ],
)
def test_a_part_with_other_memory_is_not_taken_for_its_sibling(other):
    """A slice or a laptop's chip held against the memory of the full card."""
    with pytest.raises(UserError, match="hardware.gpu: .*--list-gpus"):
        resolve_gpu(other)


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        ("A100", "A100-40GB, A100-80GB"),
        ("NVIDIA V100", "V100-16GB, V100-32GB"),
        ("RTX 4060 Ti", "RTX-4060-Ti-16GB"),
        ("3090", "RTX-3090"),
    ],
)
def test_an_ambiguous_name_is_told_exactly_what_it_could_be(wanted, names):
    """An A100 of the wrong size taken in silence, or an A10 offered for it."""
    with pytest.raises(UserError, match=f"got '{wanted}'; could be: {names}; all: "):
        resolve_gpu(wanted)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ("24GiB", 24 * GIB),
        ("24 gib", 24 * GIB),
        ("80GB", 80 * 10**9),
        ("7.5GiB", 7.5 * GIB),
        ("81559MiB", 81559 * 2**20),
    ],
)
def test_a_size_is_a_gpu_of_that_size(size, expected):
    """GiB and GB mixed up: 7% of the memory."""
    assert resolve_gpu(size)[0].memory_bytes == expected


@pytest.mark.parametrize(
    "size", ["0GiB", "0.0 MiB", "0.0000000000001GiB", "525MiB", "100001GiB", "9" * 5000 + "GiB", f"{'0' * 5000}24GiB"]
)
def test_a_size_no_device_has_is_one_short_line(size):
    """A division by nothing later on, a traceback of an overflow, or pages of digits told back."""
    with pytest.raises(
        UserError, match="hardware.gpu: a size must be above the 525 MiB .* at most 100000 GiB"
    ) as caught:
        resolve_gpu(size)
    assert len(str(caught.value)) < 240


@pytest.mark.parametrize("size", ["\u0662\u0664GiB", "\uff12\uff14GiB", "24G\u0131B", "-24GiB", "1e3GiB", "9" * 5000])
def test_a_size_in_other_digits_or_letters_is_no_size(size):
    """24GıB (no dot) read as 24 GB, or digits that a reader cannot tell."""
    with pytest.raises(
        UserError, match="hardware.gpu: must be auto, a size such as 24GiB or a known GPU; got "
    ) as caught:
        resolve_gpu(size)
    assert len(str(caught.value).split("; known: ")[0].split("; nearest: ")[0]) < 150


@pytest.mark.parametrize(("wrong", "near"), [("A100-90GB", "A100-80GB"), ("RTX-4095", "RTX-4090"), ("H1000", "H100")])
def test_an_unknown_name_is_refused_with_the_nearest(wrong, near):
    """A misspelt GPU taken for another one in silence."""
    with pytest.raises(UserError, match=f"hardware.gpu: .*got '{wrong}'; nearest: .*{near}.*--list-gpus"):
        resolve_gpu(wrong)


def test_nonsense_is_refused_with_the_whole_list():
    """A remedy that names nothing."""
    with pytest.raises(UserError, match="known: P4, P100"):
        resolve_gpu("???")


def test_auto_is_this_machines_ram_where_there_is_no_gpu(monkeypatch):
    """A prediction held against a device that is not there."""
    monkeypatch.setattr(devices.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(devices, "memory_limits", lambda: [])
    device, reason = resolve_gpu("auto")
    assert (device.kind, device.memory_bytes) == ("cpu", psutil.virtual_memory().total)
    assert "RAM" in reason


@pytest.mark.parametrize(("limit_bytes", "limited"), [(2**30, True), (2**59, False)])
def test_auto_respects_a_containers_limit(monkeypatch, limit_bytes, limited):
    """A container killed because the host has more memory than it may use."""
    monkeypatch.setattr(devices.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(devices, "memory_limits", lambda: [MemoryLimit(limit_bytes=limit_bytes, room_bytes=0)])
    device, reason = resolve_gpu("auto")
    assert (device.memory_bytes == 2**30) is limited
    assert ("container" in reason) is limited


@pytest.mark.parametrize("name", ["T4", "P4", "V100-16GB"])
def test_bf16_is_refused_where_the_gpu_only_imitates_it(name):
    """The case of eight P4 with bf16 set: found out after hours of queueing."""
    device = resolve_gpu(name)[0]
    with pytest.raises(UserError, match=f"train.precision: .* got bf16 for {name}; set train.precision to fp16"):
        precision_on(device, "bf16")
    precision_on(device, "fp32")


def test_bf16_is_taken_by_ampere_and_later_and_by_cpus():
    """A refusal that hits too much."""
    for device in (*(gpu for gpu in GPUS if gpu.compute_capability >= (8, 0)), resolve_gpu("24GiB")[0]):
        precision_on(device, "bf16")
    precision_on(devices._cpu(GIB), "bf16")
