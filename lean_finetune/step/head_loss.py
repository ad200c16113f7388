"""Cross-entropy of the head's logits, a chunk of tokens at a time, with gradients from the same pass.

The head's output becomes its own gradient, in the same memory, before the next chunk is computed: backward computes no
logits again, and no second copy of them exists.

Shapes: M positions of a micro-batch, N of them trained, C of these in a chunk, R in a block of it; D hidden size, V
vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from peft.utils.other import ModulesToSaveWrapper
from torch import nn
from torch.autograd.function import once_differentiable
from transformers import PretrainedConfig, PreTrainedModel

from lean_finetune.config.model_families import family_of

BLOCK_BYTES = 2**24
"""Output in 16 bits is converted to fp32 in blocks of this size."""
LOGIT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Names of the soft cap of logits: Gemma 2, RecurrentGemma, xLSTM."""
LOGIT_FACTORS = ("logit_scale", "lm_head_multiplier")
"""Names of what a family multiplies its logits by: Cohere, Falcon-H1."""
LOGIT_DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
"""Names of what a family divides its logits by: Granite and MiniCPM-3, Inkling."""


@dataclass(frozen=True, kw_only=True)
class VocabularyShard:
    """The part of the vocabulary whose logits this process computes, if a group of processes shares the head."""

    group: dist.ProcessGroup
    first: int
    """The token of the layer's first row."""


@dataclass(frozen=True, kw_only=True)
class Head:
    """The layer from hidden states to logits, and what the model does with its output."""

    layer: nn.Module
    vocabulary: int | None
    """Tokens that have logits, where the layer is padded to more."""
    factor: float
    cap: float | None
    """The soft cap of Gemma 2: logits are cap · tanh(logits / cap)."""
    shard: VocabularyShard | None
    """None: the layer has all tokens."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Head":
        """The head of a model."""
        layer, vocabulary = used_layer(model.get_output_embeddings()), unpadded_vocabulary(model.config)
        shard: VocabularyShard | None = getattr(layer, "vocabulary_shard", None)
        return cls(
            layer=layer,
            vocabulary=vocabulary if vocabulary is None or shard is None else max(0, vocabulary - shard.first),
            shard=shard,
            factor=logit_factor(model.config),
            cap=logit_cap(model.config),
        )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits in fp32 of hidden states (..., D) → (..., V); V is this process's part of the vocabulary."""
        logits = self.layer(hidden)[..., : self.vocabulary].float()
        if self.factor != 1.0:
            logits *= self.factor
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap

    @torch.no_grad()
    def losses(
        self, hidden_MD: torch.Tensor, index_N: torch.Tensor, targets_N: torch.Tensor, chunk: int
    ) -> torch.Tensor:
        """Cross-entropy of each trained token (N,), fp32; at most chunk × V logits exist."""
        return torch.cat(
            in_parts(
                lambda index, targets: self.differentiate(self.layer(hidden_MD[index]), targets, None),
                list(zip(index_N.split(chunk), targets_N.split(chunk), strict=True)),
            )
        )

    def differentiate(
        self,
        output_CV: torch.Tensor,
        targets_C: torch.Tensor,
        divisor: float | None,
        weights_C: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Cross-entropy of each token (C,), fp32; the layer's output becomes the gradient of their sum / divisor.

        With None for the divisor it becomes undefined, and less is computed. With weights, fp32 (C,), the gradient is
        that of the weighted sum.
        """
        rows = max(1, BLOCK_BYTES // (torch.float32.itemsize * output_CV.shape[1]))
        tensors = (output_CV, targets_C) if weights_C is None else (output_CV, targets_C, weights_C)
        blocks = list(zip(*(tensor.split(rows) for tensor in tensors), strict=True))
        return torch.cat(in_parts(partial(self._differentiate_block, divisor=divisor), blocks))

    def _differentiate_block(
        self,
        output_RV: torch.Tensor,
        targets_R: torch.Tensor,
        weights_R: torch.Tensor | None = None,
        *,
        divisor: float | None,
    ) -> torch.Tensor:
        """As `differentiate`: fp32 output is changed in place, and of other types there is one fp32 copy."""
        targets_R1 = targets_R[:, None]
        others_R1 = None
        if self.shard is not None:
            targets_R1 = targets_R1 - self.shard.first
            others_R1 = (targets_R1 < 0) | (targets_R1 >= output_RV.shape[1])
            targets_R1.masked_fill_(others_R1, 0)
        unpadded_RV = output_RV[:, : self.vocabulary]
        values_RV, slope_RV = unpadded_RV.float(), None
        if self.factor != 1.0:
            values_RV.mul_(self.factor)
        if self.cap is not None:
            values_RV.div_(self.cap).tanh_()
            slope_RV = None if divisor is None else values_RV.square().neg_().add_(1.0)
            values_RV.mul_(self.cap)
        # Less the largest logit, so that exp cannot overflow.
        values_RV.sub_(self.over_shards(values_RV.amax(1, keepdim=True), dist.ReduceOp.MAX))
        # Read before exp_, which overwrites the values.
        target_values_R1 = self.over_shards(_without(others_R1, values_RV.gather(1, targets_R1)))
        sums_R1 = self.over_shards(values_RV.exp_().sum(1, keepdim=True))
        losses_R = (sums_R1.log() - target_values_R1).squeeze(1)
        if divisor is None:
            return losses_R
        # Divided in fp32: in 16 bits small gradients would vanish, or be rounded twice.
        scale = self.factor / divisor if weights_R is None else weights_R[:, None] * (self.factor / divisor)
        values_RV.mul_(scale / sums_R1)
        at_targets_R1 = -scale if isinstance(scale, torch.Tensor) else torch.full_like(sums_R1, -scale)
        values_RV.scatter_add_(1, targets_R1, _without(others_R1, at_targets_R1))
        if slope_RV is not None:
            values_RV.mul_(slope_RV)
        unpadded_RV.copy_(values_RV)
        # Rows that only pad the vocabulary get no gradient.
        output_RV[:, unpadded_RV.shape[1] :].zero_()
        return losses_R

    def over_shards(self, values: torch.Tensor, operation: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """The sum, or the maximum, over the processes that share the head, in place."""
        if self.shard is not None:
            dist.all_reduce(values, op=operation, group=self.shard.group)
        return values


def used_layer(head: nn.Module) -> nn.Module:
    """The layer that computes: of a head that peft trains in full, its copy if adapters are on."""
    if isinstance(head, ModulesToSaveWrapper):
        off = head.disable_adapters or not head.active_adapters
        return head.original_module if off else cast(nn.Module, head.modules_to_save[head.active_adapters[0]])
    return head


def _without(others_R1: torch.Tensor | None, values_R1: torch.Tensor) -> torch.Tensor:
    """The values, 0 at tokens of other processes."""
    return values_R1 if others_R1 is None else values_R1.masked_fill_(others_R1, 0.0)


TokenRule = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""From the cross-entropy of each trained token, fp32 (N,), to the loss, an fp32 scalar, and its derivatives (N,)."""


def summed_head_loss(
    head: Head,
    hidden_MD: torch.Tensor,
    index_N: torch.Tensor,
    targets_N: torch.Tensor,
    chunk: int,
    divisor: float,
    rule: TokenRule | None = None,
) -> torch.Tensor:
    """Summed cross-entropy of the trained tokens / divisor, an fp32 scalar; at most chunk × V logits exist.

    Args:
        head: its trained parameters get gradients, each summed over the chunks in place.
        hidden_MD: the decoder's output of all positions.
        index_N: the positions whose next token is trained.
        targets_N: these tokens.
        chunk: C.
        divisor: trained tokens of the optimizer step, divided by the loss scale. It belongs in here: gradients are
            computed, and rounded to 16 bits, before `backward` knows by what the result is divided.
        rule: what the loss is instead of the sum. It needs the losses of all tokens before the weight of any is known.
            A frozen head still computes its logits once, since its gradients are scaled afterwards; a trained one
            twice.
    """
    if not torch.is_grad_enabled():
        losses_N = head.losses(hidden_MD, index_N, targets_N, chunk)
        return losses_N.sum() / divisor if rule is None else rule(losses_N)[0]
    trained = [parameter for parameter in head.layer.parameters() if parameter.requires_grad]
    loss: torch.Tensor = _SummedHeadLoss.apply(hidden_MD, head, index_N, targets_N, chunk, divisor, rule, *trained)
    return loss


class _SummedHeadLoss(torch.autograd.Function):
    """`summed_head_loss`: forward computes the gradients, backward returns them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: torch.Tensor,
        head: Head,
        index_N: torch.Tensor,
        targets_N: torch.Tensor,
        chunk: int,
        divisor: float,
        rule: TokenRule | None,
        *trained: nn.Parameter,
    ) -> torch.Tensor:
        loss: torch.Tensor | None = None
        weights: list[torch.Tensor] = []
        if rule is not None:
            divisor = 1.0  # The rule's weights contain it.
            if trained:
                loss, *weights = rule(head.losses(hidden_MD.detach(), index_N, targets_N, chunk))
        sums = {parameter: torch.zeros_like(parameter) for parameter in trained}
        gradient_ND = hidden_MD.new_empty(len(index_N), hidden_MD.shape[1])
        losses_N = torch.cat(
            in_parts(
                lambda index, targets, gradient, *weights: _differentiate_chunk(
                    head, hidden_MD.detach()[index], targets, divisor, gradient, sums, *weights
                ),
                list(zip(*(t.split(chunk) for t in (index_N, targets_N, gradient_ND, *weights)), strict=True)),
            )
        )
        head.over_shards(gradient_ND)  # Each process computes it for its part of the vocabulary.
        if rule is None:
            loss = losses_N.sum() / divisor
        elif loss is None:
            loss, weights_N = rule(losses_N)
            gradient_ND.mul_(weights_N[:, None])
        ctx.shape = hidden_MD.shape
        ctx.save_for_backward(gradient_ND, index_N, *sums.values())
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient_ND, index_N, *sums = ctx.saved_tensors
        for gradient in (gradient_ND, *sums):
            gradient.mul_(incoming)  # By 1 in training.
        gradient_MD = gradient_ND.new_zeros(ctx.shape).index_copy_(0, index_N, gradient_ND)
        return gradient_MD, None, None, None, None, None, None, *sums


def _differentiate_chunk(
    head: Head,
    hidden_CD: torch.Tensor,
    targets_C: torch.Tensor,
    divisor: float,
    gradient_CD: torch.Tensor,
    sums: dict[nn.Parameter, torch.Tensor],
    weights_C: torch.Tensor | None = None,
) -> torch.Tensor:
    """The losses of a chunk (C,); writes the gradient of its hidden states, and adds to the parameters' gradients."""
    hidden_CD.requires_grad_()
    # Autograd is off inside a Function's forward; a graph of this layer alone gives its gradients.
    with torch.enable_grad():
        output_CV = head.layer(hidden_CD)
    gradient_CV = output_CV.detach()
    losses_C = head.differentiate(gradient_CV, targets_C, divisor, weights_C)
    # Autograd would make a second tensor of the size of the weight.
    weight = head.layer.weight if type(head.layer).forward is nn.Linear.forward else None
    others = [parameter for parameter in sums if parameter is not weight]
    found = torch.autograd.grad(output_CV, (hidden_CD, *others), gradient_CV)
    gradient_CD.copy_(found[0])
    for parameter, gradient in zip(others, found[1:], strict=True):
        sums[parameter].add_(gradient)
    if isinstance(weight, nn.Parameter) and weight in sums:
        _add_product(sums[weight], gradient_CV, hidden_CD.detach())
    return losses_C


def _add_product(sum_VD: torch.Tensor, gradient_CV: torch.Tensor, hidden_CD: torch.Tensor) -> None:
    """Add the weight's gradient of a chunk in place; in blocks if its type differs (fp16 matmuls of fp32 weights)."""
    hidden_CD = hidden_CD.to(gradient_CV.dtype)
    if sum_VD.dtype == gradient_CV.dtype:
        sum_VD.addmm_(gradient_CV.T, hidden_CD)
        return
    rows = max(1, BLOCK_BYTES // (sum_VD.element_size() * sum_VD.shape[1]))

    def add_block(sum_BD: torch.Tensor, gradient_CB: torch.Tensor) -> None:
        sum_BD.add_((gradient_CB.T @ hidden_CD).to(sum_VD.dtype))

    in_parts(add_block, list(zip(sum_VD.split(rows), gradient_CV.split(rows, dim=1), strict=True)))


# What a family does with the output of its head.


def logit_factor(config: PretrainedConfig) -> float:
    """What a model multiplies the head's output by; 1 for most."""
    text = config.get_text_config()
    multiplied, divided = (
        prod(float(_declared(text, name) or 1.0) for name in names) for names in (LOGIT_FACTORS, LOGIT_DIVISORS)
    )
    return multiplied * divided if family_of(text.model_type).multiplies_logits else multiplied / divided


def unpadded_vocabulary(config: PretrainedConfig) -> int | None:
    """The tokens whose logits a model returns, where its head is padded to more (Inkling); None for most."""
    size: int | None = _declared(config.get_text_config(), "unpadded_vocab_size")
    return size


def _declared(config: PretrainedConfig, name: str) -> Any:
    """A value that the family's config class declares; None for a key of config.json that its code does not read."""
    return getattr(config, name, None) if hasattr(type(config), name) else None


def logit_cap(config: PretrainedConfig) -> float | None:
    """The soft cap of a model's logits; None for most."""
    text = config.get_text_config()
    return next((cap for name in LOGIT_CAPS if (cap := _declared(text, name)) is not None), None)


# Work on parts of tensors, one after another. A trace of memory skips most of the parts: they are alike.

Result = TypeVar("Result")
"""A tensor, or None."""
Parts = Sequence[tuple[torch.Tensor, ...]]
Loop = Callable[[Callable[..., Any], Parts], list[Any]]


def run_all(work: Callable[..., Result], parts: Parts) -> list[Result]:
    """The results of all parts, in order."""
    return [work(*part) for part in parts]


_loop: ContextVar[Loop] = ContextVar("loop", default=run_all)


def in_parts(work: Callable[..., Result], parts: Parts) -> list[Result]:
    """The results of `work` on the tensors of each part, in order. `work` keeps no memory but its result."""
    return _loop.get()(work, parts)


@contextmanager
def looping_by(loop: Loop) -> Iterator[None]:
    """A context in which `loop` runs the work on the parts."""
    token = _loop.set(loop)
    try:
        yield
    finally:
        _loop.reset(token)
