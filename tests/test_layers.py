"""Imports go one way: a package imports those above it in this list, never one below."""

import ast
from pathlib import Path

from tests.conftest import ROOT

PACKAGE = "lean_finetune"
PACKAGES = """
core config pinning
data/read data/format data/chat data/encode data/shards
plan model/attention model/experts model/files model model/merge step/offload step distributed
memory memory/trace memory/predict memory/allocator memory/recording memory/diagnosis memory/advice memory/estimate
train/monitor train/oom train/process train/checkpoint train/callbacks train
evaluate report commands/tuned commands/convert commands
""".split()
MOST_MODULES = 15


def imported_packages(path: Path) -> set[str]:
    """The packages that a module imports from."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    folders = [name.split(".")[1:] for name in names if name.startswith(f"{PACKAGE}.")]
    return {next(package for n in (2, 1) if (package := "/".join(parts[:n])) in PACKAGES) for parts in folders}


def test_no_package_imports_one_below_it():
    """A cycle of packages could only be read, tested and replaced together."""
    wrong = []
    for number, package in enumerate(PACKAGES):
        for path in sorted((ROOT / PACKAGE / package).glob("*.py")):
            wrong += [f"{path.name}: {other}" for other in imported_packages(path) if PACKAGES.index(other) > number]
    assert wrong == []


def test_every_module_is_in_a_small_package():
    found = {path.parent.relative_to(ROOT / PACKAGE).as_posix() for path in (ROOT / PACKAGE).rglob("*.py")}
    parents = {"data"}
    assert found - {"."} - parents == set(PACKAGES)
    sizes = {package: len(list((ROOT / PACKAGE / package).glob("[!_]*.py"))) for package in PACKAGES}
    assert max(sizes.values()) <= MOST_MODULES, sizes
