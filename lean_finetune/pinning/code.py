"""Hashes of the code that a stage runs. Edits of comments, docstrings and formatting do not change them."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from lean_finetune.core.atomic_files import sha256_file, sha256_json

PACKAGE = Path(__file__).parents[1]
ROOT = PACKAGE.parent
PACKAGES = ("cuda_memory", PACKAGE.name, "stages")
NO_DATA = ("cuda_memory/README.md", "cuda_memory/pyproject.toml", "build", "*.egg-info", "__pycache__")
"""Files and directories beside the code that it does not read."""


def code_hashes(module: str, root: Path = ROOT) -> dict[str, str]:
    """Hashes of the project files that running a module (by its dotted name) depends on, by path below `root`, sorted.

    These are the module, those it imports, directly or indirectly, also inside functions, and the data files of their
    packages, such as chat templates. Packages must have an empty `__init__.py`.
    """
    modules = _import_closure(module, root)
    packages = {path.parent for path in modules}
    data = {path for package in packages for path in _package_data(package)}
    hashes = {path: _syntax_hash(path.read_bytes()) for path in modules} | {path: sha256_file(path) for path in data}
    return {path.relative_to(root).as_posix(): hashes[path] for path in sorted(hashes)}


def _import_closure(module: str, root: Path) -> set[Path]:
    """Files of a module and of everything that it imports from this project."""
    found: set[Path] = set()
    pending = [_file_of(module, root)]
    while pending:
        path = pending.pop()
        if path not in found:
            found.add(path)
            names = _imported_names(path.read_bytes())
            pending += [file for name in names if (file := _file_of(name, root)).is_file()]
    return found


def _file_of(module: str, root: Path) -> Path:
    return root.joinpath(*module.split(".")).with_suffix(".py")


@cache
def _imported_names(source: bytes) -> list[str]:
    """Dotted names that a module imports from this project. `from a import b` gives `a` and `a.b`; either is a file."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        found += [name for name in names if name.partition(".")[0] in PACKAGES]
    return found


def _package_data(package: Path) -> Iterator[Path]:
    """Files of a package that are not Python, also in its directories that are not packages."""
    for path in package.iterdir():
        if any(map(path.match, NO_DATA)):
            continue
        if path.is_dir() and not (path / "__init__.py").exists():
            yield from (file for file in path.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
        elif path.is_file() and path.suffix != ".py":
            yield path


@cache
def _syntax_hash(source: bytes) -> str:
    """A hash of a module's syntax tree without docstrings, comments and positions."""
    return sha256_json(_plain(ast.parse(source)))


def _plain(value: Any) -> Any:
    """A syntax tree as JSON without empty fields, of which later versions of Python have more."""
    if isinstance(value, ast.AST):
        fields = {name: _plain(field) for name, field in ast.iter_fields(value)}
        return [type(value).__name__, {name: field for name, field in fields.items() if field not in (None, [])}]
    if isinstance(value, list):
        return [_plain(item) for item in value if not _is_docstring(item)]
    return value if value is None else repr(value)


def _is_docstring(node: Any) -> bool:
    """Whether a statement is an unused string, such as a docstring."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
