"""Trace a step under the rules of a GPU: exact sizes, and library workspaces where the step first needs them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lean_finetune.memory.devices import resolve_gpu
from lean_finetune.memory.trace.cuda_kernels import CUBLAS_HANDLES, target_of
from lean_finetune.memory.trace.memory_trace import WEIGHTS, WORKSPACE, OpRules
from lean_finetune.memory.trace.origin_trace import OriginTrace

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)
Phases = Mapping[str, Callable[[], Any]]


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """An allocation of a traced step, or the release of one."""

    bytes: int
    """Negative for a release."""
    operation: str
    """Phase and operation of the allocation."""


def trace_phases(
    build: Callable[[], tuple[Iterable[torch.Tensor], Phases]], gpu: str, *, workspaces_exist: bool
) -> list[Allocation]:
    """Trace the phases of a step, in order.

    Args:
        build: makes the tensors that exist before, and the phases by name.
        gpu: as in `hardware.gpu`.
        workspaces_exist: cuBLAS has its workspaces already; else each handle takes its own at its first product.
    """
    target = target_of(resolve_gpu(gpu)[0])
    workspace = target.constant_bytes // CUBLAS_HANDLES
    handles: set[str] = {"forward", "backward"} if workspaces_exist else set()

    def first_product(*args: Any, **kwargs: Any) -> int:
        phase = trace.phase_name
        if phase not in handles:
            handles.add(phase)
            trace.register_bytes(workspace, WORKSPACE)
        return 0

    rules = OpRules(
        expansions=target.rules.expansions,
        workspaces={**target.rules.workspaces, **dict.fromkeys(PRODUCTS, first_product)},
    )
    trace = StepTrace(granularity_bytes=1, rules=rules, vocab_size=-1)
    with FakeTensorMode(allow_non_fake_inputs=True), target.attention():
        existing, phases = build()
        trace.register(existing, WEIGHTS)
        del existing  # The optimizer replaces some of them.
        start = len(trace.events)
        with trace.recording():
            for name, run in phases.items():
                with trace.in_phase(name):
                    run()
        return list(_allocations(trace, start))


class StepTrace(OriginTrace):
    """A trace that tells its phase."""

    phase_name = ""

    @contextmanager
    def in_phase(self, name: str) -> Iterator[None]:
        """Name the phase of the block."""
        self.phase_name = name
        with self.phase(name):
            yield


def _allocations(trace: OriginTrace, start: int) -> Iterator[Allocation]:
    """The events from `start` on, without seeds of attention kernels, which lie in host memory without dropout."""
    for storage, change in trace.events[start:]:
        origin = trace.origins[storage]
        if origin.shape == () and origin.operation.startswith("_scaled_dot_product"):
            continue
        yield Allocation(bytes=change, operation=f"{origin.phase} {origin.operation}")


def step_phases(
    model: Callable[[], torch.Tensor],
    loss: Callable[[torch.Tensor], torch.Tensor],
    update: Callable[[], None] | None = None,
) -> Phases:
    """Forward, backward and perhaps the optimizer. The logits live until the end, as in a loop that names them."""
    outputs: dict[str, torch.Tensor] = {}

    def forward() -> None:
        outputs["logits"] = model()
        outputs["loss"] = loss(outputs["logits"])

    phases = {"forward": forward, "backward": lambda: outputs["loss"].backward()}
    return phases if update is None else {**phases, "optimizer": update}


def parameter(*shape: int, trained: bool = True) -> nn.Parameter:
    """An fp32 parameter without values."""
    return nn.Parameter(torch.empty(*shape), requires_grad=trained)
