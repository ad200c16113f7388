"""Which layers a module's code calls with the same input, read from the source of its forward method."""

import ast
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from lean_finetune.model.kernels.family_code import function_tree

CONDITIONAL = (ast.IfExp, ast.BoolOp, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
"""Expressions that may leave out a call, or repeat it."""


@dataclass(frozen=True, kw_only=True)
class GatedMlp:
    """Names of the modules of an MLP that computes down(activation(gate(x)) · up(x))."""

    gate: str
    up: str
    down: str
    activation: str


@cache
def alike_inputs(forward: Callable[..., Any]) -> tuple[tuple[str, ...], ...]:
    """Names of the attributes of `self` that a method calls with one argument, grouped by it, in the order of calls.

    Calls are in one group if they have the same variable as argument, its value is the same, and all or none run.
    """
    function = function_tree(forward)
    if function is None:
        return ()
    groups: list[tuple[str, ...]] = []
    _collect(function.body, groups)
    return tuple(groups)


@cache
def gated_mlp(forward: Callable[..., Any]) -> GatedMlp | None:
    """The parts of a method that is nothing but a gated MLP; None for others."""
    function = function_tree(forward)
    if function is None:
        return None
    body = [one for one in function.body if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))]
    if not isinstance(body[-1], ast.Return):
        return None
    result = body[-1].value
    if len(body) == 2 and isinstance(body[0], ast.Assign) and _names(body[0].targets) == _names([result]):
        result = body[0].value
    elif len(body) != 1:
        return None
    down, product = _call(result)
    if down is None or not (isinstance(product, ast.BinOp) and isinstance(product.op, ast.Mult)):
        return None
    for activated, other in ((product.left, product.right), (product.right, product.left)):
        activation, inner = _call(activated)
        (gate, x), (up, same) = _call(inner), _call(other)
        if activation and gate and up and isinstance(x, ast.Name) and isinstance(same, ast.Name) and x.id == same.id:
            return GatedMlp(gate=gate, up=up, down=down, activation=activation)
    return None


def _collect(block: list[ast.stmt], groups: list[tuple[str, ...]]) -> None:
    """Append the groups of a block of statements, and of the blocks inside it."""
    names: defaultdict[str, list[str]] = defaultdict(list)

    def end(variable: str) -> None:
        if found := names.pop(variable, None):
            groups.append(tuple(found))

    for statement in block:
        inner = [value for _, value in ast.iter_fields(statement) if _is_block(value)]
        if inner or hasattr(statement, "handlers"):
            for part in inner:
                _collect(part, groups)
        else:
            for call in _calls(statement):
                name, argument = _call(call)
                if name is not None and isinstance(argument, ast.Name):
                    names[argument.id].append(name)
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                end(node.id)
    for variable in list(names):
        end(variable)


def _is_block(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], ast.stmt)


def _calls(node: ast.AST) -> Iterator[ast.Call]:
    """The calls inside of a statement that certainly run, in order."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, CONDITIONAL):
            yield from _calls(child)
    if isinstance(node, ast.Call):
        yield node


def _call(node: ast.AST | None) -> tuple[str | None, ast.expr | None]:
    """The name and the argument of a call of an attribute of `self` with one argument; None for other nodes."""
    if not isinstance(node, ast.Call) or len(node.args) != 1 or node.keywords:
        return None, None
    function = node.func
    if not isinstance(function, ast.Attribute) or not isinstance(function.value, ast.Name):
        return None, None
    return (function.attr, node.args[0]) if function.value.id == "self" else (None, None)


def _names(nodes: list[Any]) -> list[str | None]:
    return [node.id if isinstance(node, ast.Name) else None for node in nodes]
