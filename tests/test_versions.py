"""pip can install the versions that the README names as tested."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from tests.test_layers import imported_names

ROOT = Path(__file__).parents[1]
MODULES = {"mlflow-skinny": "mlflow", "vl-convert-python": "vl_convert"}
"""Packages whose module has another name."""
USED_BY_OTHERS = {
    **dict.fromkeys(("alembic", "sqlalchemy"), "mlflow, for a local store"),
    **dict.fromkeys(("dvclive", "tensorboard"), "accelerate.tracking"),
    **dict.fromkeys(("mkdocs", "mkdocs-material", "mypy", "pytest-xdist", "ruff"), "a command"),
    "types-tqdm": "mypy",
}
"""Packages that nothing here imports, and what uses them."""


def test_pyproject_accepts_each_version_that_the_readme_names():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    bounds = {need.name: need.specifier for need in map(Requirement, project["dependencies"])}
    tried = re.search(r"^Tested with ([^;]*);", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert tried
    versions = re.findall(r"([a-z]+) ((?:[\d.]+(?:, | and )?)+)", tried[1])
    assert {name for name, _ in versions} == {"torch", "transformers", "peft", "bitsandbytes"}
    for name, listed in versions:
        for version in re.findall(r"\d+\.\d+\.\d+", listed):
            assert bounds[name].contains(version), f"{name} {version}"


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
