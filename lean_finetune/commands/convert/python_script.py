"""Read a Python script or a notebook without running it: the values with which it calls classes of training tools.

Statements are followed in order, and names have the values of the assignments above. A value that only running can give
is `Unresolved`, with its line: also one that is set in a condition, a loop or a function.
"""

import ast
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lean_finetune.commands.convert.notebook_cells import NOTEBOOK, Cell, cells_of
from lean_finetune.commands.convert.shell_script import Unresolved
from lean_finetune.core.errors import UserError, shortened
from lean_finetune.core.read_yaml import MOST_BYTES

NATIVE_BF16 = ("is_bfloat16_supported", "is_bf16_supported")
"""Functions that say whether the GPU has bf16: `auto` here."""
BY_DEVICE = ({"bfloat16", "float16"}, {True, False})
"""Values of which the GPU decides one: `auto` too."""
OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
LARGEST = 10**12
"""The largest number that is computed."""


@dataclass(kw_only=True, eq=False)
class Call:
    """A call with its arguments, those of `**` and those that are set later too. Positional ones have their numbers."""

    name: str
    """The last name: `SFTConfig`, or `from_pretrained`."""
    owner: str
    """What stands before it: `FastLanguageModel`; empty if nothing does."""
    of: Any
    """The value of what stands before it."""
    line: int | str
    arguments: dict[str, Any]
    """`**` has one of which only running gives the names."""


def calls_of(path: Path, text: str) -> list[Call]:
    """All calls of a script or notebook, in the order in which they end.

    Raises:
        UserError: it cannot be read as Python, or has more than `MOST_BYTES`.
    """
    cells = cells_of(path, text) if path.suffix == NOTEBOOK else [Cell(code=text)]
    if sum(len(cell.code) for cell in cells) > MOST_BYTES:
        raise UserError(f"{path}: must have at most {MOST_BYTES} bytes of code; name another file")
    reader = _Reader()
    for cell in cells:
        reader.cell = cell
        try:
            reader.follow(ast.parse(cell.code).body)
        except SyntaxError as error:
            if cell.may_be_left_out:
                continue
            line = cell.line(error.lineno or 1)
            raise UserError(f"{path}:{line}: must be Python ({error.msg}); name another file") from None
        except (ValueError, RecursionError, MemoryError) as error:
            raise UserError(f"{path}: must be Python that can be read ({type(error).__name__}); name another") from None
    return reader.calls


@dataclass(kw_only=True)
class _Reader:
    """Follows statements with the names that are known."""

    names: dict[str, Any] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    cell: Cell = field(default_factory=lambda: Cell(code=""))
    why: str = ""
    """Why what is set here is not known: `is set in a loop`; empty where statements run once, in order."""

    def follow(self, body: Sequence[ast.stmt]) -> None:
        """Go through statements in order."""
        for statement in body:
            match statement:
                case ast.Assign(targets=targets, value=value):
                    self._assign_all(targets, self.value(value))
                case ast.AnnAssign(target=target, value=ast.expr() as value):
                    self._assign_all([target], self.value(value))
                case ast.AugAssign(target=target, op=op, value=value):
                    both = ast.copy_location(ast.BinOp(left=_read(target), op=op, right=value), statement)
                    self._assign_all([target], self.value(both))
                case ast.If():
                    self._branch(statement)
                case ast.For(target=target, iter=values) | ast.AsyncFor(target=target, iter=values):
                    self.value(values)
                    with self._apart(statement, "is set in a loop"):
                        self._forget(target)
                        self.follow([*statement.body, *statement.orelse])
                case ast.While(test=test):
                    with self._apart(statement, "is set in a loop"):
                        self.value(test)
                        self.follow([*statement.body, *statement.orelse])
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    self._definition(statement)
                case ast.With(items=items) | ast.AsyncWith(items=items):
                    for item in items:
                        self.value(item.context_expr)
                        if item.optional_vars is not None:
                            self._forget(item.optional_vars)
                    self.follow(statement.body)
                case ast.Try() | ast.TryStar():
                    self.follow(statement.body)
                    with self._apart(statement, "is set where an error is handled"):
                        for handler in statement.handlers:
                            self.follow(handler.body)
                    self.follow([*statement.orelse, *statement.finalbody])
                case ast.Match(subject=subject, cases=cases):
                    self.value(subject)
                    with self._apart(statement, "is set in a condition"):
                        for one in cases:
                            self.follow(one.body)
                case ast.Import(names=imported) | ast.ImportFrom(names=imported):
                    for alias in imported:
                        self.names.pop((alias.asname or alias.name).partition(".")[0], None)
                case _:
                    for child in ast.iter_child_nodes(statement):
                        if isinstance(child, ast.expr):
                            self.value(child)

    def _branch(self, statement: ast.If) -> None:
        """The branch that is taken; if that is not known, both, and what either sets is not known."""
        test = self.value(statement.test)
        main = isinstance(statement.test, ast.Compare) and ast.unparse(statement.test.left) == "__name__"
        if main or isinstance(test, bool):
            self.follow(statement.body if main or test else statement.orelse)
            return
        with self._apart(statement, "is set in a condition"):
            self.follow([*statement.body, *statement.orelse])

    @contextmanager
    def _apart(self, statement: ast.stmt, why: str) -> Iterator[None]:
        """Statements that may run or not, or several times: what they set is not known behind them."""
        before, outer = dict(self.names), self.why
        self.why = self.why or why
        yield
        self.why = outer
        for name, value in self.names.items():
            if (name not in before or before[name] is not value) and not isinstance(value, Unresolved):
                self.names[name] = Unresolved(name, self._line(statement), f"{name} {why}")

    def _definition(self, statement: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        """The body of a function or class, whose arguments are not known, and whose names are its own."""
        before, outer = dict(self.names), self.why
        if not isinstance(statement, ast.ClassDef):
            for argument in ast.walk(statement.args):
                if isinstance(argument, ast.arg):
                    self.names[argument.arg] = Unresolved(
                        argument.arg, self._line(argument), f"{argument.arg} is an argument of {statement.name}"
                    )
        self.follow(statement.body)
        outside = {
            name for node in ast.walk(statement) if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names
        }
        self.names, self.why = before, outer
        for name in (*outside, statement.name):
            self.names[name] = Unresolved(name, self._line(statement), f"{name} is set in a function")

    def _line(self, node: ast.stmt | ast.expr | ast.arg) -> int | str:
        return self.cell.line(node.lineno)

    def _assign_all(self, targets: Sequence[ast.expr], value: Any) -> None:
        for target in targets:
            self._assign(target, value)

    def _assign(self, target: ast.expr, value: Any) -> None:
        match target:
            case ast.Name(id=name):
                self.names[name] = value
            case ast.Attribute(value=base, attr=name):
                self._set(self.value(base), name, value, target)
            case ast.Subscript(value=base, slice=key):
                self._set(self.value(base), self.value(key), value, target)
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                values = value if isinstance(value, list) and len(value) == len(parts) else None
                for number, one in enumerate(parts):
                    self._assign(one, value if values is None else values[number])
            case ast.Starred(value=inner):
                self._forget(inner)

    def _set(self, owner: Any, name: Any, value: Any, target: ast.expr) -> None:
        """Set a value of an object or a dictionary; where that may not happen, it is not known."""
        known = isinstance(name, str) and not isinstance(name, Unresolved)
        if self.why:
            value = Unresolved(str(name), self._line(target), f"{ast.unparse(target)} {self.why}")
        if isinstance(owner, Call | dict):
            values = owner.arguments if isinstance(owner, Call) else owner
            values[name if known else "**"] = value if known else self._unresolved(target)
        if name == "requires_grad":  # Of a weight in a loop over weights.
            self.calls.append(Call(name="requires_grad", owner="", of=owner, line=self._line(target), arguments={}))

    def _forget(self, target: ast.expr) -> None:
        for node in ast.walk(target):
            if isinstance(node, ast.Name):
                self.names[node.id] = Unresolved(node.id, self._line(node), f"{node.id} {self.why or 'is not known'}")

    def value(self, node: ast.expr) -> Any:
        """The value of an expression: a literal, a list, a dictionary, a `Call`, or `Unresolved`."""
        match node:
            case ast.Constant(value=str() | int() | float() | None as value):
                return value
            case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts) if not _starred(parts):
                return [self.value(part) for part in parts]
            case ast.Dict():
                return self._dictionary(node)
            case ast.Name(id=name):
                return self.names.get(name, self._unresolved(node))
            case ast.Attribute():
                return self._attribute(node)
            case ast.Call():
                return self._call(node)
            case ast.UnaryOp(op=op, operand=operand):
                return self._unary(op, self.value(operand), node)
            case ast.BinOp():
                return self._number(node)
            case ast.NamedExpr(target=target, value=inner):
                value = self.value(inner)
                self._assign(target, value)
                return value
            case ast.IfExp():
                return self._choice(node)
            case ast.Lambda(body=body):
                self.value(body)
                return self._unresolved(node)
        for child in ast.iter_child_nodes(node):  # For the calls inside.
            if isinstance(child, ast.expr):
                self.value(child)
        return self._unresolved(node)

    def _unresolved(self, node: ast.expr) -> Unresolved:
        text = shortened(ast.unparse(node))
        return Unresolved(text, self._line(node), f"{text} is known only while the script runs")

    def _dictionary(self, node: ast.Dict) -> Any:
        found: dict[str, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            known, name = self.value(value), None if key is None else self.value(key)
            if key is None and isinstance(known, dict):
                found |= known
            elif isinstance(name, str) and not isinstance(name, Unresolved):
                found[name] = known
            else:
                found["**"] = self._unresolved(node)
        return found

    def _attribute(self, node: ast.Attribute) -> Any:
        """A type of torch by its name, or a value of an object."""
        if isinstance(node.value, ast.Name) and node.value.id == "torch":
            return node.attr
        base = self.value(node.value)
        if isinstance(base, Call) and node.attr in base.arguments:
            return base.arguments[node.attr]
        return self._unresolved(node)

    def _call(self, node: ast.Call) -> Any:
        function, owner, base = node.func, "", None
        if isinstance(function, ast.Attribute):
            base = self.value(function.value)
            name, owner = function.attr, ast.unparse(function.value).rpartition(".")[2]
        else:
            name = function.id if isinstance(function, ast.Name) else ""
        arguments = self._arguments(node)
        if name == "dict" and not node.args:
            return arguments
        if name in NATIVE_BF16:
            return "auto"
        self._change(base, name, node)
        call = Call(name=name, owner=shortened(owner), of=base, line=self._line(node), arguments=arguments)
        self.calls.append(call)
        return call

    def _arguments(self, node: ast.Call) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for number, one in enumerate(node.args):
            found["**" if isinstance(one, ast.Starred) else str(number)] = self.value(one)
        for keyword in node.keywords:
            value = self.value(keyword.value)
            if keyword.arg is not None:
                found[keyword.arg] = value
            elif isinstance(value, dict):
                found |= value
            else:
                found["**"] = value if isinstance(value, Unresolved) else self._unresolved(keyword.value)
        return found

    def _change(self, base: Any, name: str, node: ast.Call) -> None:
        """Note that a method may change a list, a dictionary or a configuration, or that `setattr` does."""
        if name == "setattr" and len(node.args) == 3:
            self._set(self.value(node.args[0]), self.value(node.args[1]), self.value(node.args[2]), node)
        elif isinstance(base, dict):
            base["**"] = self._unresolved(node)
        elif isinstance(base, list):
            base.append(self._unresolved(node))
        elif isinstance(base, Call) and base.name.endswith(("Config", "Arguments")) and name.startswith("set"):
            base.arguments["**"] = self._unresolved(node)

    def _unary(self, op: ast.unaryop, value: Any, node: ast.expr) -> Any:
        if isinstance(op, ast.Not) and (isinstance(value, bool) or value == "auto"):
            return value if value == "auto" else not value
        if isinstance(op, ast.USub) and isinstance(value, int | float):
            return -value
        return self._unresolved(node)

    def _choice(self, node: ast.IfExp) -> Any:
        test, one, other = self.value(node.test), self.value(node.body), self.value(node.orelse)
        if isinstance(test, bool):
            return one if test else other
        of_device = test == "auto" and all(isinstance(value, str | bool) for value in (one, other))
        return "auto" if of_device and {one, other} in BY_DEVICE else self._unresolved(node)

    def _number(self, node: ast.BinOp) -> Any:
        left, right, compute = self.value(node.left), self.value(node.right), OPERATORS.get(type(node.op))
        numbers = all(isinstance(one, int | float) and abs(one) < LARGEST for one in (left, right))
        divides = isinstance(node.op, ast.Div | ast.FloorDiv)
        if compute is None or not numbers or (divides and right == 0):
            return self._unresolved(node)
        return compute(left, right)


def _starred(parts: Sequence[ast.expr]) -> bool:
    return any(isinstance(part, ast.Starred) for part in parts)


def _read(target: ast.expr) -> ast.expr:
    """The target of an assignment as a value."""
    return ast.parse(ast.unparse(target), mode="eval").body


def resolved(call: Call, path: Path, positions: Sequence[str] = ()) -> dict[str, Any]:
    """The arguments of a call by name; `positions` are the names of the first ones.

    Raises:
        UserError: one has no name that can be known.
    """
    found: dict[str, Any] = {}
    for name, value in call.arguments.items():
        if name == "**" or (name.isdigit() and int(name) >= len(positions)):
            why = value.why if isinstance(value, Unresolved) else f"got argument {name} by its position"
            raise UserError(
                f"{path}:{call.line}: {call.name}: must have its arguments by name; {why}; write them there"
            )
        found[positions[int(name)] if name.isdigit() else name] = value
    return found
