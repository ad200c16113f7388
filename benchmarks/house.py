"""Reading distance of the code: the files that `fit`, one step and one row enter, and those that name each switch.

`python -m benchmarks.house [--files]` prints a table to compare with an earlier one: what is counted, the figure and
its aim. `--files` also prints the files, in the order in which they are entered.
"""

import ast
import io
import os
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import chdir, redirect_stderr, redirect_stdout, suppress
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import click

from benchmarks.processes import write_params
from lean_finetune.pinning.code import code_hashes

ROOT = Path(__file__).parents[1]
LIBRARY = tuple(name for name in ("cuda_memory", "lean_finetune", "stages") if (ROOT / name).is_dir())
SWITCHES = (
    "sequence_tiles",
    "compress_activations",
    "fused_kernels",
    "offload_to",
    "optimizer_in_backward",
    "tensor_parallel",
    "grad_ckpt",
)
SMALL_LINES = 110
FIT = ["fit", "--model", str(ROOT / "lean_finetune/example_configs/llama-3.1-8b"), "--gpu", "RTX-4090"]
STEP = "training_step"
"""The function of one optimizer step, on real tensors and on fake ones."""
BEFORE_TRAINING = (("pin", "data"), ("pin", "model"), ("tokenize",), ("bucket",), ("estimate",))
SMALL_RUN = {"data.max_rows": 32, "train.epochs": 1, "run.progress": False, "run.data_workers": 1}

Figures = Iterator[tuple[str, object, str]]
"""Lines of the table."""


class Walk:
    """The functions of the library that run, each once, in the order of their first calls."""

    def __init__(self, inside: str | None = None):
        """`inside`: the name of a function; only what runs while it runs counts."""
        self.calls: dict[tuple[str, str], None] = {}
        self._inside, self._depth = inside, 0 if inside else 1

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Callable[[FrameType, str, Any], Any] | None:
        """Note a function that starts, as `sys.settrace` reports it."""
        code = frame.f_code
        if code.co_name == self._inside:
            self._depth += 1
            frame.f_trace_lines = False
        if self._depth and code.co_name != "<module>" and (file := library_file(code.co_filename)):
            self.calls.setdefault((file, code.co_qualname))
        return self._at_end if code.co_name == self._inside else None

    def _at_end(self, frame: FrameType, event: str, argument: Any) -> None:
        """Note the end of the function inside which calls count."""
        self._depth -= event == "return"

    @property
    def files(self) -> list[str]:
        """The files, in the order of their first calls."""
        return list(dict.fromkeys(file for file, _ in self.calls))

    @property
    def changes(self) -> int:
        """How often the file changes from one first call to the next."""
        return sum(before != after for (before, _), (after, _) in pairwise(self.calls))


@cache
def library_file(name: str) -> str | None:
    """The path below the root of a file of the library; None for other files."""
    path = Path(name)
    if not path.is_absolute() or not path.is_relative_to(ROOT):
        return None
    file = path.relative_to(ROOT)
    return file.as_posix() if file.parts[0] in LIBRARY else None


def walk(run: Callable[[], object], inside: str | None = None) -> Walk:
    """Run a function and return what it entered."""
    found = Walk(inside)
    sys.settrace(found)
    try:
        run()
    finally:
        sys.settrace(None)
    return found


def run_fit() -> None:
    """Run the command `fit` for a dense 8B on one GPU."""
    from lean_finetune.cli import main

    with redirect_stdout(io.StringIO()), suppress(SystemExit):
        main(FIT, standalone_mode=False)


def run_stage(name: str, *arguments: str) -> None:
    """Run a stage in this process."""
    module = __import__(f"stages.{name}", fromlist=["main"])
    with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
        module.main(list(arguments), standalone_mode=False)


def walk_training() -> dict[str, Walk]:
    """What tokenizing in one process enters, and what one optimizer step enters, in a small run."""
    found = {}
    with tempfile.TemporaryDirectory() as name:
        write_params(Path(name), SMALL_RUN)
        (Path(name) / "data").mkdir()
        (Path(name) / "data/raw").symlink_to(ROOT / "data/raw")
        with chdir(name):
            for stage, *arguments in BEFORE_TRAINING:
                found[stage] = walk(partial(run_stage, stage, *arguments))
            found["step"] = walk(partial(run_stage, "train"), inside=STEP)
    return {"rows": found["tokenize"], "estimate": found["estimate"], "step": found["step"]}


def sources() -> dict[str, str]:
    """The library's modules: source by path."""
    paths = sorted(path for package in LIBRARY for path in (ROOT / package).rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def imports(modules: Mapping[str, str]) -> dict[str, set[str]]:
    """The modules that each module imports when it is imported itself, not within its functions."""
    by_name = {path.removesuffix(".py").replace("/", "."): path for path in modules}
    found: dict[str, set[str]] = {}
    for path, source in modules.items():
        names = [name for node in ast.parse(source).body for name in _imported(node)]
        found[path] = {by_name[name] for name in names if name in by_name} - {path}
    return found


def _imported(node: ast.stmt) -> Iterator[str]:
    """The names that a statement at the top of a module imports; those for type checks count too."""
    if isinstance(node, ast.If):
        for inner in node.body:
            yield from _imported(inner)
    elif isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def circles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Groups of modules of which each imports each other one, directly or through others."""

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        pending = [start]
        while pending:
            new = set(graph[pending.pop()]) - found
            found |= new
            pending += new
        return found

    reach = {module: reached(module) for module in graph}
    groups = {tuple(sorted(other for other in reach[m] if m in reach[other])) for m in graph if m in reach[m]}
    return [list(group) for group in sorted(groups)]


def figures_of_text(modules: Mapping[str, str]) -> Figures:
    """Figures that the text of the library shows."""
    graph = imports(modules)
    code = {path: source for path, source in modules.items() if source.strip()}
    importers: dict[str, set[str]] = defaultdict(set)
    for path, imported in graph.items():
        for other in imported:
            importers[other].add(path)
    lines = {path: source.count("\n") for path, source in code.items()}
    lonely = [path for path in code if lines[path] < SMALL_LINES and len(importers[path]) == 1]
    for switch in SWITCHES:
        yield f"files that name {switch}", sum(bool(re.search(rf"\b{switch}\b", s)) for s in code.values()), "<= 6"
    trees = {path: ast.parse(source) for path, source in code.items()}
    functions = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    arguments = [{a.arg for a in (*node.args.args, *node.args.kwonlyargs)} for node in functions]
    yield "functions named from_params", sum(node.name == "from_params" for node in functions), "1 or 2"
    yield "functions that take `setting`", sum("setting" in names for names in arguments), ""
    together = {"config", "setting", "target"}
    yield "functions that take config, setting and target", sum(together <= names for names in arguments), ""
    for entry, aim in (("estimate", "<= 80"), ("train", "<= 90")):
        yield f"modules imported by stage {entry}", sum(p.endswith(".py") for p in code_hashes(f"stages.{entry}")), aim
    yield "Python files", len(code), "<= 190"
    yield f"modules with one importer, under {SMALL_LINES} lines", len(lonely), ""
    yield "import circles", len(circles(graph)), "0"
    for package in LIBRARY:
        yield f"lines of {package}/", sum(n for path, n in lines.items() if path.startswith(f"{package}/")), ""
    yield (
        "lines of lean_finetune/ and stages/",
        sum(n for p, n in lines.items() if not p.startswith("cuda_")),
        "<= 37000",
    )
    lengths = [(node.end_lineno or 0) - node.lineno + 1 for node in functions]
    yield "functions over 80 lines", sum(length > 80 for length in lengths), ""
    yield "modules over 500 lines", sum(n > 500 for n in lines.values()), "0"


def figures_of_runs(show_files: bool) -> Figures:
    """Figures of what runs enter."""
    walks = {"fit": walk(run_fit), **walk_training()}
    aims = {"fit": "<= 70", "step": "<= 10", "estimate": "", "rows": ""}
    names = {
        "fit": "`fit` of an 8B",
        "step": "one optimizer step",
        "estimate": "stage estimate",
        "rows": "stage tokenize",
    }
    for key, found in walks.items():
        assert found.calls, f"{key} entered no function of the library"
        yield f"files that {names[key]} enters", len(found.files), aims[key]
        yield "    functions; changes of file", f"{len(found.calls)}; {found.changes}", ""
        if show_files:
            yield from ((f"      {file}", "", "") for file in found.files)


@click.command()
@click.option("--files", is_flag=True, help="Also print the files that are entered.")
def main(files: bool) -> None:
    """Print the table."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    for name, figure, aim in (*figures_of_text(sources()), *figures_of_runs(files)):
        click.echo(f"{name:<58}{figure!s:>10}  {aim}".rstrip())


if __name__ == "__main__":
    main()
