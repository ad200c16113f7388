"""The part of `torch.cuda` that the library and its dependencies call, for an emulated GPU."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from lean_finetune.model.norms import fused_norms

TOTAL_BYTES = 80 * 2**30
COUNTER = {"all": {"current": 0, "peak": 0, "allocated": 0, "freed": 0}}


def _statistics(device: Any = None) -> dict[str, Any]:
    """Statistics of an allocator that has allocated nothing."""
    return {"allocated_bytes": COUNTER, "reserved_bytes": COUNTER, "num_alloc_retries": 0}


class _Autocast(torch.autocast):
    """Autocast of `cuda` computes on the CPU here, in the same types."""

    def __init__(self, device_type: str, *args: Any, **kwargs: Any):
        self._cuda = device_type == "cuda"
        super().__init__("cpu" if self._cuda else device_type, *args, **kwargs)

    def __enter__(self) -> Any:
        self._before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        if self._cuda:
            torch.set_autocast_enabled("cuda", self._enabled)
            torch.set_autocast_dtype("cuda", self.fast_dtype)
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        torch.set_autocast_enabled("cuda", self._before[0])
        torch.set_autocast_dtype("cuda", self._before[1])
        return super().__exit__(*error)


@contextmanager
def fake_runtime(capability: tuple[int, int]) -> Iterator[None]:
    """A context in which `torch.cuda` says that there is one GPU of this compute capability."""
    properties = SimpleNamespace(
        name="emulated", total_memory=TOTAL_BYTES, major=capability[0], minor=capability[1], multi_processor_count=1
    )
    values: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_lazy_call": lambda *args, **kwargs: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device": lambda device: nullcontext(),
        "get_device_capability": lambda device=None: capability,
        "get_device_name": lambda device=None: properties.name,
        "get_device_properties": lambda device=None: properties,
        "is_bf16_supported": lambda including_emulation=True: including_emulation or capability >= (8, 0),
        "mem_get_info": lambda device=None: (TOTAL_BYTES, TOTAL_BYTES),
        "memory_stats_as_nested_dict": _statistics,
        "memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "memory_snapshot": lambda *args: [],
        "empty_cache": lambda: None,
        "synchronize": lambda device=None: None,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "manual_seed_all": lambda seed: None,
    }
    with ExitStack() as stack:
        for name, value in values.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        stack.enter_context(
            patch.object(
                torch.cuda.memory, "host_memory_stats_as_nested_dict", lambda: {"allocated_bytes": {"current": 0}}
            )
        )
        stack.enter_context(patch.object(torch, "autocast", _Autocast))
        # The norm's kernel exists for CUDA alone.
        stack.enter_context(patch.object(fused_norms, "on_gpu", lambda x: False))
        yield
