"""Imports go one way: a package imports those above it in this list, never one below; modules import in no circle."""

import ast
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tests.conftest import ROOT

PACKAGE = "lean_finetune"
PACKAGES = """
core patches objectives preferences/objectives islands/objectives config pinning
data/read data/format data/chat data/encode
model/attention model/experts rows images preferences weights islands data/shards plan
model/beside model/files model/recurrent model/kernels model/joined_adapters model/norms model
step/offload step/update step run distributed
memory memory/trace memory/predict memory/tool_step memory/switches memory/advice memory/choice
train/monitor train/process train/checkpoint train/callbacks train
evaluate report stages commands/tuned commands/convert commands/project commands commands/choose commands/run
page/project page
""".split()
MOST_MODULES = 15
ISLANDS = {"images", "preferences", "weights"}
"""Packages of one capability each. `islands` lists them for all others."""
NAME_ISLANDS = [
    "commands/convert/conversions",
    "commands/convert/images",
    "commands/fit_images",
    "commands/tuned/prompt_images",
    "memory/choice/largest_image",
    "memory/predict/assumed_images",
    "memory/trace/known_images",
]
"""Modules outside of islands that import one. None is added: what they need becomes a method of the attachment."""
CODE = ("cuda_memory", PACKAGE, "stages", "benchmarks", "tests/kit")


@cache
@cache
def imported_names(path: Path) -> tuple[str, ...]:
    """Dotted names that a module imports, also inside functions and for types only."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return tuple(names)


def imported_packages(path: Path) -> set[str]:
    """The packages of lean_finetune that a module imports from."""
    folders = [name.split(".")[1:] for name in imported_names(path) if name.startswith(f"{PACKAGE}.")]
    return {next(package for n in (2, 1) if (package := "/".join(parts[:n])) in PACKAGES) for parts in folders}


def import_graph() -> dict[str, set[str]]:
    """The project's files that each of them imports."""
    paths = [path for name in CODE for path in (ROOT / name).rglob("*.py") if "build" not in path.parts]
    files = {path.relative_to(ROOT).as_posix() for path in paths}
    graph: dict[str, set[str]] = {}
    for path in paths:
        names = imported_names(path)  # `from a import b`: b is a module, or something in a.
        found = {f"{dotted.replace('.', '/')}.py" for name in names for dotted in (name, name.rpartition(".")[0])}
        graph[path.relative_to(ROOT).as_posix()] = found & files
    return graph


def test_no_package_imports_one_below_it():
    """A cycle of packages could only be read, tested and replaced together."""
    wrong = []
    for number, package in enumerate(PACKAGES):
        for path in sorted((ROOT / PACKAGE / package).glob("*.py")):
            wrong += [f"{path.name}: {other}" for other in imported_packages(path) if PACKAGES.index(other) > number]
    assert wrong == []


def test_only_the_lists_of_islands_name_one():
    """A capability that the plan or the step asks for enters every room again."""
    found = []
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        module = path.relative_to(ROOT / PACKAGE)
        imported = {name.split(".")[1] for name in imported_names(path) if name.startswith(f"{PACKAGE}.")}
        if module.parts[0] not in {"islands", *ISLANDS} and imported & ISLANDS:
            found.append(module.with_suffix("").as_posix())
    assert found == NAME_ISLANDS


def test_every_module_is_in_a_small_package():
    found = {path.parent.relative_to(ROOT / PACKAGE).as_posix() for path in (ROOT / PACKAGE).rglob("*.py")}
    parents = {"data"}
    assert found - {"."} - parents == set(PACKAGES)
    sizes = {package: len(list((ROOT / PACKAGE / package).glob("[!_]*.py"))) for package in PACKAGES}
    assert max(sizes.values()) <= MOST_MODULES, sizes


def test_cuda_memory_needs_only_numpy_and_click():
    """A package for users of other tools that installs PyTorch, or that imports lean_finetune."""
    allowed = {*sys.stdlib_module_names, "click", "cuda_memory", "numpy"}
    paths = [path for path in (ROOT / "cuda_memory").rglob("*.py") if "build" not in path.parts]
    found = {(path.name, name) for path in paths for name in imported_names(path)}
    assert len(paths) > 10 and {(path, name) for path, name in found if name.partition(".")[0] not in allowed} == set()


def test_the_kit_of_tests_needs_no_test_and_no_benchmark():
    """A change of a benchmark would break tests that have nothing to do with it."""
    paths = sorted((ROOT / "tests/kit").glob("*.py"))
    found = {(path.name, name) for path in paths for name in imported_names(path)}
    others = {(path, name) for path, name in found if name.startswith(("benchmarks", "tests.", "pytest"))}
    assert len(paths) > 5 and {(path, name) for path, name in others if not name.startswith("tests.kit.")} == set()


def test_modules_import_in_no_circle():
    """Two modules that import each other are one: neither can be read or tested alone."""
    graph = import_graph()
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(f"each is imported by the next: {' > '.join(error.args[1])}") from None
