"""Import PyTorch's libraries in half the time, for a process that only predicts.

Most of the time goes to PyTorch's compiler. A prediction compiles nothing, yet bitsandbytes compiles functions while it
is imported, and transformers and PyTorch mark functions for the compiler; each of them loads it. transformers also
reads all files of its models, twice.
"""

import gc
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from lean_finetune.patches.of_imports import COMPILE, COMPILER_UNLOADED, LIST_OF_MODELS

COMPILER = "torch._dynamo"


@contextmanager
def importing_without_compiler() -> Iterator[None]:
    """A context for imports; afterwards `torch.compile` returns functions as they are.

    The compiler is loaded all the same when code needs more of it. Without effect if PyTorch is imported already: then
    the process may do more than predict.
    """
    if "torch" in sys.modules:
        yield
        return
    gc.disable()  # Nothing that imports make is garbage, and looking for it takes a fifth of their time.
    try:
        COMPILE.for_good(_unchanged)
        if COMPILER not in sys.modules and (spec := find_spec(COMPILER)) is not None:
            sys.modules[COMPILER] = _Unloaded(spec)
            COMPILER_UNLOADED.for_good(sys.modules[COMPILER])
        found = modules_of_models()
        with LIST_OF_MODELS.during(lambda path: found):
            importlib.import_module("transformers.models")
        yield
    finally:
        gc.freeze()
        gc.enable()


def modules_of_models() -> dict[frozenset[str], dict[str, set[str]]]:
    """Names in the modules of transformers.models, from the list that transformers made of them for itself."""
    import transformers
    from transformers.utils.import_utils import define_import_structure

    prefix = "models."
    known = define_import_structure(Path(transformers.__file__).parent / "models", prefix="models")  # It is cached.
    return {
        needs: {name.removeprefix(prefix): found for name, found in modules.items() if name.startswith(prefix)}
        for needs, modules in known.items()
    }


def _unchanged(function: Callable[..., Any] | None = None, *args: Any, **options: Any) -> Any:
    """A function as it is, or a decorator that leaves it so."""
    return (lambda decorated: decorated) if function is None else function


MARKS: dict[str, Any] = {
    **dict.fromkeys(("allow_in_graph", "assume_constant_result", "disable", "disallow_in_graph"), _unchanged),
    "graph_break": lambda *args, **options: None,
    "trace_rules": SimpleNamespace(clear_lru_cache=lambda: None),
}
"""What concerns only code that is compiled."""
ALONE = ("callback", "config")
"""Modules of the compiler that are read without it."""


class _Unloaded(ModuleType):
    """The compiler's package before its `__init__` runs: its modules can be imported, and it has its marks."""

    def __init__(self, spec: ModuleSpec):
        super().__init__(spec.name)
        self.__spec__, self.__file__, self.__path__ = spec, spec.origin, spec.submodule_search_locations or []
        vars(self).update(MARKS)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # The inspect module reads them of all modules.
            raise AttributeError(name)
        if name in ALONE:
            return importlib.import_module(f"{COMPILER}.{name}")
        spec = self.__spec__
        assert spec is not None and spec.loader is not None
        self.__class__ = ModuleType  # type: ignore[assignment] # As importlib.util.LazyLoader does.
        for mark in MARKS:
            delattr(self, mark)
        spec.loader.exec_module(self)
        return getattr(self, name)
