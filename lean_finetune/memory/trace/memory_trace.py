"""What a training step holds in memory: every storage's birth and death, seen while the step runs on fake tensors.

A fake tensor has a shape and a type but no bytes. PyTorch's own autograd, checkpointing and reference counting decide
when its storage would be made and freed, so the trace is of the step itself and not of a description of it.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from lean_finetune.memory.trace.autograd_inplace import IN_PLACE, lone_uses, meant_in_place
from lean_finetune.step.batches import BatchShape

# What a byte can be for.
WEIGHTS = "weights"
QUANTISATION_STATE = "quantisation_state"
ADAPTERS = "adapters"
OPTIMIZER = "optimizer"
GRADIENTS = "gradients"
ACTIVATIONS = "activations"
ACTIVATION_GRADIENTS = "activation_gradients"
LOGITS = "logits"
INPUTS = "inputs"
UPDATE = "update"
WORKSPACE = "workspace"
SHARDING = "sharding"
"""What several GPUs need to share a run: gathered weights, buffers of what is sent."""
CATEGORIES = (
    WEIGHTS,
    QUANTISATION_STATE,
    ADAPTERS,
    OPTIMIZER,
    GRADIENTS,
    WORKSPACE,
    SHARDING,
    INPUTS,
    ACTIVATIONS,
    LOGITS,
    ACTIVATION_GRADIENTS,
    UPDATE,
)
"""All of them, from what is always there to what comes and goes."""

BORN_IN = {"forward": ACTIVATIONS, "backward": ACTIVATION_GRADIENTS, "clip": UPDATE, "optimizer": UPDATE}
"""Category of what an operation of a phase makes, unless something better is known."""

UNCOUNTED = -1
"""In place of a storage's number."""
ASK_DEVICE = torch.ops.prim.device.default

Workspace = Callable[..., int]
"""Bytes an operation needs inside, from its arguments; they never outlive it and its shape function hides them."""


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The most bytes held at one instant, and what they were."""

    bytes: int
    by_category: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class OpRules:
    """What a device does inside operations whose shape function hides it."""

    expansions: Mapping[Any, Callable[..., Any]] = field(default_factory=dict)
    """Operations whose kernel is itself written in torch operations: that function is traced in their place."""
    workspaces: Mapping[Any, Workspace] = field(default_factory=dict)
    """Bytes inside an operation, from its arguments."""


class MemoryTrace(TorchDispatchMode):
    """Follows storages while `recording`."""

    def __init__(self, *, granularity_bytes: int, rules: OpRules, vocab_size: int):
        """Start with nothing held.

        Args:
            granularity_bytes: the allocator rounds every block up to a multiple of this.
            rules: what operations hide.
            vocab_size: a tensor whose last dimension is this long is taken for logits.
        """
        super().__init__()
        lone_uses()  # Asked before anything is traced.
        self._granularity, self._rules, self._vocab_size = granularity_bytes, rules, vocab_size
        self._ids: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()
        self._live: dict[int, int] = {}
        self._categories: dict[int, str] = {}
        # (storage, bytes): positive when born, negative when freed. The timeline from which peaks are taken apart.
        self._events: list[tuple[int, int]] = []
        self._phase: str | None = None
        self._operation: Any = None
        self._module_depth = 0
        self._elsewhere = False
        self._making: str | None = None
        self._ends: weakref.WeakKeyDictionary[torch.UntypedStorage, weakref.finalize] = weakref.WeakKeyDictionary()
        self._peaks: dict[str, tuple[int, int]] = {}
        self.current_bytes = 0
        self.offloaded_peak_bytes = 0
        """The most that was away from the device at once, in host memory or in a file."""

    def hold(self, tensors: Iterable[torch.Tensor], category: str) -> None:
        """Count tensors that exist, or say better what counted ones are for."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage not in self._ids and tensor.device.type == "cpu":
                self._born(storage, category)
            if (storage_id := self._ids.get(storage, UNCOUNTED)) != UNCOUNTED:
                self._categories[storage_id] = category

    def leave_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Never count tensors, whatever is done with them."""
        for tensor in tensors:
            self._ids[tensor.untyped_storage()] = UNCOUNTED

    def hold_bytes(self, count: int, category: str) -> None:
        """Count bytes that are held from now on and belong to no tensor."""
        if count:
            self._add(count, category)

    def begin_run(self, model: nn.Module) -> None:
        """What exists before the first step is held; for traces that name the modules of the model."""

    def begin_micro_batch(self, shape: BatchShape) -> None:
        """The next micro-batch is about to be made: where a trace that is cut into units is cut."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name what happens inside: the step's Phase hook."""
        before, self._phase = self._phase, name
        self._note_peak()
        try:
            yield
        finally:
            self._phase = before

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """What is made inside is the host's, not the device's."""
        before, self._elsewhere = self._elsewhere, True
        try:
            yield
        finally:
            self._elsewhere = before

    @contextmanager
    def making(self, category: str) -> Iterator[None]:
        """What is made inside is of this category."""
        before, self._making = self._making, category
        try:
            yield
        finally:
            self._making = before

    def resized(self, storage: torch.UntypedStorage, category: str) -> None:
        """A storage was given back or taken anew where it is: all of it, in this category."""
        if (end := self._ends.get(storage)) is not None:
            end()
        self._born(storage, category)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Follow every operation inside; a FakeTensorMode must be active."""
        hooks = [
            register_module_forward_pre_hook(self._module_starts),
            register_module_forward_hook(self._module_ends, always_call=True),
        ]
        try:
            with self:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    @property
    def highest_bytes(self) -> int:
        """The highest peak so far."""
        return max((size for size, _ in self._peaks.values()), default=0)

    @property
    def events(self) -> Sequence[tuple[int, int]]:
        """(storage, bytes) so far: positive when it is made, negative when it is freed; storages count from 0."""
        return self._events

    def category(self, storage_id: int) -> str:
        """What a storage is for, as it is known by now."""
        return self._categories[storage_id]

    def peaks(self) -> dict[str, Peak]:
        """The peak of each phase, with the bytes of each category at that instant."""
        wanted = {index for _, index in self._peaks.values()}
        snapshots: dict[int, dict[str, int]] = {}
        held: defaultdict[str, int] = defaultdict(int)
        for index in range(len(self._events) + 1):
            if index in wanted:
                snapshots[index] = {category: size for category, size in sorted(held.items()) if size}
            if index < len(self._events):
                storage_id, change = self._events[index]
                held[self._categories[storage_id]] += change
        return {phase: Peak(bytes=size, by_category=snapshots[index]) for phase, (size, index) in self._peaks.items()}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here: PyTorch need not guard every operation against it."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Mapping | None = None) -> Any:
        """Run one operation and count what it makes."""
        if func is ASK_DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # Two thirds of all calls: answered here, they cost nothing.
        self._operation, kwargs = func, kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # It calls again with the parts that are here.
        if self._elsewhere:
            return func(*args, **kwargs)
        expansion = self._rules.expansions.get(func)
        if expansion is not None:
            with self:
                return expansion(*args, **kwargs)
        if func in IN_PLACE and self._phase == "backward":
            func = meant_in_place(func, args)
        out = func(*args, **kwargs)
        if isinstance(out, torch.Tensor):
            self._see(out)
        else:
            for value in tree_iter(out):
                if isinstance(value, torch.Tensor):
                    self._see(value)
        workspace = self._rules.workspaces.get(func)
        if workspace is not None and (count := workspace(*args, **kwargs)):
            self._remove(self._add(count, WORKSPACE))
        return out

    def _see(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage when it is new."""
        storage = tensor.untyped_storage()
        if storage in self._ids or tensor.device.type != "cpu":
            return
        if self._making is not None:
            category = self._making
        elif tensor.ndim and tensor.shape[-1] == self._vocab_size:
            category = LOGITS
        elif self._module_depth and self._phase == "backward":
            category = ACTIVATIONS  # Recomputed by checkpointing.
        else:
            category = BORN_IN.get(self._phase or "", INPUTS)
        self._born(storage, category)

    def _born(self, storage: torch.UntypedStorage, category: str) -> None:
        """Count a new storage until it dies."""
        if not storage.nbytes():
            return
        storage_id = self._add(storage.nbytes(), category)
        self._ids[storage] = storage_id
        self._ends[storage] = weakref.finalize(storage, self._remove, storage_id)
        self._ends[storage].atexit = False

    def _add(self, count: int, category: str) -> int:
        """Count a block of `count` bytes, rounded as the allocator does."""
        size = -(-count // self._granularity) * self._granularity
        storage_id = len(self._categories)
        self._live[storage_id], self._categories[storage_id] = size, category
        self._events.append((storage_id, size))
        self.current_bytes += size
        self._note_peak()
        return storage_id

    def _remove(self, storage_id: int) -> None:
        """A block is free again."""
        size = self._live.pop(storage_id)
        self._events.append((storage_id, -size))
        self.current_bytes -= size

    def _note_peak(self) -> None:
        """Keep the instant if the running phase never held as much."""
        if self._phase is None:  # Between two phases only the inputs grow; the next phase begins with them.
            return
        if self.current_bytes > self._peaks.get(self._phase, (-1, 0))[0]:
            self._peaks[self._phase] = (self.current_bytes, len(self._events))

    def _module_starts(self, module: nn.Module, args: Any) -> None:
        """A module's forward begins: in backward, that is recomputation."""
        self._module_depth += 1

    def _module_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        """A module's forward ended, also by the exception with which checkpointing stops early."""
        self._module_depth -= 1
