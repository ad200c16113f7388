"""Count every allocation and free of a step by category, and remember where each came from."""

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
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_iter

from lean_finetune.memory.trace.cached_fake_mode import (
    IN_PLACE,
    MISSING,
    CachedFakeMode,
    in_place_version,
    sole_owner_uses,
)
from lean_finetune.step.batches import BatchShape

# Record every allocation and release of memory while a step runs on fake tensors.
#
# A fake tensor has a shape and a type but no bytes. PyTorch's own autograd, checkpointing and reference counting
# decide when its storage is created and freed, so the trace follows the real step, not a model of it.

# Categories of memory.
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
"""Gathered weights and communication buffers of runs on several GPUs."""
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
"""All categories, from the most persistent to the most temporary."""

DEFAULT_CATEGORIES = {"forward": ACTIVATIONS, "backward": ACTIVATION_GRADIENTS, "clip": UPDATE, "optimizer": UPDATE}
"""Category of a tensor by the phase that creates it, unless something better is known."""

IGNORED = -1
"""Stands for the number of an ignored storage."""
DEVICE_OF = torch.ops.prim.device.default
OUTSIDE_OF_BACKWARD = -1
"""torch._C._current_graph_task_id where autograd's thread does not run."""

Workspace = Callable[..., int | Sequence[int]]
"""Bytes that an operation allocates temporarily inside its kernel, from its arguments: one block or several."""


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Highest memory use, and its categories at that instant."""

    bytes: int
    by_category: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class OpRules:
    """Memory that a device uses inside operations, which fake tensors do not show."""

    expansions: Mapping[Any, Callable[..., Any]] = field(default_factory=dict)
    """Operations whose kernel is written in torch operations: the function that is traced instead."""
    workspaces: Mapping[Any, Workspace] = field(default_factory=dict)
    """Temporary bytes inside an operation, from its arguments."""
    workspaces_first: Mapping[Any, Workspace] = field(default_factory=dict)
    """The same, allocated before the results."""
    products: Mapping[Any, Callable[..., bool]] = field(default_factory=dict)
    """Operations that multiply matrices by cuBLAS: whether they add a bias, from their arguments."""


class MemoryTrace(TorchDispatchMode):
    """Counts storages while `recording`."""

    def __init__(self, *, granularity_bytes: int, rules: OpRules, vocab_size: int):
        """An empty trace.

        Args:
            granularity_bytes: the allocator rounds every block up to a multiple of this.
            rules: memory inside operations.
            vocab_size: tensors whose last dimension has this size are logits.
        """
        super().__init__()
        sole_owner_uses()  # Measured before anything is traced.
        self._granularity, self._rules, self._vocab_size = granularity_bytes, rules, vocab_size
        self._ids: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()
        self._live: dict[int, int] = {}
        self._categories: dict[int, str] = {}
        # (storage, bytes): positive for an allocation, negative for a release.
        self._events: list[tuple[int, int]] = []
        self._phase: str | None = None
        self._operation: Any = None
        self._module_depth = 0
        self._on_host = False
        self._stream = 0
        self._allocating_as: str | None = None
        self._ends: weakref.WeakKeyDictionary[torch.UntypedStorage, weakref.finalize] = weakref.WeakKeyDictionary()
        self._peaks: dict[str, tuple[int, int]] = {}
        self.current_bytes = 0
        self.offloaded_peak_bytes = 0
        """Peak of bytes offloaded to host memory or to a file."""
        self.exact_bytes: list[int] = []
        """By storage: its size before rounding."""
        self.streams: list[int] = []
        """By storage: the stream on which it was allocated; 0 is the one that computes."""
        self.operations: list[Any] = []
        """By storage: the operation that created it; None if it existed before the first step."""
        self.micro_batches: list[tuple[int, BatchShape]] = []
        """Number of events before each micro-batch, and its shape."""
        self.phases: list[tuple[int, int, str]] = []
        """Number of events before and at the end of each phase, and its name."""
        self._end: int | None = None
        self._matmul_workspaces: list[int] = []
        self._bias_workspace_bytes = 0
        self._biased: set[bool] = set()
        self.first_products: dict[int, int] = {}
        """By storage of a workspace of matmuls: number of events before the first product that uses it."""

    def register(self, tensors: Iterable[torch.Tensor], category: str) -> None:
        """Count existing tensors, or set the category of tensors that are counted already."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage not in self._ids and tensor.device.type == "cpu":
                self._add_storage(storage, category)
            if (storage_id := self._ids.get(storage, IGNORED)) != IGNORED:
                self._categories[storage_id] = category

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Never count these tensors."""
        for tensor in tensors:
            self._ids[tensor.untyped_storage()] = IGNORED

    def register_bytes(self, count: int, category: str) -> None:
        """Count bytes that are in use from now on and belong to no tensor."""
        if count:
            self._add(count, category)

    def register_matmul_workspaces(self, count: int, bias_count: int) -> None:
        """Count the workspaces of two threads, that of forward and autograd's: `count` bytes together, from now on.

        A thread has `bias_count` more from its first product with a bias on.
        """
        if count:
            self._matmul_workspaces = [self._add(count // 2, WORKSPACE) for _ in range(2)]
            self._bias_workspace_bytes = bias_count

    def begin_steps(self, model: nn.Module) -> None:
        """Called when everything that exists before the first step is registered."""

    def begin_micro_batch(self, shape: BatchShape) -> None:
        """Called before a micro-batch is created: records where it begins."""
        self.micro_batches.append((len(self._events), shape))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name the phase of the block, and record where it begins and ends: the step's `phase` hook."""
        before, self._phase = self._phase, name
        start = len(self._events)
        self._update_peak()
        try:
            yield
        finally:
            self._phase = before
        self.phases.append((start, len(self._events), name))

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Do not count tensors created in the block: they are in host memory."""
        before, self._on_host = self._on_host, True
        try:
            yield
        finally:
            self._on_host = before

    @contextmanager
    def allocating_as(self, category: str) -> Iterator[None]:
        """Count tensors created in the block under this category."""
        before, self._allocating_as = self._allocating_as, category
        try:
            yield
        finally:
            self._allocating_as = before

    @contextmanager
    def on_stream(self, number: int) -> Iterator[None]:
        """Allocate storages of the block on this stream: only the same stream uses their memory again."""
        before, self._stream = self._stream, number
        try:
            yield
        finally:
            self._stream = before

    def resized(self, storage: torch.UntypedStorage, category: str) -> None:
        """A storage was resized: count it anew, under this category."""
        if (end := self._ends.get(storage)) is not None:
            end()
        self._add_storage(storage, category)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Count the tensors of every operation in the block; a FakeTensorMode must be active."""
        hooks = [
            register_module_forward_pre_hook(self._module_starts),
            register_module_forward_hook(self._module_ends, always_call=True),
        ]
        try:
            with self:
                yield
            self._end = len(self._events)
        finally:
            for hook in hooks:
                hook.remove()

    @property
    def highest_bytes(self) -> int:
        """The highest peak so far."""
        return max((size for size, _ in self._peaks.values()), default=0)

    @property
    def events(self) -> Sequence[tuple[int, int]]:
        """(storage, bytes): positive for an allocation, negative for a release; storages are numbered from 0.

        They end with the recording, before model and optimizer are deleted.
        """
        return self._events[: self._end]

    def category(self, storage_id: int) -> str:
        """Current category of a storage."""
        return self._categories[storage_id]

    # For `alike_parts`, which appends events without running the operations.

    @property
    def can_repeat(self) -> bool:
        """Whether a repeated event gets the layer of the one that ran: in backward it is that of the autograd node."""
        return self._phase != "backward" and not self._on_host

    @property
    def storage_count(self) -> int:
        """Storages so far: the number of the next one."""
        return len(self._categories)

    @property
    def event_count(self) -> int:
        """Events so far."""
        return len(self._events)

    def events_from(self, start: int) -> Sequence[tuple[int, int]]:
        """The events from number `start` on."""
        return self._events[start:]

    def storage_of(self, tensor: torch.Tensor) -> int:
        """The number of a tensor's storage; IGNORED if it is not counted."""
        return self._ids.get(tensor.untyped_storage(), IGNORED)

    def described(self, storage_id: int) -> tuple[Any, ...]:
        """All that is known of a storage."""
        return self.exact_bytes[storage_id], self._categories[storage_id], self.streams[storage_id]

    def add_like(self, storage_id: int) -> int:
        """Count a block like another one."""
        self._operation = self.operations[storage_id]
        with self.on_stream(self.streams[storage_id]):
            return self._add(self.exact_bytes[storage_id], self._categories[storage_id])

    def free(self, storage_id: int) -> None:
        """Count the release of a block that belongs to no tensor."""
        self._remove(storage_id)

    def stand_in(self, tensor: torch.Tensor, storage_id: int) -> torch.Tensor:
        """A new tensor like another one; it owns a block that is counted already."""
        self._on_host = True
        new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        self._on_host = False  # As before: `can_repeat`.
        self._own(new.untyped_storage(), storage_id)
        return new

    def peaks(self) -> dict[str, Peak]:
        """The peak of each phase, with the bytes of each category at that instant."""
        wanted = {index for _, index in self._peaks.values()}
        snapshots: dict[int, dict[str, int]] = {}
        current: defaultdict[str, int] = defaultdict(int)
        for index in range(len(self._events) + 1):
            if index in wanted:
                snapshots[index] = {category: size for category, size in sorted(current.items()) if size}
            if index < len(self._events):
                storage_id, change = self._events[index]
                current[self._categories[storage_id]] += change
        return {phase: Peak(bytes=size, by_category=snapshots[index]) for phase, (size, index) in self._peaks.items()}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, so skip PyTorch's check on every operation."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Mapping | None = None) -> Any:
        """Run one operation and count the tensors it creates."""
        if func is DEVICE_OF and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # Two thirds of all calls: a shortcut.
        self._operation, kwargs = func, kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor calls again with local tensors.
        if self._on_host:
            return func(*args, **kwargs)
        if (expansion := self._rules.expansions.get(func)) is not None:
            with self:
                return expansion(*args, **kwargs)
        if func in IN_PLACE and self._phase == "backward":
            func = in_place_version(func, args)
        below = _get_current_dispatch_mode()
        out = below.known_result(func, args, kwargs) if isinstance(below, CachedFakeMode) else MISSING
        first = self._workspace_blocks(self._rules.workspaces_first, func, args, kwargs)
        if out is MISSING:
            out = func(*args, **kwargs)
        for value in (out,) if isinstance(out, torch.Tensor) else tree_iter(out):
            if isinstance(value, torch.Tensor):
                self._count_tensor(value)
        adds_bias = self._rules.products.get(func)
        if adds_bias is not None and self._matmul_workspaces:
            self._count_product(adds_bias(*args, **kwargs))
        for block in (*reversed(self._workspace_blocks(self._rules.workspaces, func, args, kwargs)), *first):
            self._remove(block)
        return out

    def _workspace_blocks(self, rules: Mapping[Any, Workspace], func: Any, args: tuple, kwargs: Mapping) -> list[int]:
        """Count what an operation allocates temporarily by these rules; return the blocks."""
        workspace = rules.get(func)
        if workspace is None:
            return []
        counts = workspace(*args, **kwargs)
        return [self._add(count, WORKSPACE) for count in ((counts,) if isinstance(counts, int) else counts) if count]

    def _count_product(self, with_bias: bool) -> None:
        """Note the first product of a thread, and count its workspace for products with a bias."""
        in_backward = torch._C._current_graph_task_id() != OUTSIDE_OF_BACKWARD
        self.first_products.setdefault(self._matmul_workspaces[in_backward], len(self._events))
        if with_bias and in_backward not in self._biased:
            self._biased.add(in_backward)
            self._add(self._bias_workspace_bytes, WORKSPACE)

    def _count_tensor(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage if it is new."""
        storage = tensor.untyped_storage()
        if storage in self._ids or tensor.device.type != "cpu":
            return
        if self._allocating_as is not None:
            category = self._allocating_as
        elif tensor.ndim and tensor.shape[-1] == self._vocab_size:
            category = LOGITS
        elif self._module_depth and self._phase == "backward":
            category = ACTIVATIONS  # Recomputed by checkpointing.
        else:
            category = DEFAULT_CATEGORIES.get(self._phase or "", INPUTS)
        self._add_storage(storage, category)

    def _add_storage(self, storage: torch.UntypedStorage, category: str) -> None:
        """Count a new storage until it is freed."""
        if not storage.nbytes():
            return
        self._own(storage, self._add(storage.nbytes(), category))

    def _own(self, storage: torch.UntypedStorage, storage_id: int) -> None:
        """The block is freed with the storage."""
        self._ids[storage] = storage_id
        self._ends[storage] = weakref.finalize(storage, self._remove, storage_id)
        self._ends[storage].atexit = False

    def _add(self, count: int, category: str) -> int:
        """Count a block of `count` bytes, rounded as the allocator does."""
        size = -(-count // self._granularity) * self._granularity
        storage_id = len(self._categories)
        self._live[storage_id], self._categories[storage_id] = size, category
        self.exact_bytes.append(count)
        self.streams.append(self._stream)
        self.operations.append(self._operation)
        self._events.append((storage_id, size))
        self.current_bytes += size
        self._update_peak()
        return storage_id

    def _remove(self, storage_id: int) -> None:
        """A block is freed."""
        size = self._live.pop(storage_id)
        self._events.append((storage_id, -size))
        self.current_bytes -= size

    def _update_peak(self) -> None:
        """Record the instant if it is the highest of the current phase."""
        if self._phase is None:  # Between phases only inputs grow, and the next phase begins with them.
            return
        if self.current_bytes > self._peaks.get(self._phase, (-1, 0))[0]:
            self._peaks[self._phase] = (self.current_bytes, len(self._events))

    def _module_starts(self, module: nn.Module, args: Any) -> None:
        """A module's forward pass begins; in backward, this is recomputation."""
        self._module_depth += 1

    def _module_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        """A module's forward pass ended, perhaps by the exception with which checkpointing stops early."""
        self._module_depth -= 1
