"""Forward and backward of TinyLlama-1.1B with QLoRA, as the libraries of 2024 computed it.

The lines in the recording's stacks are those of transformers 4.41, peft 0.10 or 0.11 and bitsandbytes 0.43.1. What
these and the PyTorch of the time did otherwise than today is marked with `Then:`. Shapes and order of operations are
written here in plain PyTorch; no weights are needed.

Shape legend: B rows, T tokens, H heads, D head size, E hidden size.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.cuda_ops.traced_step import Phases, parameter, step_phases

LAYERS, E, HEADS, KEY_HEADS, D, FFN, VOCABULARY = 22, 2048, 32, 4, 64, 5632, 32000
TOKENS, RANK, DROPOUT, SCALING, EPS = 1000, 16, 0.05, 2.0, 1e-5


class Product4Bit(torch.autograd.Function):
    """Then: a product kept its input, although its frozen weight needs no gradient (bitsandbytes 0.43, MatMul4Bit).

    The weight is dequantised in fp16, then converted to the type of the input.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, outputs: int) -> torch.Tensor:
        """See torch.autograd.Function."""
        ctx.x, ctx.shape = x, (outputs, x.shape[-1])
        return F.linear(x, torch.empty(ctx.shape, dtype=torch.half).float())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        """See torch.autograd.Function."""
        return torch.matmul(grads[0], torch.empty(ctx.shape, dtype=torch.half).float()), None


class MeanOfSquares(torch.autograd.Function):
    """Then: `mean` saved its input for backward (pytorch/pytorch#109876)."""

    @staticmethod
    def forward(ctx: Any, squares: torch.Tensor) -> torch.Tensor:
        """See torch.autograd.Function."""
        ctx.save_for_backward(squares)
        ctx.shape = squares.shape
        return squares.mean(-1, keepdim=True)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        """See torch.autograd.Function."""
        return grads[0].expand(ctx.shape) / ctx.shape[-1]


class FullSlice(torch.autograd.Function):
    """Then: `x[:]` was an operation, whose backward filled a tensor (pytorch/pytorch#63921)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """See torch.autograd.Function."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        """See torch.autograd.Function."""
        return torch.empty_like(grads[0])


def full_slices(x: torch.Tensor, count: int) -> torch.Tensor:
    """`x[:, :]` with this many colons."""
    for _ in range(count):
        x = FullSlice.apply(x)
    return x


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Parameters of a decoder layer; a pair of matrices is an adapter."""

    norms: tuple[nn.Parameter, nn.Parameter]
    query: tuple[nn.Parameter, nn.Parameter]
    value: tuple[nn.Parameter, nn.Parameter]
    frequencies: torch.Tensor

    @classmethod
    def empty(cls) -> "Layer":
        """A layer of TinyLlama with adapters at queries and values."""
        down = [parameter(RANK, E) for _ in range(2)]
        return cls(
            norms=(parameter(E, trained=False), parameter(E, trained=False)),
            query=(down[0], parameter(E, RANK)),
            value=(down[1], parameter(KEY_HEADS * D, RANK)),
            frequencies=torch.empty(D // 2),
        )

    def tensors(self) -> list[torch.Tensor]:
        """All of them."""
        return [*self.norms, *self.query, *self.value, self.frequencies]


def rms_norm(weight: torch.Tensor, x_BTE: torch.Tensor) -> torch.Tensor:
    """RMSNorm with a frozen weight."""
    variance = MeanOfSquares.apply(x_BTE.pow(2))
    x_BTE = x_BTE * torch.rsqrt(variance + EPS)
    return weight * x_BTE


def adapted(x_BTE: torch.Tensor, adapter: tuple[nn.Parameter, nn.Parameter]) -> torch.Tensor:
    """Then: the product's result was copied before the adapter's was added (peft 0.10)."""
    result = Product4Bit.apply(x_BTE, adapter[1].shape[0])
    result = result.clone()
    output = F.linear(F.linear(F.dropout(x_BTE, DROPOUT), adapter[0]), adapter[1]) * SCALING
    return result + output


def rotary(frequencies: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Then: every layer computed the angles anew (transformers 4.41)."""
    with torch.no_grad():
        angles = (frequencies[None, :, None] @ positions[:, None, :].float()).transpose(1, 2)
        both = torch.cat((angles, angles), dim=-1)
        return both.cos()[:, None], both.sin()[:, None]


def rotated(x_BHTD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs of a head's values by their position."""
    return (x_BHTD * cos) + (swapped_halves(x_BHTD) * sin)


def swapped_halves(x_BHTD: torch.Tensor) -> torch.Tensor:
    """The halves of each head, the second one negated."""
    first, second = x_BHTD[..., : D // 2], x_BHTD[..., D // 2 :]
    return torch.cat((-second, first), dim=-1)


def repeated(x_BHTD: torch.Tensor) -> torch.Tensor:
    """Keys or values of each group, once for each of its query heads."""
    B, H, T, _ = x_BHTD.shape
    grouped = full_slices(full_slices(x_BHTD, 2)[:, :, None], 2)
    return grouped.expand(B, H, HEADS // H, T, D).reshape(B, HEADS, T, D)


def attention(layer: Layer, x_BTE: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Causal attention with grouped heads, by PyTorch's memory-efficient kernel."""
    B, T, _ = x_BTE.shape
    query = adapted(x_BTE, layer.query)
    key = Product4Bit.apply(x_BTE, KEY_HEADS * D)
    value = adapted(x_BTE, layer.value)
    query, key, value = (each.view(B, T, -1, D).transpose(1, 2) for each in (query, key, value))
    cos, sin = rotary(layer.frequencies, positions)
    query = rotated(query, cos, sin)
    key = rotated(key, cos, sin)
    key = repeated(key)
    value = repeated(value)
    out = torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, None, True, 0.0, True)[0]
    return Product4Bit.apply(out.transpose(1, 2).contiguous().view(B, T, E), E)


def mlp(x_BTE: torch.Tensor) -> torch.Tensor:
    """Gated feed-forward layer."""
    return Product4Bit.apply(F.silu(Product4Bit.apply(x_BTE, FFN)) * Product4Bit.apply(x_BTE, FFN), E)


def decoder_layer(layer: Layer, x_BTE: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Attention and feed-forward layer, each with its norm and residual."""
    residual = x_BTE
    x_BTE = rms_norm(layer.norms[0], x_BTE)
    x_BTE = attention(layer, x_BTE, positions)
    x_BTE = residual + x_BTE
    residual = x_BTE
    x_BTE = rms_norm(layer.norms[1], x_BTE)
    x_BTE = mlp(x_BTE)
    return residual + x_BTE


def decoder(
    embeddings: torch.Tensor, norm: torch.Tensor, layers: list[Layer], input_ids_BT: torch.Tensor
) -> torch.Tensor:
    """The hidden states after the last norm. The embeddings live until its end."""
    x_BTE = embedded = F.embedding(input_ids_BT, embeddings).requires_grad_(True)  # As prepare_model_for_kbit_training.
    positions = torch.arange(TOKENS)[None]
    for layer in layers:
        x_BTE = decoder_layer(layer, x_BTE, positions)
    x_BTE = rms_norm(norm, x_BTE)
    del embedded
    return x_BTE


def build() -> tuple[Iterable[torch.Tensor], Phases]:
    """The tensors before the step, and its phases."""
    embeddings, head = (parameter(VOCABULARY, E, trained=False) for _ in range(2))
    norm = parameter(E, trained=False)
    layers = [Layer.empty() for _ in range(LAYERS)]
    input_ids_BT = torch.empty((1, TOKENS), dtype=torch.int64)

    def loss(logits_BTV: torch.Tensor) -> torch.Tensor:
        shifted = full_slices(logits_BTV[..., :-1, :], 1).contiguous().view(-1, VOCABULARY)
        return F.cross_entropy(shifted, input_ids_BT[..., 1:].contiguous().view(-1))

    existing = [embeddings, head, norm, input_ids_BT, *(tensor for layer in layers for tensor in layer.tensors())]
    return existing, step_phases(lambda: F.linear(decoder(embeddings, norm, layers, input_ids_BT), head), loss)
