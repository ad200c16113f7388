"""The source of a family's functions: another function may replace one only if it has the same statements."""

import ast
import inspect
import textwrap
from functools import cache
from typing import Any


def function_tree(function: Any) -> ast.FunctionDef | None:
    """The syntax tree of a function or method; None without its source."""
    try:
        node = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    return node if isinstance(node, ast.FunctionDef) else None


def same_code(function: Any, other: Any) -> bool:
    """Whether two functions have the same parameters and statements."""
    return callable(function) and (found := _statements(function)) is not None and found == _statements(other)


@cache
def _statements(function: Any) -> str | None:
    """The parameters and statements of a function, without annotations, comments and docstring; None without source."""
    if (node := function_tree(function)) is None:
        return None
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return "\n".join([*(one.arg for one in node.args.args), *map(ast.dump, body)])
