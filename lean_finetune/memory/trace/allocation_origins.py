"""A memory trace that also knows where every storage came from: the operation, its shape, the module that asked for it.

A module is named by its path. In the forward pass it is the innermost one that runs; in backward, the innermost one
whose forward pass made the node of the graph that runs, found by the node's sequence number.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd import _get_sequence_nr

from lean_finetune.memory.trace.memory_trace import WORKSPACE, MemoryTrace, OpRules
from lean_finetune.step.batches import BatchShape

NO_SEQUENCE = 2**64 - 1
"""What PyTorch gives nodes that stand for no forward operation: those that add up gradients."""
HELD = "held"
"""In place of an operation: the storage existed before the first step."""


ADAPTED = "base_model.model."
"""What peft puts before the path of every module it wraps; it tells nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Where a storage came from."""

    operation: str
    """The operation that made it, or HELD."""
    module: str
    """Path of the module it was made for; empty outside of any."""
    phase: str
    """Phase of the step; empty before the first one and between two."""
    shape: tuple[int, ...] | None
    """Of its first tensor; None where bytes belong to no tensor."""
    dtype: str | None


class OriginTrace(MemoryTrace):
    """Follows storages and remembers their origins."""

    def __init__(self, *, granularity_bytes: int, rules: OpRules, vocab_size: int):
        """Start with nothing held; see MemoryTrace."""
        super().__init__(granularity_bytes=granularity_bytes, rules=rules, vocab_size=vocab_size)
        self.origins: dict[int, Origin] = {}
        """Of every storage so far."""
        self.exact_bytes: list[int] = []
        """Of every storage so far, before rounding."""
        self.micro_batches: list[tuple[int, BatchShape]] = []
        """The number of events before each micro-batch, and its shape."""
        self.phases: list[tuple[int, int, str]] = []
        """The number of events before and at the end of each phase, and its name."""
        self._tensor: torch.Tensor | None = None
        self._names: dict[int, str] = {}
        self._running: list[str] = []
        # The innermost module from each sequence number on, by which backward's nodes are told apart.
        self._numbers: list[int] = []
        self._made_by: list[str] = []
        self._last = ""
        self._end: int | None = None

    @property
    def events(self) -> Sequence[tuple[int, int]]:
        """What happened until recording ended: not how model and optimizer are thrown away after it."""
        return self._events[: self._end]

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Follow every operation inside; a FakeTensorMode must be active."""
        with super().recording():
            yield
        self._end = len(self._events)

    def begin_run(self, model: nn.Module) -> None:
        """Name modules by their paths in the model, and say which of its parameters the storages held already are."""
        self._names = {id(module): path.removeprefix(ADAPTED) for path, module in model.named_modules()}
        for path, parameter in model.named_parameters():
            storage_id = self._ids.get(parameter.untyped_storage())
            if storage_id is not None:
                self.origins[storage_id] = Origin(
                    operation=HELD, module=path.removeprefix(ADAPTED).rpartition(".")[0], phase="", **_form(parameter)
                )

    def begin_micro_batch(self, shape: BatchShape) -> None:
        """Note where it begins."""
        self.micro_batches.append((len(self._events), shape))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name what happens inside, and note where it begins and ends."""
        start = len(self._events)
        with super().phase(name):
            yield
        self.phases.append((start, len(self._events), name))

    def hold(self, tensors: Iterable[torch.Tensor], category: str) -> None:
        """Count tensors that exist; see MemoryTrace."""
        for tensor in tensors:
            self._tensor = tensor
            super().hold((tensor,), category)
        self._tensor = None

    def _see(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        super()._see(tensor)
        self._tensor = None

    def _add(self, count: int, category: str) -> int:
        storage_id = super()._add(count, category)
        self.exact_bytes.append(count)
        operation = HELD if self._operation is None else self._operation.overloadpacket.__name__
        form = {"shape": None, "dtype": None} if self._tensor is None else _form(self._tensor)
        if category == WORKSPACE and operation != HELD:
            operation += " (inside)"
        self.origins[storage_id] = Origin(operation=operation, module=self._module(), phase=self._phase or "", **form)
        return storage_id

    def _module(self) -> str:
        """Path of the module that is at work."""
        if self._running:
            self._last = self._running[-1]
        elif self._phase == "backward":
            node = torch._C._current_autograd_node()
            number = NO_SEQUENCE if node is None else node._sequence_nr()
            # A gradient is added up by the module whose backward ran last.
            if number != NO_SEQUENCE:
                place = bisect_right(self._numbers, number) - 1
                self._last = self._made_by[place] if place >= 0 else ""
        else:
            self._last = ""
        return self._last

    def _module_starts(self, module: nn.Module, args: Any) -> None:
        super()._module_starts(module, args)
        # A module without a name of its own (a function wrapped by a library) works for the one around it.
        self._running.append(self._names.get(id(module), self._running[-1] if self._running else ""))
        self._note_owner()

    def _module_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        super()._module_ends(module, args, output)
        self._running.pop()
        self._note_owner()

    def _note_owner(self) -> None:
        """From here on, forward's nodes are of this module."""
        number, owner = _get_sequence_nr(), self._running[-1] if self._running else ""
        if self._numbers and self._numbers[-1] == number:
            self._made_by[-1] = owner
        else:
            self._numbers.append(number)
            self._made_by.append(owner)


def _form(tensor: torch.Tensor) -> dict[str, Any]:
    """Shape and type of a tensor."""
    return {"shape": tuple(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
