"""The sets of switches of docs/memory-switches.md: their lines are accepted, and have the documented peaks."""

import re
from pathlib import Path

import pytest
import torch

from lean_finetune.config.load import load_params, with_flags
from lean_finetune.memory.predict.peak import predict
from lean_finetune.memory.predict.traced_step import TracedModel, TracedSteps
from lean_finetune.memory.trace.setting import Setting
from lean_finetune.model.model_config import read_config
from tests.conftest import ROOT
from tests.kit.estimate_cpu import count, without_onednn
from tests.memory.common import CPU_TARGET, LLAMA_3_1_8B, gpu_target, shape

TINY = ROOT / "lean_finetune/tiny"
ON_TINY: TracedSteps = ((shape(4, 256, 512), shape(4, 256, 512)),)
ON_8B: TracedSteps = ((shape(1, 2048, 2047),),)
SETS = ("start", "basic trio", "QLoRA + paged", "extreme")
ROUNDING = 0.0051
"""Of figures with two decimals."""


def documented(name: str) -> tuple[list[str], list[float]]:
    """Flags and figures of a set: GiB for the 8B; MiB predicted and counted for the shipped model."""
    text = (ROOT / "docs/memory-switches.md").read_text(encoding="utf-8").partition("## Sets of switches")[2]
    line = next(line for line in text.splitlines() if line.startswith(f"| {name} |"))
    _, _, flags, *figures = (cell.strip() for cell in line.split("|"))
    given = re.findall(r"-S (\S+?=[^\s`]+)", flags)
    if flags.startswith("the same and"):
        given = documented(SETS[SETS.index(name) - 1])[0] + given
    return given, [float(re.match(r"[\d.]+", cell)[0]) for cell in figures if cell]  # type: ignore[index]


def setting_of_flags(flags: list[str]) -> Setting:
    """The shipped params.yaml with `-S` flags."""
    params = with_flags(load_params(ROOT / "params.yaml"), flags)
    assert params.train.precision != "auto"
    return Setting(train=params.train)


def on_a_cpu(flags: list[str]) -> list[str]:
    """As the table says of the last set."""
    return [
        flag.replace("offload_activations=cpu", "offload_activations=disk").replace("chunk=256", "chunk=128")
        for flag in flags
    ]


@pytest.fixture
def one_thread():
    """Kernels of a CPU keep buffers for each thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", SETS)
def test_the_shipped_model_takes_what_the_table_says(name: str, one_thread: None):
    """A set that is refused, or whose figure is that of an older step."""
    flags, (_, mib, _) = documented(name)
    peak = predict(TracedModel(read_config(TINY), setting_of_flags(on_a_cpu(flags)), CPU_TARGET), ON_TINY).peak
    assert peak.bytes / 2**20 == pytest.approx(mib, abs=ROUNDING)


@pytest.mark.slow
@pytest.mark.parametrize("name", SETS)
def test_the_allocator_counts_what_the_table_says(name: str, one_thread: None, tmp_path: Path):
    flags, (_, _, mib) = documented(name)
    for file in TINY.iterdir():
        (tmp_path / file.name).symlink_to(file)
    with without_onednn():
        counted = count(tmp_path, setting_of_flags(on_a_cpu(flags)), ON_TINY)
    assert counted.peak_bytes is not None
    assert counted.peak_bytes / 2**20 == pytest.approx(mib, abs=ROUNDING)


@pytest.mark.slow
@pytest.mark.parametrize("name", SETS)
def test_an_8b_is_predicted_to_take_what_the_table_says(name: str):
    flags, (gib, _, _) = documented(name)
    peak = predict(TracedModel(LLAMA_3_1_8B, setting_of_flags(flags), gpu_target("H100")), ON_8B).peak
    assert peak.bytes / 2**30 == pytest.approx(gib, abs=ROUNDING)
