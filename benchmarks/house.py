"""How far each capability spreads through the code: files that name it, branches on kinds, functions of a `fit`.

`python -m benchmarks.house [--files]` prints a table: what is counted, the figure and its aim. `--files` also prints
the files that are counted.
"""

import ast
import inspect
import io
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import click

ROOT = Path(__file__).parents[1]
LIBRARY = ("cuda_memory", "lean_finetune", "stages")


@dataclass(frozen=True)
class Capability:
    """One of the things that the library can do, and how its code is recognised."""

    words: str
    """Expression that finds it in a module."""
    own: str | None = None
    """Expression that finds its own modules by their path; None if it has none."""


CAPABILITIES: Mapping[str, Capability] = {
    "images": Capability(
        r"\bimages?\b|image_|_image\b|\bpictures?\b|picture_|_picture\b|\bvision|projector|patches_of|max_patches",
        "image|picture",
    ),
    "preferences": Capability(
        r"preference|row_kind|RowKind|desirable|mismatch|\bscored\b|\.scores\b|scores=|has_reference|\.compares\b"
        r"|(Answer|Pair)Objective",
        "objective|preference|pair|label|mismatch|reference_",
    ),
    "experts": Capability(r"\bexperts?\b|router", "expert|grouped_matmul"),
    "pipeline": Capability(
        r"pipeline_stages|PipelineModel|stage_layers|of_stage|OtherStage|is_pipeline|layout\.pipeline|in_flight"
        r"|computes_loss",
        "/pipeline",
    ),
    "context parallel": Capability(r"context_parallel|TokenExchange|TokenPart|layout\.context", "context_parallel"),
    "tensor parallel": Capability(r"tensor_parallel|TensorShards|layout\.tensor", "tensor_shards"),
    "sharding": Capability(r"\bsharding\b|zero[123]|hsdp|SPLIT_WEIGHTS", "fsdp|replicated|sharding_modes"),
    "offload": Capability(r"train\.offload\b|\.offload ==|\.offload !=|offload_to|DiskPlace", "process_memory"),
    "offload activations": Capability(r"offload_activations|ActivationOffload", "activation_offload"),
    "checkpointing": Capability(r"grad_ckpt|recomputed_every", "checkpointing"),
    "update in backward": Capability(r"in_backward"),
    "fused kernels": Capability(r"fused_kernels", "fused_kernels"),
    "int8_lora": Capability(r"int8_lora"),
    "packed rows": Capability(r"\bpacked\b|packed_|\bflat\b", "packed"),
    "fp16 scale": Capability(r"LossScaler|scales_loss"),
    "model.adapter": Capability(
        r"continued_adapter|model\.adapter\b|adapter_files|adapter: Path", "continued_adapter|adapter_files"
    ),
    "trained token rows": Capability(r"trainable_tokens|modules_to_save|trained_rows|token_ids\(", "trained_rows"),
    "other tools": Capability(r"tool_step|as_tool|other_tools|of_tool", "tool"),
}
ISLANDS: Mapping[str, str] = {
    "commands/convert": "other tools",
    "images": "images",
    "memory/tool_step": "other tools",
    "model/attention": "packed rows",
    "model/experts": "experts",
    "objectives": "preferences",
    "preferences": "preferences",
    "step/offload": "offload",
}
"""Packages of lean_finetune that belong to one capability, and that capability."""
MANY = 5
"""Capabilities of which a file names too many."""
KINDS = frozenset(
    {
        *("objective", "goal", "compares", "preferences", "preference", "row_kind", "has_reference", "reference"),
        *("scores", "scored"),
        *("answers", "labels", "pairs", "image", "images", "image_inputs", "row_images", "full_row"),
    }
)
"""Names of what a run or a row has besides tokens."""
ASSEMBLY: Mapping[str, Set[str]] = {
    "pins": {"read_model_lock", "read_tokenizer_lock"},
    "directory": {"model_directory", "find_model", "config_directory"},
    "model": {"read_config", "load_base", "load_model"},
    "precision": {"precision_on", "precision_of", "resolved", "base_weights_from"},
    "adapter": {"adapter_directory", "find_adapter", "load_adapter", "verify_adapter", "read_adapter"},
    "trained tokens": {"with_rows", "with_token_ids", "add_rows", "trained_ids"},
    "images": {"for_model", "whole_config"},
}
"""Parts of a run, and the functions that make them."""
ASSEMBLED_PARTS = 4
"""A file that makes so many parts of a run assembles one."""
MOST_LINES = 80
FIT = ["fit", "--model", str(ROOT / "lean_finetune/example_configs/llama-3.1-8b"), "--gpu", "RTX-4090"]

Figure = tuple[str, object, str]
"""A line of the table: what is counted, the figure, the aim."""


def sources() -> dict[str, str]:
    """The library's modules: source by path."""
    paths = sorted(path for package in LIBRARY for path in (ROOT / package).rglob("*.py") if "build" not in path.parts)
    found = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    return {path: source for path, source in found.items() if source.strip()}


def naming_files(modules: Mapping[str, str]) -> dict[str, list[str]]:
    """By capability, the files of lean_finetune that name it."""
    inside = {path: source for path, source in modules.items() if path.startswith("lean_finetune/")}
    return {
        name: [path for path, source in inside.items() if re.search(one.words, source)]
        for name, one in CAPABILITIES.items()
    }


def is_home(path: str, capability: str) -> bool:
    """Whether a file is the capability's own: by its name, or because its package is."""
    own = CAPABILITIES[capability].own
    in_island = any(
        path.startswith(f"lean_finetune/{package}/") for package, name in ISLANDS.items() if name == capability
    )
    return in_island or (own is not None and re.search(own, path) is not None)


def branches(tree: ast.Module) -> int:
    """Decisions on whether something is of the usual kind: its objective, its rows, their images.

    Comparisons of a name in KINDS with None or a text, comparisons with a row kind, questions for the class of an
    objective, and tests of such a name alone.
    """
    nodes = list(ast.walk(tree))
    compared = [node for node in nodes if isinstance(node, ast.Compare) and _is_of_kind(node)]
    asked = [node for node in nodes if isinstance(node, ast.Call) and _asks_class(node)]
    alone = {id(test) for node in nodes for test in _tests(node) if _last_name(test) in KINDS}
    return len(compared) + len(asked) + len(alone)


def _asks_class(node: ast.Call) -> bool:
    return _last_name(node.func) == "isinstance" and (_last_name(node.args[1]) or "").endswith("Objective")


def _is_of_kind(node: ast.Compare) -> bool:
    sides = [node.left, *node.comparators]
    if any(isinstance(side, ast.Attribute) and _last_name(side.value) == "RowKind" for side in sides):
        return True
    with_constant = any(isinstance(side, ast.Constant) and isinstance(side.value, str | None) for side in sides)
    return with_constant and any(_last_name(side) in KINDS for side in sides)


def _tests(node: ast.AST) -> list[ast.expr]:
    """Expressions whose truth a node tests."""
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        return [node.test]
    if isinstance(node, ast.BoolOp):
        return node.values
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return [node.operand]
    return node.ifs if isinstance(node, ast.comprehension) else []


def _last_name(node: ast.expr) -> str | None:
    """`c` of `a.b.c`, of `c` and of `c := …`; None for other expressions."""
    if isinstance(node, ast.NamedExpr):
        return node.target.id
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None


def assembles_run(tree: ast.Module) -> bool:
    """Whether a module makes most parts of a run itself."""
    called = {_last_name(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    return sum(bool(called & functions) for functions in ASSEMBLY.values()) >= ASSEMBLED_PARTS


def imported(trees: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    """The library's modules that each module imports, also within functions and for type checks."""
    names = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in trees}
    found: dict[str, set[str]] = {}
    for path, tree in trees.items():
        dotted: list[str] = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                dotted += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                modules = [f"{node.module}.{alias.name}" for alias in node.names]
                dotted += [name if name in names else node.module for name in modules]
        found[path] = {names[name] for name in dotted if name in names} - {path}
    return found


def figures_of_text(modules: Mapping[str, str], show_files: bool) -> Iterator[Figure]:
    """Figures that the text of the library shows."""
    naming, trees = naming_files(modules), {path: ast.parse(source) for path, source in modules.items()}
    foreign = {name: [path for path in files if not is_home(path, name)] for name, files in naming.items()}
    aims = {"images": "<= 20", "preferences": "<= 15"}
    for name, files in foreign.items():
        yield f"foreign files that name {name}", len(files), aims.get(name, "")
        yield from _listed(files, show_files)
    yield f"sum over {len(foreign)} capabilities", sum(map(len, foreign.values())), "<= 330"
    named = Counter(path for files in naming.values() for path in files)
    yield from _counted(
        f"files that name {MANY} or more", [p for p, n in named.items() if n >= MANY], "<= 22", show_files
    )
    on_kinds = {path: branches(tree) for path, tree in trees.items()}
    yield "branches on None or kind of objective, rows, images", sum(on_kinds.values()), "<= 60"
    yield from _listed([f"{path} {count}" for path, count in on_kinds.items() if count], show_files)
    assemblers = [path for path, tree in trees.items() if assembles_run(tree)]
    yield from _counted("assemblers of a run", assemblers, "1", show_files)
    path, others = max(imported(trees).items(), key=lambda item: len(item[1]))
    yield "most project imports of one file", len(others), "<= 20"
    yield from _listed([path], show_files)
    functions = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    long = [node.name for node in functions if (node.end_lineno or 0) - node.lineno >= MOST_LINES]
    yield from _counted(f"functions over {MOST_LINES} lines", long, "0", show_files)


def _counted(what: str, files: list[str], aim: str, show_files: bool) -> Iterator[Figure]:
    yield what, len(files), aim
    yield from _listed(files, show_files)


def _listed(files: list[str], show_files: bool) -> Iterator[Figure]:
    yield from ((f"    {file}", "", "") for file in files if show_files)


class Walk:
    """The named functions of the library that run, each once, in the order of their first calls."""

    def __init__(self) -> None:
        self.calls: dict[tuple[str, str], None] = {}
        self._seen: dict[int, CodeType] = {}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Note a function that starts, as `sys.settrace` reports it; bodies of classes and modules are none."""
        code = frame.f_code
        if id(code) in self._seen:  # Faster than the hash of a code object.
            return
        self._seen[id(code)] = code
        if (file := library_file(code.co_filename)) is None:
            return
        if code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<"):
            self.calls.setdefault((file, code.co_qualname))

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


def walk(run: Callable[[], object]) -> Walk:
    """Run a function and return what it entered."""
    found = Walk()
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


def figures_of_fit(show_files: bool) -> Iterator[Figure]:
    """Figures of a plain `fit`."""
    found = walk(run_fit)
    assert found.calls, "fit entered no function of the library"
    yield "functions in a plain `fit`", len(found.calls), "<= 520"
    yield from _listed([f"{file} {function}" for file, function in found.calls], show_files)
    yield "changes of file in a plain `fit`", found.changes, "<= 310"


@click.command()
@click.option("--files", is_flag=True, help="Also print the files that are counted.")
def main(files: bool) -> None:
    """Print the table."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    for name, figure, aim in (*figures_of_text(sources(), files), *figures_of_fit(files)):
        click.echo(f"{name:<58}{figure!s:>6}  {aim}".rstrip())


if __name__ == "__main__":
    main()
