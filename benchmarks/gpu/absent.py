"""Lets the measured code be imported on a machine that lacks libraries it names and does not need there.

A borrowed GPU often has PyTorch and little else. `pydantic` checks params.yaml, which this benchmark does not read;
`bitsandbytes` is needed by configurations that are skipped, with that reason, where it is absent.
"""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

NAMES = {
    "pydantic": ("pydantic",),
    "bitsandbytes": (
        "bitsandbytes",
        "bitsandbytes.nn",
        "bitsandbytes.optim",
        "bitsandbytes.functional",
        "bitsandbytes.backends",
        "bitsandbytes.backends.cpu",
        "bitsandbytes.backends.cpu.ops",
        "bitsandbytes.backends.default",
        "bitsandbytes.backends.default.ops",
    ),
}


def is_absent(library: str) -> bool:
    """Whether a library is not installed."""
    return importlib.util.find_spec(library) is None


@contextmanager
def imports_without_absent() -> Iterator[None]:
    """Imports inside find empty classes in place of what an absent library has.

    Afterwards other libraries see again that it is absent.
    """
    placed = [name for library, names in NAMES.items() if is_absent(library) for name in names]
    before = {name: sys.modules[name] for name in placed if name in sys.modules}
    for name in placed:
        sys.modules[name] = _Empty(name)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, sys.modules[name])
    try:
        yield
    finally:
        for name in placed:
            del sys.modules[name]
        sys.modules.update(before)


class _Empty(ModuleType):
    """A module that has a class of every public name."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        made = type(name, (_Inert,), {})
        setattr(self, name, made)
        return made


class _Inert:
    """Takes any arguments and does nothing; as a decorator it leaves what it decorates."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __call__(self, decorated: Any) -> Any:
        return decorated
