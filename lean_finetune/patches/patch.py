"""A named replacement of another package's code. `of_models`, `of_traces` and `of_imports` list all of them.

Nobody else assigns to attributes of other packages, to `__class__` or to a module's `forward`: tests/test_patches.py
checks it, and that everything that is replaced exists.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from types import ModuleType
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Patch:
    """Code of other packages that is replaced here. Callers give what replaces it."""

    replaces: tuple[str, ...]
    """`module:name`, `module:class.name` or `module`: they must exist where their package is installed."""
    why: str
    until: str
    """What must happen so that it can be removed."""

    @contextmanager
    def during(self, *values: Any) -> Iterator[None]:
        """A context in which everything that is replaced is one of `values`, in the same order.

        What belongs to a package that cannot be imported is left out.
        """
        with ExitStack() as stack:
            for target, value in zip(self.replaces, values, strict=True):
                if has_package(target):
                    owner, name = owner_of(target)
                    stack.enter_context(replaced(owner, name, value))
            yield

    @contextmanager
    def importing(self, module: ModuleType) -> Iterator[None]:
        """A context in which imports of the module that is replaced, which was not imported yet, find another one."""
        (name,) = self.replaces
        sys.modules[name] = module
        try:
            yield
        finally:
            del sys.modules[name]

    def originals(self) -> list[Any]:
        """What is there now."""
        return [getattr(*owner_of(target)) for target in self.replaces]

    def for_good(self, value: Any) -> None:
        """Replace the only thing until the process ends."""
        (target,) = self.replaces
        owner, name = owner_of(target)
        setattr(owner, name, value)

    def give_class(self, instance: Any, kind: type) -> None:
        """Make an instance of a replaced class one of `kind`, which derives from it."""
        self._check(kind)
        instance.__class__ = kind

    def give_part(self, owner: Any, name: str, part: Any) -> None:
        """Replace a part of a module by an instance of a class that derives from a replaced one."""
        self._check(type(part))
        setattr(owner, name, part)

    def _check(self, kind: type) -> None:
        assert {f"{base.__module__}:{base.__qualname__}" for base in kind.__mro__} & {*self.replaces}, kind

    def give_method(self, instance: Any, method: Any) -> None:
        """Replace the method that the patch names, of an instance alone."""
        setattr(instance, self.replaces[0].rpartition(".")[2], method)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """A context in which an attribute of an object, a class or a module has another value."""
    own = name in vars(owner)  # Else it is inherited, and comes back when the other value goes.
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def has_package(target: str) -> bool:
    """Whether the package of something that a patch replaces can be imported."""
    try:
        import_module(target.partition(":")[0].partition(".")[0])
    except ImportError:
        return False
    return True


def owner_of(target: str) -> tuple[Any, str]:
    """The module or class that has what a patch replaces, and its name there."""
    module, _, path = target.partition(":")
    *owners, name = path.split(".")
    return reduce(getattr, owners, import_module(module)), name
