"""Read a Python script or a notebook without running it: the values with which it calls classes of training tools.

Statements are followed in order, and names have the values of the assignments above. A value that only running can give
is `Unresolved`, with its line.
"""

import ast
import json
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lean_finetune.commands.convert.shell_script import Unresolved
from lean_finetune.core.errors import UserError, shortened
from lean_finetune.core.read_yaml import MOST_BYTES

NOTEBOOK = ".ipynb"
MOST_NOTEBOOK_BYTES = 1 << 26
"""With its outputs, such as pictures."""
NATIVE_BF16 = ("is_bfloat16_supported", "is_bf16_supported")
"""Functions that say whether the GPU has bf16: `auto` here."""
OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
LARGEST = 10**12
"""The largest number that is computed."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call with its arguments, those of `**` too. Positional ones are named by their numbers, from "0"."""

    name: str
    """The last name: `SFTConfig`, or `from_pretrained`."""
    owner: str
    """What stands before it: `FastLanguageModel`; empty if nothing does."""
    line: int
    arguments: Mapping[str, Any]


def calls_of(path: Path, text: str) -> list[Call]:
    """All calls of a script or notebook, in the order in which they end.

    Raises:
        UserError: it cannot be read as Python, or has more than `MOST_BYTES`.
    """
    code = _cells(path, text) if path.suffix == NOTEBOOK else text
    if len(code) > MOST_BYTES:
        raise UserError(f"{path}: must have at most {MOST_BYTES} bytes of code; name another file")
    try:
        reader = _Reader()
        reader.follow(ast.parse(code).body)
    except SyntaxError as error:
        raise UserError(f"{path}:{error.lineno or 1}: must be Python ({error.msg}); name another file") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise UserError(
            f"{path}: must be Python that can be read ({type(error).__name__}); name another file"
        ) from None
    return reader.calls


def _cells(path: Path, text: str) -> str:
    """The code of a notebook's cells; commands of the shell and of IPython are left out."""
    try:
        content = json.loads(text)
        cells = ["".join(cell["source"]) for cell in content["cells"] if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"{path}: must be a notebook of Jupyter; name another file") from None
    return "\n".join(_without_commands("\n".join(cell for cell in cells if not cell.startswith("%%"))))


def _without_commands(code: str) -> Iterator[str]:
    """Lines of code, with `pass` for commands and empty lines for their continuations."""
    continued = False
    for line in code.splitlines():
        is_command = not continued and line.lstrip().startswith(("!", "%"))
        if continued:
            yield ""
        elif is_command:
            yield line[: len(line) - len(line.lstrip())] + "pass"
        else:
            yield line
        continued = (continued or is_command) and line.rstrip().endswith("\\")


@dataclass(kw_only=True)
class _Reader:
    """Follows statements with the names that are known."""

    names: dict[str, Any] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)

    def follow(self, body: Sequence[ast.stmt]) -> None:
        """Go through statements in order."""
        for statement in body:
            if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
                value = self.value(statement.value)
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                for target in targets:
                    self._assign(target, value)
            elif isinstance(statement, ast.If):
                self._branch(statement)
            else:
                self._other(statement)

    def _branch(self, statement: ast.If) -> None:
        """The branch that is taken; if that is not known, both, and the names that either sets are not known."""
        test = self.value(statement.test)
        main = isinstance(statement.test, ast.Compare) and ast.unparse(statement.test.left) == "__name__"
        if main or isinstance(test, bool):
            self.follow(statement.body if main or test else statement.orelse)
            return
        self._apart([*statement.body, *statement.orelse], "is set in a condition")

    def _apart(self, body: Sequence[ast.stmt], why: str) -> None:
        """Statements that may run or not, or several times: what they set is not known behind them."""
        before = dict(self.names)
        self.follow(body)
        changed = [name for name, value in self.names.items() if name not in before or before[name] is not value]
        for name in changed:
            self.names[name] = Unresolved(name, body[0].lineno if body else 1, f"{name} {why}")

    def _other(self, statement: ast.stmt) -> None:
        """Any other statement: its expressions, then its own statements apart."""
        inside: list[ast.stmt] = []
        for value in ast.iter_child_nodes(statement):
            if isinstance(value, ast.expr):
                self.value(value)
            elif isinstance(value, ast.stmt):
                inside.append(value)
            elif isinstance(value, ast.ExceptHandler | ast.match_case):
                inside += value.body
            elif isinstance(value, ast.withitem):
                self.value(value.context_expr)
        if isinstance(statement, ast.With | ast.Try):
            self.follow(inside)
        elif inside:
            kind = "loop" if isinstance(statement, ast.For | ast.While) else "function"
            self._apart(inside, f"is set in a {kind}")

    def _assign(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self.names[target.id] = value
        elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
            self.names[f"{target.value.id}.{target.attr}"] = value
        elif isinstance(target, ast.Tuple | ast.List):
            values = value if isinstance(value, list) and len(value) == len(target.elts) else None
            for number, one in enumerate(target.elts):
                self._assign(one, value if values is None else values[number])

    def value(self, node: ast.expr) -> Any:
        """The value of an expression: a literal, a list, a dictionary, a `Call`, or `Unresolved`."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | bool | None):
            return node.value
        if isinstance(node, ast.List | ast.Tuple | ast.Set) and not any(isinstance(e, ast.Starred) for e in node.elts):
            return [self.value(element) for element in node.elts]
        if isinstance(node, ast.Dict):
            return self._dictionary(node)
        if isinstance(node, ast.Name):
            return self.names.get(node.id, self._unresolved(node))
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.UnaryOp):
            return self._unary(node)
        if isinstance(node, ast.BinOp):
            return self._number(node)
        for child in ast.iter_child_nodes(node):  # For the calls inside.
            if isinstance(child, ast.expr):
                self.value(child)
        return self._unresolved(node)

    def _unresolved(self, node: ast.expr) -> Unresolved:
        text = shortened(ast.unparse(node))
        return Unresolved(text, node.lineno, f"{text} is known only while the script runs")

    def _dictionary(self, node: ast.Dict) -> Any:
        found: dict[str, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            known = self.value(value)
            if key is None:  # **
                if not isinstance(known, dict):
                    return self._unresolved(node)
                found |= known
            elif isinstance(name := self.value(key), str) and not isinstance(name, Unresolved):
                found[name] = known
        return found

    def _attribute(self, node: ast.Attribute) -> Any:
        """A type of torch by its name, or what was set for a name with a dot."""
        text = ast.unparse(node)
        return node.attr if text == f"torch.{node.attr}" else self.names.get(text, self._unresolved(node))

    def _call(self, node: ast.Call) -> Any:
        function, owner = node.func, ""
        if isinstance(function, ast.Attribute):
            self.value(function.value)
            name, owner = function.attr, shortened(ast.unparse(function.value))
        else:
            name = function.id if isinstance(function, ast.Name) else ""
        arguments: dict[str, Any] = {str(number): self.value(one) for number, one in enumerate(node.args)}
        for keyword in node.keywords:
            value = self.value(keyword.value)
            if keyword.arg is not None:
                arguments[keyword.arg] = value
            elif isinstance(value, dict):
                arguments |= value
            else:
                arguments["**"] = value if isinstance(value, Unresolved) else self._unresolved(keyword.value)
        if name == "dict" and not node.args and "**" not in arguments:
            return arguments
        if name in NATIVE_BF16:
            return "auto"
        call = Call(name=name, owner=owner, line=node.lineno, arguments=arguments)
        self.calls.append(call)
        return call

    def _unary(self, node: ast.UnaryOp) -> Any:
        value = self.value(node.operand)
        if isinstance(node.op, ast.Not) and (isinstance(value, bool) or value == "auto"):
            return value if value == "auto" else not value
        if isinstance(node.op, ast.USub) and isinstance(value, int | float):
            return -value
        return self._unresolved(node)

    def _number(self, node: ast.BinOp) -> Any:
        left, right, compute = self.value(node.left), self.value(node.right), OPERATORS.get(type(node.op))
        numbers = all(isinstance(one, int | float) and abs(one) < LARGEST for one in (left, right))
        divides = isinstance(node.op, ast.Div | ast.FloorDiv)
        if compute is None or not numbers or (divides and right == 0):
            return self._unresolved(node)
        return compute(left, right)


def resolved(call: Call, path: Path) -> Iterator[tuple[str, Any]]:
    """The arguments of a call by name. Raises UserError for those of a `**` that only running can give."""
    for name, value in call.arguments.items():
        if name == "**":
            raise UserError(
                f"{path}:{call.line}: {call.name}: must have its arguments by name; {value.why}; write them there"
            )
        yield name, value
