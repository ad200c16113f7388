"""A CUDA device emulated on the CPU: the real code runs with real values, and tensors of two devices do not mix.

Memory is the CPU's. Which storages count as the GPU's is noted beside them, and `Tensor.device` reports it. An
operation on tensors of two devices raises as PyTorch would. What the host waits for and what is launched are recorded.

PyTorch's own fake `cuda` tensors cannot be used: without CUDA its autograd engine has neither a queue nor a stream for
their device, so backward ends the process.
"""

import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from tests.emulated_cuda.runtime import fake_runtime

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
aten = torch.ops.aten
COPIES = {aten.copy_.default, aten._to_copy.default, aten._foreach_copy_.default}
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
"""Operations that take indices in host memory too, and copy them to the GPU."""
HOST_READS = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.unique_consecutive.default,
    aten._unique2.default,
    aten.repeat_interleave.Tensor,
    aten.bincount.default,
}
"""Operations that wait for the GPU, since the host needs their values or the size of their result."""


class MixedDevices(RuntimeError):
    """An operation got tensors of the GPU and of the host."""


@dataclass
class Record:
    """What an emulated GPU did."""

    launches: Counter[str] = field(default_factory=Counter)
    """Operations on the GPU that start a kernel, by name."""
    waits: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Operations for which the host waits, with the place in the code that called them."""
    copies: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Copies between host and GPU, `to device` or `to host`, `pinned` or not, with their place."""


class EmulatedCuda(TorchDispatchMode):
    """Knows the GPU's storages, and checks and records operations."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._pinned: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._in_kernel = False
        self.record = Record()
        self.target: torch.device | None = None
        """Where the function that runs was asked to put its result."""
        self.usual: torch.device = CPU
        """Where the operations of the function that runs put results which depend on no tensor."""

    def shown_device(self, tensor: torch.Tensor) -> torch.device:
        """`Tensor.device`. Functions and kernels that are written in Python get a device that can compute."""
        return self.device_of(tensor) if in_functions() and not self._in_kernel else REAL_DEVICE(tensor)

    def device_of(self, tensor: torch.Tensor) -> torch.device:
        """Where a tensor is."""
        real = REAL_DEVICE(tensor)
        return CUDA if real == CPU and tensor.layout == torch.strided and storage_of(tensor) in self._storages else real

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in pinned host memory."""
        return tensor.layout == torch.strided and storage_of(tensor) in self._pinned

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor's memory as pinned."""
        self._pinned.add(storage_of(tensor))
        return tensor

    @contextmanager
    def placing(self, target: torch.device | None, usual: torch.device) -> Iterator[None]:
        """Run a function that was asked for a result on `target`."""
        before = self.target, self.usual
        self.target, self.usual = target, usual
        try:
            yield
        finally:
            self.target, self.usual = before

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Mapping | None = None) -> Any:
        """Run one operation."""
        kwargs = kwargs or {}
        tensors = [each for each in tree_iter((args, kwargs)) if isinstance(each, torch.Tensor)]
        known = {storage_of(each) for each in tensors}
        place = self._place(func, tensors, args)
        before, self._in_kernel = self._in_kernel, True
        try:
            out = func(*args, **kwargs)
        finally:
            self._in_kernel = before
        made = [each for each in tree_iter(out) if isinstance(each, torch.Tensor) and REAL_DEVICE(each) == CPU]
        new = [each for each in made if storage_of(each) not in known]
        if place == CUDA:
            self._storages.update(storage_of(each) for each in new)
        on_gpu = place == CUDA or any(self.device_of(each) == CUDA for each in tensors)
        if on_gpu and (new or func._schema.is_mutable or not made) and func.namespace != "prim":
            self.record.launches[str(func)] += 1
        if func in HOST_READS and any(self.device_of(each) == CUDA for each in tensors):
            self.record.waits[str(func), caller()] += 1
        return out

    def _place(self, func: Any, tensors: list[torch.Tensor], args: tuple) -> torch.device:
        """The device of an operation's new tensors; raises MixedDevices where PyTorch would."""
        if func in COPIES:
            if func is aten.copy_.default:
                self.note_copy(args[1], self.device_of(args[0]), pinned=self.is_pinned(args[0]))
            return self.target or self.device_of(tensors[0])
        if self.target is not None:
            return self.target
        if func in INDEXED:
            for index in args[1]:
                if index is not None:
                    self.note_copy(index, self.device_of(args[0]))
            tensors = [args[0], *args[2:3]]
        devices = {self.device_of(each) for each in tensors if each.ndim}
        scalars = {self.device_of(each) for each in tensors if not each.ndim}
        if len(devices) > 1 or (devices == {CPU} and CUDA in scalars and not func._schema.name.endswith("fill_")):
            shapes = [(str(self.device_of(each)), tuple(each.shape)) for each in tensors]
            raise MixedDevices(f"{func} got tensors of two devices: {shapes}, at {caller()}")
        found = devices or scalars
        return (CUDA if CUDA in found else found.pop()) if found else self.usual

    def note_copy(self, source: torch.Tensor, target: torch.device, *, pinned: bool = False) -> None:
        """Record a copy between host and GPU, from pinned memory or to it."""
        here = self.device_of(source)
        if here == target or {here, target} != {CPU, CUDA}:
            return
        kind = "to device" if target == CUDA else "to host"
        kind += ", pinned" if pinned or self.is_pinned(source) else ""
        self.record.copies[kind, caller()] += 1


class _Functions(TorchFunctionMode):
    """Gives every function that is asked for `cuda` memory of the CPU, noted as the GPU's."""

    def __init__(self, gpu: EmulatedCuda):
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Mapping | None = None) -> Any:
        gpu, kwargs = self._gpu, dict(kwargs or {})
        if func in MOVES:
            return self._move(func, args, kwargs)
        if func is torch.Tensor.is_pinned:
            return gpu.is_pinned(args[0])
        if func is torch.Tensor.tolist and gpu.device_of(args[0]) == CUDA:
            gpu.record.waits["tolist", caller()] += 1
        if func is torch.Tensor.numpy and gpu.device_of(args[0]) == CUDA:
            raise TypeError(f"can't convert cuda:0 device type tensor to numpy, at {caller()}")
        pinned = kwargs.pop("pin_memory", False)
        target = _device(kwargs["device"]) if kwargs.get("device") is not None else None
        if target is not None and target.type == "cuda":
            kwargs["device"] = CPU
        given = [each for each in tree_iter((args, kwargs)) if isinstance(each, torch.Tensor)]
        usual = CUDA if any(gpu.device_of(each) == CUDA for each in given) else CPU
        with gpu.placing(target, usual):
            out = func(*args, **kwargs)
        if target is not None and target.type == "cuda" and isinstance(out, torch.Tensor):
            if func in (torch.tensor, torch.as_tensor):
                gpu.record.copies["to device", caller()] += 1
            gpu._storages.add(storage_of(out))
        return gpu.pin(out) if pinned else out

    def _move(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
        """Tensor.to, cpu, cuda or pin_memory."""
        gpu, tensor, others, names = self._gpu, args[0], list(args[1:]), ["dtype", "non_blocking", "copy"]
        if func is torch.Tensor.pin_memory:
            return gpu.pin(tensor.clone())
        here = target = gpu.device_of(tensor)
        if func is torch.Tensor.cpu or func is torch.Tensor.cuda:
            target = CPU if func is torch.Tensor.cpu else CUDA
            others = []
        elif others and isinstance(others[0], torch.Tensor):
            other = others.pop(0)
            target, kwargs["dtype"] = gpu.device_of(other), other.dtype
            names.remove("dtype")
        elif others and not isinstance(others[0], torch.dtype):
            kwargs["device"] = others.pop(0)
        if (device := kwargs.pop("device", None)) is not None:
            target = _device(device)
        options = {**dict(zip(names, others, strict=False)), **kwargs}
        if target.type == "meta":
            return TO(tensor, "meta", **options)
        if target != here:
            gpu.note_copy(tensor, target)
            options |= {"copy": True, "dtype": options.get("dtype") or tensor.dtype}
        with gpu.placing(target if target != here else None, target):
            return TO(tensor, "cpu", **options)


def _device(given: Any) -> torch.device:
    """A device from what functions take as one; there is one GPU."""
    device = CUDA if isinstance(given, int) else torch.device(given)
    return CUDA if device.type == "cuda" else device


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """A tensor's storage."""
    return STORAGE(tensor)


def at_once(pool: ThreadPoolExecutor, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
    """Run the work of a thread in the calling one: modes belong to a thread."""
    future: Future[Any] = Future()
    try:
        future.set_result(work(*args, **kwargs))
    except BaseException as error:
        future.set_exception(error)
    return future


def in_functions() -> bool:
    """Whether `_Functions` is active; while PyTorch runs a function, it is not."""
    return torch._C._len_torch_function_stack() > 0


def caller() -> str:
    """The innermost place in this repository's code, and the function of a library that it called."""
    frames = [frame for frame in traceback.extract_stack() if "emulated_cuda" not in frame.filename]
    ours = [frame for frame in frames if "lean_finetune/" in frame.filename or "/tests/" in frame.filename]
    last, library = ours[-1] if ours else frames[-1], frames[-1]
    here = f"{last.filename.rpartition('lean_finetune/')[2]}:{last.name}"
    return here if last is library else f"{here} → {library.filename.rpartition('site-packages/')[2]}:{library.name}"


REAL_DEVICE: Callable[[torch.Tensor], torch.device] = torch._C.TensorBase.device.__get__
STORAGE = torch.Tensor.untyped_storage
TO = torch.Tensor.to
MOVES = {torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda, torch.Tensor.pin_memory}


@contextmanager
def emulated_cuda(capability: tuple[int, int] = (8, 0)) -> Iterator[EmulatedCuda]:
    """A context in which `cuda` is an emulated GPU of this compute capability."""
    gpu = EmulatedCuda()
    functions = _Functions(gpu)
    hooks_class = torch.autograd.graph.saved_tensors_hooks
    hooks_init = hooks_class.__init__
    group, engine = torch._C._group_tensors_by_device_and_dtype, torch.autograd._engine_run_backward

    def again() -> AbstractContextManager[object]:
        """Python code that PyTorch calls back, from a function for which it has left the mode."""
        return functions if not in_functions() else nullcontext()

    def seen(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def run(value: Any) -> Any:
            with again():
                return hook(value)

        return run

    def init(self: Any, pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> None:
        hooks_init(self, seen(pack), seen(unpack))

    def backward(*args: Any, **kwargs: Any) -> Any:
        with again():
            return engine(*args, **kwargs)

    def grouped(lists: Any, *rest: Any) -> Any:
        found = group(lists, *rest)
        return {
            (gpu.device_of(next(t for t in tensors[0] if t is not None)), dtype): (tensors, n)
            for (_, dtype), (tensors, n) in found.items()
        }

    with ExitStack() as stack:
        for change in (
            patch.object(torch.Tensor, "device", property(gpu.shown_device), create=True),
            patch.object(torch.Tensor, "is_cuda", property(lambda t: gpu.shown_device(t) == CUDA), create=True),
            patch.object(torch.Tensor, "is_cpu", property(lambda t: gpu.shown_device(t) == CPU), create=True),
            patch.object(hooks_class, "__init__", init),
            patch.object(torch.autograd, "_engine_run_backward", backward),
            patch.object(ThreadPoolExecutor, "submit", at_once),
            patch.object(torch._C, "_group_tensors_by_device_and_dtype", grouped),
            fake_runtime(capability),
            gpu,
            functions,
        ):
            stack.enter_context(change)
        yield gpu
