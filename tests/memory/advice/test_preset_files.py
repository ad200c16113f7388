"""The files of lean_finetune/presets/: each fits the GPU that it names, with the peak that docs/command.md states."""

import re
import shutil
from pathlib import Path

import pytest

from lean_finetune.commands.project.params_file import apply_preset
from lean_finetune.config.load import load_params
from lean_finetune.memory.advice.run import full_rows_run
from lean_finetune.memory.devices import resolve_gpu
from lean_finetune.model.model_config import read_config
from lean_finetune.pinning.locate import TINY
from tests.conftest import ROOT

PRESETS = sorted(path.stem for path in (ROOT / "lean_finetune/presets").glob("*.yaml"))
FAST = "8b-qlora-24gb"
CONFIGS = {
    "meta-llama/Llama-3.1-8B": "llama-3.1-8b",
    "meta-llama/Llama-3.1-70B": "llama-3.1-70b",
    "Qwen/Qwen2.5-0.5B": "qwen2.5-0.5b",
}
"""Model of a preset → directory of its config.json in lean_finetune/example_configs."""
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
    config = read_config(ROOT / "lean_finetune/example_configs" / CONFIGS[p.model.name])
    run = full_rows_run(p, config, device)
    peak_bytes, usable_bytes = run.predict().peak.bytes, run.usable_bytes
    assert peak_bytes <= usable_bytes
    text = (ROOT / "docs/command.md").read_text(encoding="utf-8")
    row = re.search(rf"^\| `{re.escape(name)}` \|.*\| ([\d.]+) \| ([\d.]+) \|$", text, re.MULTILINE)
    assert row, f"docs/command.md needs a row: {peak_bytes / 2**30:.2f} | {usable_bytes / 2**30:.2f}"
    assert peak_bytes / 2**30 == pytest.approx(float(row[1]), abs=ROUNDING)
    assert usable_bytes / 2**30 == pytest.approx(float(row[2]), abs=ROUNDING)


def test_the_preset_of_the_shipped_model_is_params_yaml(tmp_path: Path):
    """params.yaml as it comes is the run of the README."""
    shutil.copy(ROOT / "params.yaml", tmp_path)
    assert apply_preset(ROOT / f"lean_finetune/presets/{TINY}.yaml", tmp_path / "params.yaml") == {}
