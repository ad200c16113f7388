"""The package as pip installs it: the files of its wheel, its description, and the command outside any checkout."""

import email
import json
import os
import re
import shutil
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from lean_finetune.pinning.code import ALONE
from tests.conftest import ROOT
from tests.processes import run_bounded
from tests.wheel import build_wheel, tracked_files

COMMANDS = (
    ["--version"],
    ["fit", "--model", "config.json", "--gpu", "RTX-4090"],
    ["import", "axolotl.yaml", "--out", "imported.yaml"],
    ["init", "run"],
    ["init", "run", "--check"],
)
ANSWER = """
import json, sys
from pathlib import Path
from click.testing import CliRunner
import cuda_memory, lean_finetune
from lean_finetune.cli import main
for package in (cuda_memory, lean_finetune):
    assert package.__file__.startswith(sys.argv[1]), package.__file__
results = [CliRunner().invoke(main, words) for words in json.loads(sys.argv[2])]
print(json.dumps([[result.exit_code, result.output] for result in results]))
"""
"""Answers command lines in one process, by the packages in a directory."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the checkout's tracked files."""
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def metadata(wheel: Path) -> Message:
    """The metadata of a wheel; its body is the description."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def test_the_wheel_has_the_files_of_both_packages_and_no_others(wheel: Path):
    """A table, template or typed marker that was left out; tests or benchmarks as top-level packages."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    shipped = {name for name in names if ".dist-info/" not in name}
    assert shipped == {name for name in tracked_files() if "/" in name} - set(ALONE)
    assert {"cuda_memory/py.typed", "lean_finetune/py.typed", "lean_finetune/fit_params.yaml"} <= shipped
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_description_is_the_readme_without_links_that_a_package_index_cannot_follow(wheel: Path):
    """Dead links and a broken image on the first page that a reader sees."""
    found = metadata(wheel)
    description = bytes(found.get_payload(decode=True)).decode()
    assert found["Description-Content-Type"] == "text/markdown"
    assert "lean-finetune fit --model" in description
    assert description.rstrip().endswith("are in the source distribution.")
    targets = re.findall(r"\]\(([^)]*)\)", description)
    assert [target for target in targets if not target.startswith("https://")] == []
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if "[" not in line and "](" not in line]
    assert len(kept) > 20 and set(kept) <= set(description.splitlines())


def test_both_packages_have_one_version(wheel: Path):
    version = (ROOT / "cuda_memory/version.txt").read_text().strip()
    assert metadata(wheel)["Version"] == version
    for folder in (".", "cuda_memory"):
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        assert "version" in project["dynamic"] and "version" not in project


def test_an_installed_torch_of_any_build_satisfies_the_wheel(wheel: Path):
    """Pip that downloads 3 GB to replace a torch for CPUs, ROCm or another CUDA."""
    needs = map(Requirement, metadata(wheel).get_all("Requires-Dist") or [])
    torch = next(need for need in needs if need.name == "torch")
    assert torch.url is None and torch.specifier == SpecifierSet(">=2.11,<2.16")
    for build in ("2.11.0+cpu", "2.13.0+cu130", "2.15.1+rocm7.1", "2.12.0"):
        assert build in torch.specifier


@pytest.fixture
def installed(wheel: Path, tmp_path: Path) -> Iterator[Path]:
    """A directory with the installed wheel, whose dependencies are those of the tests."""
    target = tmp_path / "installed"
    options = ("--quiet", "--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check")
    run_bounded([sys.executable, "-m", "pip", "install", *options, "--target", target, wheel], check=True)
    yield target


@pytest.mark.slow
def test_the_installed_command_answers_in_an_empty_directory(installed: Path, tmp_path: Path, small_llama: Path):
    """A command that needs a file of the checkout."""
    empty = tmp_path / "empty"
    empty.mkdir()
    shutil.copy(small_llama / "config.json", empty)
    (empty / "axolotl.yaml").write_text("base_model: config.json\nadapter: lora\nmicro_batch_size: 1\n")
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    answer = [sys.executable, "-c", ANSWER, str(installed), json.dumps(COMMANDS)]
    done = run_bounded(answer, cwd=empty, env=environment, check=True)
    version, fit, imported, init, check = json.loads(done.stdout)
    number = (ROOT / "cuda_memory/version.txt").read_text().strip()
    assert version == [0, f"lean-finetune, version {number}\n"]
    assert fit[0] == 0 and fit[1].startswith("verdict              fits: "), fit
    assert imported[0] == 0 and (empty / "imported.yaml").is_file(), imported
    assert init[0] == 0 and (empty / "run/dvc.yaml").is_file() and check[0] == 0, init
    assert {path.name for path in empty.iterdir()} == {"axolotl.yaml", "config.json", "imported.yaml", "run"}
    for command in (["-m", "lean_finetune"], [str(installed / "bin/lean-finetune")]):
        said = run_bounded([sys.executable, *command, "--version"], cwd=empty, env=environment, check=True)
        assert said.stdout == version[1]
