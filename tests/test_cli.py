"""The command `lean-finetune`, as pip installs it: outside any checkout, from the wheel's files alone."""

import shutil
import sys
import zipfile
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from lean_finetune.config.load import COMMON_PARAMS, load_params
from tests.conftest import ROOT
from tests.processes import run_bounded


def test_fit_params_yaml_has_every_key_of_params_yaml():
    """Without a new parameter, the command would refuse its own file."""
    common = YAML(typ="safe").load(COMMON_PARAMS.read_text())
    own = YAML(typ="safe").load((ROOT / "params.yaml").read_text())
    assert [(key, list(value) if isinstance(value, dict) else None) for key, value in common.items()] == [
        (key, list(value) if isinstance(value, dict) else None) for key, value in own.items()
    ]
    assert load_params(COMMON_PARAMS).train.method == "qlora"


@pytest.mark.slow
def test_the_wheel_has_only_the_library_and_answers_in_an_empty_directory(tmp_path: Path, small_llama: Path):
    """Top-level packages `stages`, `data` and `benchmarks` in site-packages, or a file that was left out."""
    source = tmp_path / "source"
    for package in ("cuda_memory", "lean_finetune", "stages", "benchmarks"):
        shutil.copytree(ROOT / package, source / package)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    code = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    run_bounded([sys.executable, "-c", code, str(tmp_path)], cwd=source, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    installed, empty = tmp_path / "installed", tmp_path / "empty"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    assert {path.name for path in installed.iterdir() if path.suffix != ".dist-info"} == {
        "cuda_memory",
        "lean_finetune",
    }
    assert (installed / "cuda_memory/page/style.css").is_file()
    shipped = {path.name for path in (ROOT / "lean_finetune/other_tools").iterdir()}
    assert {path.name for path in (installed / "lean_finetune/other_tools").iterdir()} == shipped
    empty.mkdir()
    shutil.copy(small_llama / "config.json", empty)
    program = f"import sys; sys.path.insert(0, {str(installed)!r}); from lean_finetune import cli; "
    program += f"assert cli.__file__.startswith({str(installed)!r}); cli.main()"
    fit = ["fit", "--model", "config.json", "--gpu", "RTX-4090"]
    done = run_bounded([sys.executable, "-c", program, *fit], cwd=empty, check=True)
    assert done.stdout.startswith("verdict              fits: ")
    assert [path.name for path in empty.iterdir()] == ["config.json"]
