"""Patches of other packages: what they replace exists, each is used, and nothing is replaced beside them."""

import ast
import sys
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from lean_finetune.patches import of_imports, of_models, of_traces
from lean_finetune.patches.patch import Patch, has_package, owner_of, replaced
from tests.conftest import ROOT

PATCHES = {
    f"{module.__name__.rpartition('.')[2]}.{name}": value
    for module in (of_imports, of_models, of_traces)
    for name, value in vars(module).items()
    if isinstance(value, Patch)
}
HOME = ROOT / "lean_finetune/patches"
OWN = {"cuda_memory", "lean_finetune", "stages"}
METHODS = ("__class__", "forward")
"""Attributes that only patches set, of any object."""
SETTINGS = {("core/progress.py", "tqdm.monitor_interval")}
"""Attributes of other packages that are made to be set."""


@pytest.mark.filterwarnings("ignore:Triton is not supported:UserWarning")  # fla on a machine without a GPU.
@pytest.mark.parametrize("name", PATCHES)
def test_what_a_patch_replaces_exists(name: str):
    """A release that renames or moves it: the patch replaces nothing, and memory or gradients are others."""
    targets = [target for target in PATCHES[name].replaces if has_package(target)]
    if not targets:
        pytest.skip(f"{PATCHES[name].replaces[0]} is in a package that is not installed")
    for target in targets:
        if ":" in target:
            owner, last = owner_of(target)
            assert hasattr(owner, last), f"{name}: {target} is gone"
        else:
            assert find_spec(target) is not None, f"{name}: {target} is gone"


def test_each_patch_is_used():
    """A patch that nothing makes any more reads as if it were needed."""
    sources = {path: path.read_text() for path in (ROOT / "lean_finetune").rglob("*.py")}
    unused = []
    for name in PATCHES:
        last = name.rpartition(".")[2]
        uses = sum(source.count(last) for source in sources.values())
        definitions = sources[HOME / f"{name.partition('.')[0]}.py"].count(f"\n{last} = Patch(")
        unused += [name] if uses <= definitions else []
    assert unused == []


def test_only_patches_replace_code_of_other_packages():
    """A replacement that is in no list is found when a release breaks it, and nobody knows whether it is needed."""
    found = {}
    for package in sorted(OWN):
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.parent != HOME and "build" not in path.parts:
                name = path.relative_to(ROOT / package).as_posix()
                if lines := [line for line in replacements(path.read_text()) if (name, line) not in SETTINGS]:
                    found[name] = lines
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.compile = f",
        "from transformers import masking_utils as m\nold, m.find = m.find, f",
        "from peft import A\nkind: Any = A\nkind.__init__ = f",
        "import torch\ndel torch.nn.Module.forward",
        "module.forward = f",
        "module.__class__ = Other",
        "setattr(module, 'forward', f)",
        "from torch import nn\nsetattr(nn, name, f)",
        "from torch import nn\nwith replaced(nn, 'Linear', f): pass",
        "from unittest.mock import patch",
    ],
)
def test_a_replacement_is_found(source: str):
    assert len(list(replacements(source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos.environ['A'] = 'b'",
        "from lean_finetune import a\na.b = 1",
        "self.__class__ = A",
        "layer.weight = w",
        "setattr(owner, name, None)",
    ],
)
def test_what_replaces_no_code_is_left_alone(source: str):
    assert list(replacements(source)) == []


class Base:
    """Has what tests replace."""

    @staticmethod
    def own() -> str:
        return "own"


class Derived(Base):
    """Inherits it."""


@pytest.mark.parametrize("owner", [Base, Derived])
def test_a_context_restores_what_was_there(owner: type[Base]):
    """A replacement that stays, or an inherited method that becomes a class's own, and static methods that bind."""
    before = dict(vars(owner))
    with pytest.raises(KeyError), replaced(owner, "own", staticmethod(lambda: "other")):
        assert owner.own() == owner().own() == "other"
        raise KeyError
    assert dict(vars(owner)) == before and owner().own() == "own"


def test_a_class_that_derives_from_nothing_replaced_is_refused():
    """A patch that says one class and changes another."""
    patch = Patch(replaces=(f"{__name__}:Derived",), why="", until="")
    instance = Derived()
    with pytest.raises(AssertionError):
        patch.give_class(instance, Base)
    patch.give_class(instance, type("Other", (Derived,), {}))
    assert type(instance).__name__ == "Other"


def replacements(source: str) -> Iterator[str]:
    """What the statements of a module assign to attributes of other packages, or to `METHODS`."""
    tree = ast.parse(source)
    others = foreign_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign | ast.AugAssign):
            targets = [node.target]
        elif isinstance(node, ast.ImportFrom) and node.module == "unittest.mock":
            yield "unittest.mock"
            continue
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and sets_attribute(node):
            if root(node.args[0]) in others or (
                isinstance(node.args[1], ast.Constant) and node.args[1].value in METHODS
            ):
                yield ast.unparse(node)
            continue
        else:
            continue
        for target in targets:
            for each in target.elts if isinstance(target, ast.Tuple | ast.List) else [target]:
                if isinstance(each, ast.Attribute) and (
                    root(each) in others or (each.attr in METHODS and root(each) != "self")
                ):
                    yield ast.unparse(each)


def sets_attribute(call: ast.Call) -> bool:
    """Whether a call names an object and an attribute that gets another value."""
    return isinstance(call.func, ast.Name) and call.func.id in ("setattr", "delattr", "replaced")


def foreign_names(tree: ast.Module) -> set[str]:
    """Names of a module that stand for something of other packages than ours and Python's."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {(one.asname or one.name).partition(".")[0] for one in node.names if is_foreign(one.name)}
        elif isinstance(node, ast.ImportFrom) and node.module and is_foreign(node.module):
            found |= {one.asname or one.name for one in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Name | ast.Attribute):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {one.id for one in targets if isinstance(one, ast.Name) and root(node.value) in found}
    return found


def is_foreign(module: str) -> bool:
    """Whether a module belongs to another package."""
    return module.partition(".")[0] not in {*sys.stdlib_module_names, *OWN}


def root(node: ast.expr) -> str | None:
    """`a` of `a.b.c`; None for other expressions."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None
