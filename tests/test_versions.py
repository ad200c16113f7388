"""pip can install the versions that docs/installation.md names as tested."""

import importlib.metadata
import re
import tomllib
from pathlib import Path
from typing import get_args

import click
import pytest
from click.testing import CliRunner
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from lean_finetune.config.field_types import TrackerName
from lean_finetune.core.stage_command import StageCommand
from tests.test_layers import imported_names

ROOT = Path(__file__).parents[1]
MODULES = {"fla-core": "fla", "mlflow-skinny": "mlflow", "pillow": "PIL", "vl-convert-python": "vl_convert"}
"""Packages whose module has another name."""
USED_BY_OTHERS = {
    **dict.fromkeys(("alembic", "sqlalchemy"), "mlflow, for a local store"),
    **dict.fromkeys(("dvclive", "tensorboard"), "accelerate.tracking"),
    **dict.fromkeys(
        ("build", "mkdocs", "mkdocs-material", "mypy", "nbclient", "pytest-xdist", "ruff", "twine"), "a command"
    ),
    "ipykernel": "nbclient",
    "types-tqdm": "mypy",
}
"""Packages that nothing here imports, and what uses them."""


def test_pyproject_accepts_each_version_that_the_page_names():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    bounds = {need.name: need.specifier for need in map(Requirement, project["dependencies"])}
    tried = re.search(
        r"^Tested with ([^;]*);", (ROOT / "docs/installation.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert tried
    versions = re.findall(r"([a-z]+) ((?:[\d.]+(?:, | and )?)+)", tried[1])
    assert {name for name, _ in versions} == {"torch", "transformers", "peft", "bitsandbytes"}
    for name, listed in versions:
        for version in re.findall(r"\d+\.\d+\.\d+", listed):
            assert bounds[name].contains(version), f"{name} {version}"


def test_the_pinned_versions_go_together():
    """`pip install -c constraints.txt -e ".[page]"`, which ended in a conflict: Gradio needs an older Pillow."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    needs = map(Requirement, (line for line in lines if not line.startswith("#")))
    pinned = {canonicalize_name(need.name): str(need.specifier).removeprefix("==") for need in needs}
    wrong = []
    for found in importlib.metadata.distributions():
        needed = (found.requires or ()) if canonicalize_name(found.name) in pinned else ()
        for need in map(Requirement, needed):
            version = pinned.get(canonicalize_name(need.name))
            if version and (need.marker is None or need.marker.evaluate({"extra": ""})):
                wrong += [] if need.specifier.contains(version) else [f"{found.name} needs {need}, not {version}"]
    assert wrong == []


def test_something_imports_each_dependency():
    """A package that users download, and that nothing needs."""
    unused = {}
    for folder, code in {".": ("lean_finetune", "stages"), "cuda_memory": ("cuda_memory",)}.items():
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        for extra, needs in {"": project["dependencies"], **project.get("optional-dependencies", {})}.items():
            folders = (*code, "benchmarks", "tests") if extra == "test" else code
            files = [path for name in folders for path in (ROOT / name).rglob("*.py") if "build" not in path.parts]
            imported = {name.partition(".")[0] for path in files for name in imported_names(path)}
            for name in (Requirement(need).name for need in needs):
                module = MODULES.get(name, name.replace("-", "_").partition(".")[0])
                if module not in imported and name not in USED_BY_OTHERS:
                    unused[name] = extra
    assert unused == {}


def test_messages_name_extras_that_exist():
    """`pip install "lean-finetune[lm-eval]"`, which installs nothing and only warns."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "lean_finetune").rglob("*.py"))
    named = {*re.findall(r"install_extra\(['\"](\w+)['\"]\)", code), *get_args(TrackerName)}
    assert {"eval", "fla", "liger", "plots", "wandb"} <= named <= project["optional-dependencies"].keys()
    pages = "".join(path.read_text(encoding="utf-8") for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")))
    written = re.findall(r"""pip install [^`\n]*?(?:lean-finetune|\.)\[([\w,]+)\]""", pages)
    assert {extra for extras in written for extra in extras.split(",")} <= project["optional-dependencies"].keys()


def test_a_missing_name_in_another_version_of_torch_is_one_line(monkeypatch: pytest.MonkeyPatch):
    """A traceback of forty lines that ends in `cannot import name`, where torch is too old."""

    @click.command(cls=StageCommand)
    def command() -> None:
        raise ImportError("cannot import name 'x' from 'torch'")

    assert isinstance(CliRunner().invoke(command).exception, ImportError)  # All libraries are right: our own fault.
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.8.0+cu128" if name == "torch" else version(name))
    result = CliRunner().invoke(command)
    assert result.exit_code == 1
    assert result.stderr == (
        "error: torch is 2.8.0+cu128; needed: <2.16,>=2.11 (cannot import name 'x' from 'torch'); "
        'run `pip install "torch<2.16,>=2.11"`\n'
    )
