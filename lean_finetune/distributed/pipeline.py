"""Pipeline parallelism (train.pipeline_stages): each process has some layers and sends hidden states to the next one.

Micro-batches run in the order 1F1B (Narayanan et al. 2019, PipeDream): stage s of S has at most S - s of them between
forward and backward. torch.distributed.pipelining needs one shape for all micro-batches of a run, at least as many of
them in a step as stages, and a receive buffer for each; it sends shapes as pickles. Here every stage reads the plan, so
it knows the shape of what it receives, and steps may have any number of micro-batches of any shapes.
"""

import gc
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import get_total_norm

from lean_finetune.config.parallel_layout import ParallelLayout
from lean_finetune.core.errors import UserError
from lean_finetune.distributed.pipeline_parts import FromPrevious, Link, Received, Slot, ToNext, slots_of
from lean_finetune.distributed.processes import World
from lean_finetune.distributed.weight_broadcast import broadcast_weights, check_same_shapes, send_weights
from lean_finetune.model.empty_model import keep_in_fp32, meta_model
from lean_finetune.step.batches import Batch
from lean_finetune.step.loss import causal_lm
from lean_finetune.step.parallel_model import (
    NamedParameters,
    OtherStage,
    ParallelModel,
    Result,
    ShardSlice,
    named_trained,
)


class PipelineModel(ParallelModel):
    """A stage of a pipeline: all processes train the same rows, each in its own layers."""

    def __init__(
        self,
        model: nn.Module,
        world: World,
        device: torch.device,
        layout: ParallelLayout,
        stage_layers: tuple[int, ...],
        timeout: timedelta | None = None,
    ):
        """Give every stage its part of the first process's weights.

        Args (those that their types do not explain):
            model: of the same shapes in every process, in host memory.
            stage_layers: number of layers of each stage; as many stages as processes.
            timeout: longest wait for another stage; None = PyTorch's default.

        Raises:
            UserError: the model cannot be split, or a stage would train nothing.
        """
        super().__init__(model, rank=world.rank, size=world.size, layout=layout)
        self._stages, self._device = len(stage_layers), device
        self.computes_loss, self.same_parameters = world.rank == self._stages - 1, False
        slots = slots_of(model, stage_layers)
        check_same_shapes(model, world, device)
        self._tie(slots[0].module, slots[-1].module, timeout)
        # Reversed, so that a weight in two stages counts as the first one's.
        stage_of = {id(p): slot.stage for slot in reversed(slots) for p in slot.module.parameters()}
        self._trained = [(name, stage_of[id(p)], p.shape, p.dtype) for name, p in named_trained(model)]
        layered = {stage for stage, count in enumerate(stage_layers) if count}  # Shallow traces have stages without.
        if missing := layered.difference(stage for _, stage, *_ in self._trained):
            raise UserError(
                f"train.pipeline_stages: every stage must train weights; stage {min(missing)} of {self._stages} has no "
                "adapters; name layers in all of them (train.lora.targets), or lower train.pipeline_stages"
            )
        parts = [(slot, slot.module) for slot in slots]
        for slot, part in parts:
            slot.put(OtherStage(part))
        broadcast_weights(model, device)
        self._links = self._link_stages(slots, next(parts[0][1].parameters()), stage_layers, timeout)
        for slot, part in parts:
            send_weights(part, slot.stage, world, device)
            if slot.stage == self.rank:
                slot.put(part)
        del parts, part
        gc.collect()  # A 4-bit weight and its layer refer to each other.
        self._slots, self._stage_layers = slots, stage_layers

    def _tie(self, embedding: nn.Module, head: nn.Module, timeout: timedelta | None) -> None:
        """A trained weight that is embedding and head has a copy in the first and in the last stage."""
        weights = {id(weight) for weight in embedding.parameters()}
        self._tied = next((p for p in head.parameters() if id(p) in weights and p.requires_grad), None)
        self._tied_name = next((name for name, p in named_trained(self.model) if p is self._tied), "")
        if self._tied is not None:
            self._ends = dist.new_group([0, self._stages - 1], timeout=timeout)

    def _link_stages(
        self, slots: list[Slot], embedding: torch.Tensor, stage_layers: tuple[int, ...], timeout: timedelta | None
    ) -> list[Link]:
        """Connect this stage with those before and after it."""
        # Making a group is a collective call, so every process makes those of all pairs.
        pairs = pairwise(range(self._stages))
        groups = [[dist.new_group(list(pair), timeout=timeout) for _ in range(2)] for pair in pairs]
        first = sum(stage_layers[: self.rank])
        layers, links = slots[1 : 1 + sum(stage_layers)], []
        if self.rank > 0:
            links.append(Link(self.rank - 1, *groups[self.rank - 1]))
            source = FromPrevious(links[-1], embedding, self._device)
            slots[0].put(source)
            layers[first - 1].put(Received(layers[first - 1].module, source))
        if not self.computes_loss:
            links.append(Link(self.rank + 1, *groups[self.rank]))
            after = layers[first + stage_layers[self.rank]]
            after.put(ToNext(after.module, links[-1], embedding))
        return links

    def forward_backward(
        self,
        batches: Iterable[Batch],
        forward: Callable[[Batch], torch.Tensor],
        backward: Callable[[torch.Tensor], None],
    ) -> None:
        """See ParallelModel: in the order 1F1B."""
        in_flight: deque[torch.Tensor] = deque()  # Losses between forward and backward.
        for batch in batches:
            in_flight.append(forward(batch))
            del batch
            # 1F1B: no more in flight than stages from here to the end, so memory does not grow with micro-batches.
            if len(in_flight) == self._stages - self.rank:
                backward(in_flight.popleft())
        while in_flight:
            backward(in_flight.popleft())
        self._wait()
        if self._tied is not None and self.rank in (0, self._stages - 1):
            # Embedding and head are one weight, whose gradient is the sum of both uses.
            dist.all_reduce(self._tied.grad, group=self._ends)

    def run(self, compute: Callable[[nn.Module], Result]) -> Result:
        """See ParallelModel: before the last stage, the result has no meaning."""
        result = compute(self.model)
        if not torch.is_grad_enabled():
            self._wait()
        return result

    def _wait(self) -> None:
        """Wait until the other stages have received all."""
        for link in self._links:
            link.wait()

    def gradient_norm(self, gradients: Iterable[torch.Tensor], *, foreach: bool) -> torch.Tensor:
        """See ParallelModel: a weight in two stages counts once."""
        if self._tied is not None and self.computes_loss:
            gradients = [gradient for gradient in gradients if gradient is not self._tied.grad]
        squared = get_total_norm(list(gradients), foreach=foreach).to(self._device, torch.float32).square()
        return self.sum_over_ranks(squared).sqrt()

    def trained_parameters(self) -> NamedParameters:
        """See ParallelModel."""
        own = super().trained_parameters()
        return [(self._tied_name if parameter is self._tied else name, parameter) for name, parameter in own]

    def slices(self) -> list[ShardSlice]:
        """See ParallelModel: the first stage saves a weight that is in two."""
        own, last = self.trained_parameters(), self.computes_loss
        return [
            ShardSlice(first_row=0, full_shape=tuple(p.shape), saved_here=not (last and p is self._tied))
            for _, p in own
        ]

    def trained_shapes(self) -> dict[str, tuple[int, ...]]:
        """See ParallelModel."""
        return {name: tuple(shape) for name, _, shape, _ in self._trained}

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See ParallelModel."""
        own = dict(self.trained_parameters())
        for name, stage, shape, dtype in self._trained:
            tensor = own[name].detach() if stage == self.rank else torch.empty(shape, dtype=dtype, device=self._device)
            dist.broadcast(tensor, src=stage)
            yield name, tensor

    def collect_weights(self) -> None:
        """See ParallelModel: in host memory."""
        lm = causal_lm(self.model)
        skeleton = meta_model(lm.config, dtype=lm.dtype)
        keep_in_fp32(skeleton, lm.dtype)
        for slot, empty in zip(self._slots, slots_of(skeleton, self._stage_layers), strict=True):
            if slot.stage == 0:
                continue
            if self.rank == 0:
                slot.put(empty.module.to_empty(device="cpu"))
            for tensor in slot.module.state_dict().values():
                if self.rank == slot.stage:
                    dist.send(tensor, 0)
                elif self.rank == 0:
                    received = torch.empty_like(tensor, device=self._device)
                    dist.recv(received, slot.stage)
                    tensor.copy_(received)
        if self.rank == 0:
            lm.tie_weights()
