"""A memory trace that records the origin of every allocation: the operation, its shape, and the module it was made for.

A module is identified by its path. In the forward pass it is the innermost module that runs; in backward, the innermost
module whose forward pass created the autograd node that runs, found by the node's sequence number.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd import _get_sequence_nr

from lean_finetune.memory.trace.memory_trace import WORKSPACE, MemoryTrace, OpRules

NO_SEQUENCE = 2**64 - 1
"""Sequence number of autograd nodes that accumulate gradients: they stand for no forward operation."""
EXISTING = "existing"
"""Operation of storages that existed before the first step."""
PEFT_PREFIX = "base_model.model."
"""Prepended by peft to the path of every module it wraps."""
AllocationKind = tuple[Any, ...]
KIND_FIELDS = ("category", "operation", "module", "phase", "shape", "dtype")
"""Fields of an `AllocationKind`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Where a storage came from."""

    operation: str
    """The operation that created it, or EXISTING."""
    module: str
    """Path of the module it was created for; empty outside of any module."""
    phase: str
    """Phase of the step; empty before the first one and between two."""
    shape: tuple[int, ...] | None
    """Shape of its first tensor; None for bytes that belong to no tensor."""
    dtype: str | None


class OriginTrace(MemoryTrace):
    """Records the origin of every storage."""

    def __init__(self, *, granularity_bytes: int, rules: OpRules, vocab_size: int):
        super().__init__(granularity_bytes=granularity_bytes, rules=rules, vocab_size=vocab_size)
        self.origins: dict[int, Origin] = {}
        """By storage."""
        self._tensor: torch.Tensor | None = None
        self._names: dict[int, str] = {}
        self._running: list[str] = []
        # The innermost module from each sequence number on: identifies the module of a node in backward.
        self._numbers: list[int] = []
        self._made_by: list[str] = []
        self._last = ""

    def begin_steps(self, model: nn.Module) -> None:
        """Read the modules' paths, and name the modules of the parameters that are registered already."""
        self._names = {id(module): path.removeprefix(PEFT_PREFIX) for path, module in model.named_modules()}
        for path, parameter in model.named_parameters():
            storage_id = self._ids.get(parameter.untyped_storage())
            if storage_id is not None:
                module = path.removeprefix(PEFT_PREFIX).rpartition(".")[0]
                self.origins[storage_id] = Origin(operation=EXISTING, module=module, phase="", **_form(parameter))

    def register(self, tensors: Iterable[torch.Tensor], category: str) -> None:
        """See MemoryTrace."""
        for tensor in tensors:
            self._tensor = tensor
            super().register((tensor,), category)
        self._tensor = None

    def _count_tensor(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        super()._count_tensor(tensor)
        self._tensor = None

    def _add(self, count: int, category: str) -> int:
        storage_id = super()._add(count, category)
        operation = EXISTING if self._operation is None else self._operation.overloadpacket.__name__
        form = {"shape": None, "dtype": None} if self._tensor is None else _form(self._tensor)
        if category == WORKSPACE and operation != EXISTING:
            operation += " (inside)"
        self.origins[storage_id] = Origin(operation=operation, module=self._module(), phase=self._phase or "", **form)
        return storage_id

    def described(self, storage_id: int) -> tuple[Any, ...]:
        """See MemoryTrace."""
        return (*super().described(storage_id), self.origins[storage_id])

    def add_like(self, storage_id: int) -> int:
        """See MemoryTrace."""
        new = super().add_like(storage_id)
        self.origins[new] = self.origins[storage_id]
        return new

    def kind(self, storage_id: int) -> AllocationKind:
        """Category and origin of a storage, as `KIND_FIELDS`; layers' numbers in the module's path become *."""
        origin = self.origins[storage_id]
        module = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", origin.module)
        return (self.category(storage_id), origin.operation, module, origin.phase, origin.shape, origin.dtype)

    def _module(self) -> str:
        """Path of the running module."""
        if self._running:
            self._last = self._running[-1]
        elif self._phase == "backward":
            node = torch._C._current_autograd_node()
            number = NO_SEQUENCE if node is None else node._sequence_nr()
            # A gradient is accumulated for the module whose backward ran last.
            if number != NO_SEQUENCE:
                place = bisect_right(self._numbers, number) - 1
                self._last = self._made_by[place] if place >= 0 else ""
        else:
            self._last = ""
        return self._last

    def _module_starts(self, module: nn.Module, args: Any) -> None:
        super()._module_starts(module, args)
        # A module that the model does not name (a function wrapped by a library) runs for the one around it.
        self._running.append(self._names.get(id(module), self._running[-1] if self._running else ""))
        self._note_owner()

    def _module_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        super()._module_ends(module, args, output)
        self._running.pop()
        self._note_owner()

    def _note_owner(self) -> None:
        """Nodes created from here on belong to the innermost running module."""
        number, owner = _get_sequence_nr(), self._running[-1] if self._running else ""
        if self._numbers and self._numbers[-1] == number:
            self._made_by[-1] = owner
        else:
            self._numbers.append(number)
            self._made_by.append(owner)


def _form(tensor: torch.Tensor) -> dict[str, Any]:
    """Shape and type of a tensor."""
    return {"shape": tuple(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
