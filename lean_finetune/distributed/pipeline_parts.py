"""The modules of a pipeline stage, and the placeholders that exchange hidden states with the stages beside it.

Shapes: B rows, T padded tokens, D hidden size.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from lean_finetune.core.errors import UserError
from lean_finetune.model.empty_model import decoder_layers
from lean_finetune.model.experts.experts_forward import has_experts
from lean_finetune.step.loss import causal_lm
from lean_finetune.step.parallel_model import OtherStage


class Slot(NamedTuple):
    """The place of a module that may belong to another stage."""

    parent: nn.Module
    name: str
    stage: int

    @property
    def module(self) -> nn.Module:
        """The module at this place."""
        return self.parent.get_submodule(self.name)

    def put(self, module: nn.Module) -> None:
        """Replace the module."""
        self.parent._modules[self.name] = module


def slots_of(model: nn.Module, stage_layers: tuple[int, ...]) -> list[Slot]:
    """The embedding, the layers, the last norm and the head, each with its stage.

    Raises:
        UserError: the model has other parts with weights, or experts.
    """
    lm, last = causal_lm(model), len(stage_layers) - 1
    decoder, layers = lm.get_decoder(), decoder_layers(lm)
    embedding, head = lm.get_input_embeddings(), lm.get_output_embeddings()
    others = [part for part in decoder.children() if part not in (embedding, layers) and list(part.parameters())]
    fault = None
    if layers is None or embedding not in decoder.children() or len(others) > 1 or list(decoder.parameters(False)):
        fault = "has other parts with weights than an embedding, layers, a norm and a head"
    elif has_experts(lm):
        fault = "is a mixture of experts, whose load is measured over all layers"
    if fault is not None:
        raise UserError(f"train.pipeline_stages: {lm.config.model_type} {fault}; use train.sharding=zero3 instead")
    assert layers is not None
    owners = [stage for stage, count in enumerate(stage_layers) for _ in range(count)]
    parts = [(embedding, 0), *zip(layers, owners, strict=True), *((part, last) for part in (*others, head))]
    places = {id(child): (parent, name) for parent in model.modules() for name, child in parent.named_children()}
    return [Slot(*places[id(part)], stage) for part, stage in parts]


class Link:
    """The connection to the stage before or after: sends and receives in the order of the calls."""

    def __init__(self, peer: int, forward: dist.ProcessGroup, backward: dist.ProcessGroup):
        # A group per direction: NCCL orders the operations of a group, and gradients must not wait for hidden states.
        self.peer, self.forward, self.backward = peer, forward, backward
        self._sending: tuple[dist.Work, torch.Tensor] | None = None

    def send(self, values: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Start to send, after the previous tensor has arrived and is freed."""
        self.wait()
        values = values.contiguous()
        work = dist.isend(values, self.peer, group=group)
        assert work is not None
        self._sending = work, values

    def wait(self) -> None:
        """Wait until the sent tensor has arrived."""
        if self._sending is not None:
            self._sending[0].wait()
            self._sending = None

    def receive(self, shape: torch.Size, like: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Receive a tensor of this shape and the dtype of `like`."""
        values = like.new_empty(shape)
        dist.recv(values, self.peer, group=group)
        return values


class _Receive(torch.autograd.Function):
    """Hidden states of the stage before; backward sends their gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, shape: torch.Size, link: Link) -> torch.Tensor:
        ctx.link = link
        return link.receive(shape, anchor, link.forward)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.link.send(gradients[0], ctx.link.backward)
        return None, None, None


class _Send(torch.autograd.Function):
    """Send hidden states to the stage after; backward receives their gradient.

    The result is a placeholder with their shape, but without memory and values.
    """

    @staticmethod
    def forward(ctx: Any, hidden_BTD: torch.Tensor, link: Link) -> torch.Tensor:
        ctx.link, ctx.shape = link, hidden_BTD.shape
        link.send(hidden_BTD, link.forward)
        return hidden_BTD.new_zeros(()).expand(ctx.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.link.receive(ctx.shape, gradients[0], ctx.link.backward), None


class FromPrevious(nn.Module):
    """Replaces the embedding: receives the hidden states of the previous stage."""

    def __init__(self, link: Link, embedding: torch.Tensor, device: torch.device):
        super().__init__()
        self._link, self._width = link, embedding.shape[1]
        # Autograd runs the backward of `_Receive` only if an input of it needs a gradient.
        self._anchor = torch.zeros((), dtype=embedding.dtype, device=device, requires_grad=True)
        self.received: torch.Tensor | None = None

    def forward(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Receive the hidden states of these tokens."""
        shape = torch.Size((*input_ids.shape, self._width))
        received: torch.Tensor = _Receive.apply(self._anchor, shape, self._link)
        self.received = received
        return received


class Received(OtherStage):
    """Replaces the layer before this stage's first one: returns what was received, not its input."""

    def __init__(self, part: nn.Module, source: FromPrevious):
        super().__init__(part)
        self._source = (source,)  # Not a submodule.

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the received hidden states, once."""
        received, self._source[0].received = self._source[0].received, None
        assert received is not None
        return received


class ToNext(OtherStage):
    """Replaces the layer after this stage's last one: sends its input to the next stage."""

    def __init__(self, part: nn.Module, link: Link, embedding: torch.Tensor):
        super().__init__(part)
        self._link, self._expected = link, (embedding.shape[1:], embedding.dtype)

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Send hidden states; with gradients, return a placeholder for them.

        Raises:
            UserError: the model's layers pass on something else.
        """
        if not isinstance(hidden, torch.Tensor) or (hidden.shape[2:], hidden.dtype) != self._expected:
            raise UserError(
                "train.pipeline_stages: layers must pass on hidden states alone, of the size and type of embeddings; "
                "the layers of this model do not; use train.sharding=zero3 instead"
            )
        if not torch.is_grad_enabled():
            self._link.send(hidden, self._link.forward)
            return hidden
        sent: torch.Tensor = _Send.apply(hidden, self._link)
        return sent
