"""The files of lean_finetune/presets/: each fits the GPU that it names, with the peak that docs/command.md states."""

import re
import shutil
from pathlib import Path

import pytest

from benchmarks.presets import DIRECTORY, plan_preset, preset_text
from benchmarks.presets import PRESETS as GENERATED
from lean_finetune.commands.project.params_file import apply_preset
from lean_finetune.config.load import load_params
from lean_finetune.memory.advice.full_rows import full_rows_run
from lean_finetune.memory.devices import resolve_gpu
from lean_finetune.pinning.locate import TINY
from tests.conftest import ROOT

PRESETS = sorted(path.stem for path in (ROOT / "lean_finetune/presets").glob("*.yaml"))
FAST = "8b-qlora-24gb"
QUICK = "1.5b-full-24gb"
"""The one that is planned in the least time."""
ROUNDING = 0.0051
"""Of figures with two decimals."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == FAST else pytest.mark.slow) for name in PRESETS if name != TINY]
)
def test_a_preset_fits_its_gpu_with_the_documented_peak(name: str, tmp_path: Path):
    shutil.copy(ROOT / "params.yaml", tmp_path)
    apply_preset(ROOT / f"lean_finetune/presets/{name}.yaml", tmp_path / "params.yaml")
    p = load_params(tmp_path / "params.yaml")
    device, _ = resolve_gpu(p.hardware.gpu)
    one = GENERATED[name]
    assert p.model.name == one.model and p.data.max_length == one.length
    run = full_rows_run(p, one.config(), device, images=one.images())
    peak_bytes, usable_bytes = run.predict().peak.bytes, run.usable_bytes
    assert peak_bytes <= run.fitting_bytes
    for gpu in one.others:
        assert peak_bytes <= resolve_gpu(gpu)[0].usable_bytes(p.estimate.headroom_percent), gpu
    text = (ROOT / "docs/command.md").read_text(encoding="utf-8")
    row = re.search(rf"^\| `{re.escape(name)}` \|.*\| ([\d.]+) \| ([\d.]+) \|$", text, re.MULTILINE)
    assert row, f"docs/command.md needs a row: {peak_bytes / 2**30:.2f} | {usable_bytes / 2**30:.2f}"
    assert peak_bytes / 2**30 == pytest.approx(float(row[1]), abs=ROUNDING)
    assert usable_bytes / 2**30 == pytest.approx(float(row[2]), abs=ROUNDING)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == QUICK else pytest.mark.slow) for name in GENERATED]
)
def test_a_preset_is_what_plan_chooses(name: str):
    """Values by hand that are slower than they need to be, or that a change of the predictions made wrong."""
    assert preset_text(name, plan_preset(name)) == (DIRECTORY / f"{name}.yaml").read_text(encoding="utf-8")


def test_every_preset_but_the_shipped_model_s_is_generated():
    assert {*GENERATED, TINY} == {*PRESETS}


def test_the_preset_of_the_shipped_model_is_params_yaml(tmp_path: Path):
    """params.yaml as it comes is the run of the README."""
    shutil.copy(ROOT / "params.yaml", tmp_path)
    assert apply_preset(ROOT / f"lean_finetune/presets/{TINY}.yaml", tmp_path / "params.yaml") == {}
