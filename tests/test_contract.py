"""dvc.yaml declares the files that the stages read; else DVC would reuse a stale result.

Their parameters: tests/pipeline/test_dvc_truth.py.
"""

import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from lean_finetune.pinning.code import NO_DATA, code_hashes
from lean_finetune.stages.code import entries

ROOT = Path(__file__).parents[1]
STAGES = YAML(typ="safe").load((ROOT / "dvc.yaml").read_text())["stages"]
ENTRIES = entries(ROOT)
PINNED = [stage for stage in STAGES if stage != "pin_code"]
MOST_LINES_OF_ENTRY = 100
ENTRY_PACKAGES = ("stages", "lean_finetune/stages")
UNPINNED = {
    "cuda_memory/__main__.py",
    "cuda_memory/snapshot.py",
    "cuda_memory/snapshot_text.py",
    "cuda_memory/page/snapshot_page.py",
    "lean_finetune/__main__.py",
    "lean_finetune/cli.py",
    "lean_finetune/fit_params.yaml",
    "lean_finetune/images/published_processor.py",
    "lean_finetune/memory/advice/as_tool.py",
    "lean_finetune/memory/advice/length_staircase.py",
    "lean_finetune/memory/predict/assumed_images.py",
    "lean_finetune/report/compare_experiments.py",
    "lean_finetune/py.typed",
    "lean_finetune/stages/code.py",
}
"""Files that no stage runs, besides those of UNPINNED_PACKAGES: `lean-finetune`, `make compare` and `make plots`."""
UNPINNED_PACKAGES = tuple(
    f"lean_finetune/{name}/"
    for name in (
        "commands",
        "example_configs",
        "memory/choice",
        "memory/tool_step",
        "other_tools",
        "page",
        "project",
    )
)
LIBRARY = ("cuda_memory", "lean_finetune")


def library_files() -> Iterator[Path]:
    """The files of the wheel."""
    for name in LIBRARY:
        for path in (ROOT / name).rglob("*"):
            places = [path, *path.relative_to(ROOT).parents]
            if path.is_file() and not any(place.match(pattern) for place in places for pattern in NO_DATA):
                yield path


def entry_of(stage: str) -> str:
    """The module that the stage's command runs."""
    argv = shlex.split(STAGES[stage]["cmd"])
    assert argv[:2] == ["python", "-m"], "a script path would import the workspace's code in --temp runs"
    return argv[2]


@pytest.mark.parametrize("stage", PINNED)
def test_a_stage_depends_on_its_pinned_code(stage: str):
    """A stage that does not depend on its code is not rerun; one that depends on its files reruns for a comment."""
    code = [dep for dep in STAGES[stage]["deps"] if dep.endswith(".py") or dep.startswith("locks/code")]
    assert code == [f"locks/code/{entry_of(stage).removeprefix('stages.')}.json"]


def test_pin_code_always_runs_and_pins_every_stage():
    assert STAGES["pin_code"]["always_changed"]
    assert {entry_of(stage).removeprefix("stages.") for stage in PINNED} == set(ENTRIES)


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_entry_is_short_and_imports_no_other(entry: str):
    """A stage that imports another's entry would couple their command lines."""
    files = code_hashes(f"stages.{entry}")
    for package in ENTRY_PACKAGES:
        assert [path for path in files if path.startswith(f"{package}/")] == [f"{package}/{entry}.py"]
        assert len((ROOT / package / f"{entry}.py").read_text().splitlines()) <= MOST_LINES_OF_ENTRY


def test_every_module_and_file_of_the_library_is_pinned_by_a_stage():
    """A module that no stage imports is dead; a data file in no hash leaves stale results after an edit."""
    pinned = {path for entry in ENTRIES for path in code_hashes(f"stages.{entry}")}
    names = {path.relative_to(ROOT).as_posix() for path in library_files() if path.name != "__init__.py"}
    model = {name for name in names if name.startswith("lean_finetune/tiny/")}  # Pinned as a model.
    commands = {name for name in names if name.startswith(UNPINNED_PACKAGES)}
    assert names - pinned - model - commands == UNPINNED


def test_every_data_file_of_the_library_is_in_the_wheel():
    """`lean-finetune fit` had no configurations outside of a clone."""
    packed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    found = {
        path
        for package, patterns in packed.items()
        for pattern in patterns
        for path in (ROOT / package.replace(".", "/")).glob(pattern)
        if path.is_file()
    }
    assert {path for path in library_files() if path.suffix != ".py"} == found


def test_packages_are_empty():
    """Code in __init__.py would be in no hash."""
    packages = [path for name in (*LIBRARY, "stages") for path in (ROOT / name).rglob("__init__.py")]
    assert [str(path) for path in packages if path.read_text().strip()] == []
