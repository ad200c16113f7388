"""docs/cuda-branches.md lists every branch that only CUDA takes: a new one needs a word on how it is proven."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PREDICTION = ("lean_finetune/memory/predict", "lean_finetune/memory/tool_step", "lean_finetune/memory/trace")
"""Packages that run for GPUs on every machine."""


def is_cuda_only(node: ast.AST) -> bool:
    """Whether an expression is of CUDA, or asks for it: torch.cuda, device.type == "cuda", pinned memory, autocast."""
    match node:
        case ast.Attribute(value=ast.Name(id="torch"), attr="cuda" | "autocast") | ast.Attribute(attr="is_pinned"):
            return True
        case ast.Compare(left=ast.Attribute(attr="type"), comparators=[ast.Constant(value="cuda" | "cpu")]):
            return True
        case ast.keyword(arg="pin_memory", value=value):
            return not isinstance(value, ast.Name) or value.id != "pin_memory"
    return False


def branches(node: ast.AST, names: tuple[str, ...] = ()) -> Iterator[str]:
    """Qualified names of the functions with such expressions."""
    for child in ast.iter_child_nodes(node):
        inside = (*names, child.name) if isinstance(child, ast.FunctionDef | ast.ClassDef) else names
        if is_cuda_only(child):
            yield ".".join(inside)
        yield from branches(child, inside)


def test_every_branch_that_only_cuda_takes_is_listed_with_its_proof():
    """Code for GPUs that nobody knows to be unproven; or a proof of code that is gone."""
    files = [path for name in ("cuda_memory", "lean_finetune", "stages") for path in (ROOT / name).rglob("*.py")]
    found = {
        (path.relative_to(ROOT).as_posix().removeprefix("lean_finetune/"), name)
        for path in files
        if not path.relative_to(ROOT).as_posix().startswith(PREDICTION)
        for name in branches(ast.parse(path.read_text()))
    }
    rows = re.findall(
        r"^\| `(\S+\.py)` `(\S+)` \| .+ \| (emulated|traced|H100|read|no)\b.* \|$",
        (ROOT / "docs" / "cuda-branches.md").read_text(),
        re.MULTILINE,
    )
    listed = {(path, name) for path, name, _ in rows}
    assert found - listed == set(), "branches without a row"
    assert listed - found == set(), "rows without a branch"
    assert len(rows) == len(listed)
