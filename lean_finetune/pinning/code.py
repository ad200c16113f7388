"""Hashes of the code that a stage runs. Edits of comments, docstrings and formatting do not change them."""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from lean_finetune.core.atomic_files import sha256_file, sha256_json

PACKAGE = Path(__file__).parents[1]
ROOT = PACKAGE.parent
STAGES = "stages"
"""The package of a project that has the entries of its stages."""
PACKAGES = ("cuda_memory", PACKAGE.name, STAGES)
ALONE = tuple(f"cuda_memory/{name}" for name in ("README.md", "pyproject.toml", "version.txt"))
"""What builds `cuda_memory` as a package without lean_finetune."""
NO_DATA = (*ALONE, "build", "*.egg-info", "__pycache__")
"""Files and directories beside the code that it does not read."""


def code_hashes(module: str, library: Path = ROOT, project: Path | None = None) -> dict[str, str]:
    """Hashes of the files that running a module (by its dotted name) depends on, by relative path, sorted.

    These are the module, those of ours that it imports, directly or indirectly, also inside functions, and the data
    files of their packages, such as chat templates. Packages must have an empty `__init__.py`. `library` is the
    directory of the library's packages; `project` is the directory of the package `stages`, by default the same.
    """
    roots = {name: library for name in PACKAGES} | {STAGES: project or library}
    modules = _import_closure(module, roots)
    hashes = {name: _read_module(path.read_bytes()).syntax_hash for name, path in modules.items()}
    for package in {PurePosixPath(name).parent for name in modules}:
        folder = roots[package.parts[0]] / package
        for path in _package_data(folder):
            hashes[(package / path.relative_to(folder)).as_posix()] = sha256_file(path)
    return dict(sorted(hashes.items()))


def _import_closure(module: str, roots: Mapping[str, Path]) -> dict[str, Path]:
    """The files of a module and of everything of ours that it imports, by relative path."""
    found: dict[str, Path] = {}
    pending = [module]
    while pending:
        parts = pending.pop().split(".")
        name = f"{'/'.join(parts)}.py"
        path = roots[parts[0]] / name
        if name not in found and path.is_file():
            found[name] = path
            pending += _read_module(path.read_bytes()).imported
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


class Module(NamedTuple):
    """What is known of a module by its source."""

    syntax_hash: str
    """Of its syntax tree without docstrings, comments and positions."""
    imported: list[str]
    """Dotted names that it imports from our packages. `from a import b` gives `a` and `a.b`; either is a file."""


@cache
def _read_module(source: bytes) -> Module:
    imported: list[str] = []
    syntax = _plain(ast.parse(source), imported)
    return Module(sha256_json(syntax), [name for name in imported if name.partition(".")[0] in PACKAGES])


def _plain(value: Any, imported: list[str]) -> Any:
    """A syntax tree as JSON without empty fields, of which later versions of Python have more.

    Appends the names that it imports.
    """
    if isinstance(value, ast.AST):
        if isinstance(value, ast.Import):
            imported += [alias.name for alias in value.names]
        elif isinstance(value, ast.ImportFrom) and value.module:
            imported += [value.module, *(f"{value.module}.{alias.name}" for alias in value.names)]
        fields = {name: _plain(field, imported) for name, field in ast.iter_fields(value)}
        return [type(value).__name__, {name: field for name, field in fields.items() if field not in (None, [])}]
    if isinstance(value, list):
        return [_plain(item, imported) for item in value if not _is_docstring(item)]
    return value if value is None else repr(value)


def _is_docstring(node: Any) -> bool:
    """Whether a statement is an unused string, such as a docstring."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
