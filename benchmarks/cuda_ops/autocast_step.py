"""Forward, backward and AdamW of a smaller transformer of Stanford's course CS336, in fp32 or under autocast to bf16.

The code is public (Wedsonlin/assignment2-systems). Written here are its shapes and the order of its operations, with
the conversions that CUDA's autocast inserts: products in bf16, exponentials in fp32. Norms and rotary angles are fp32.

Shape legend: B rows, T tokens, H heads, D head size, E hidden size, V vocabulary.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch

from benchmarks.cuda_ops.traced_step import Phases, parameter, step_phases

ROWS, LAYERS, E, HEADS, FFN, VOCABULARY = 4, 24, 1024, 16, 4096, 10000
D = E // HEADS
WEIGHTS = ("query", "key", "value", "out", "gate", "down", "up", "norm_1", "norm_2")
"""Of a layer, in the order in which the optimizer updates them."""
SHAPES = {"norm_1": (E,), "norm_2": (E,), "gate": (FFN, E), "down": (E, FFN), "up": (FFN, E)}
EPS = 1e-5
Layer = dict[str, torch.Tensor]


def product(weight: torch.Tensor, x_BTE: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A linear layer in this type."""
    return torch.einsum("bti,oi->bto", x_BTE.to(dtype), weight.to(dtype))


def rms_norm(weight: torch.Tensor, x_BTE: torch.Tensor) -> torch.Tensor:
    """RMSNorm."""
    rms = torch.rsqrt(x_BTE.pow(2).mean(-1, keepdim=True) + EPS)
    x_BTE = x_BTE * rms
    return weight * x_BTE


def rotary(angles: torch.Tensor, x_BHTD: torch.Tensor) -> torch.Tensor:
    """Rotate pairs of neighbouring values, by angles in fp32."""
    first, second = x_BHTD.unflatten(-1, (D // 2, 2)).movedim(-1, 0).unbind()
    cos, sin = angles.unbind(0)
    rotated_first = cos * first - sin * second
    rotated_second = sin * first + cos * second
    return torch.concat((rotated_first, rotated_second), dim=-1)


def softmax(scores: torch.Tensor) -> torch.Tensor:
    """Softmax in single operations."""
    scores = scores - scores.max(dim=-1, keepdim=True)[0]
    exponentials = torch.exp(scores.float())
    return exponentials / exponentials.sum(dim=-1, keepdim=True)


def weighted(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen_TT: torch.Tensor) -> torch.Tensor:
    """Values weighted by the softmax of the scores that are seen, with products in the type of the values."""
    scores = torch.einsum("bhqd,bhkd->bhqk", query.to(value.dtype), key.to(value.dtype)) / math.sqrt(D)
    scores = torch.where(seen_TT, scores, float("-inf"))
    shares = softmax(scores)
    return torch.einsum("bhqk,bhkd->bhqd", shares.to(value.dtype), value)


def attention(layer: Layer, x_BTE: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Causal attention in single operations."""
    T = x_BTE.shape[1]
    query, key, value = (product(layer[name], x_BTE, dtype) for name in ("query", "key", "value"))
    query, key, value = (each.view(ROWS, T, HEADS, D).transpose(1, 2) for each in (query, key, value))
    query = rotary(layer["angles"], query)
    key = rotary(layer["angles"], key)
    positions = torch.arange(T)
    seen = (positions[:, None] >= positions[None])[None]
    out = weighted(query, key, value, seen)
    out = out.transpose(1, 2).reshape(ROWS, T, E)
    return product(layer["out"], out, dtype)


def mlp(layer: Layer, x_BTE: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Gated feed-forward layer."""
    gated = silu(product(layer["gate"], x_BTE, dtype)) * product(layer["up"], x_BTE, dtype)
    return product(layer["down"], gated, dtype)


def silu(x: torch.Tensor) -> torch.Tensor:
    """SiLU in single operations."""
    return x * torch.sigmoid(x)


def block(layer: Layer, x_BTE: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Attention and feed-forward layer, each with its norm and residual."""
    changed = attention(layer, rms_norm(layer["norm_1"], x_BTE), dtype)
    between = x_BTE + changed
    output = mlp(layer, rms_norm(layer["norm_2"], between), dtype)
    return between + output


def log_softmax(logits_BTV: torch.Tensor) -> torch.Tensor:
    """Logarithm of the softmax in single operations."""
    logits = logits_BTV - logits_BTV.max(dim=-1, keepdim=True)[0]
    return logits - torch.log(torch.exp(logits.float()).sum(dim=-1, keepdim=True))


def cross_entropy(logits_BTV: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy."""
    losses = -log_softmax(logits_BTV)
    return losses.gather(-1, targets_BT[..., None]).mean()


def update(parameters: list[torch.nn.Parameter], state: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
    """AdamW without operations in place, parameter by parameter; it makes zeros that an existing state replaces."""
    with torch.no_grad():
        for number, weight in enumerate(parameters):
            assert weight.grad is not None
            weight.sub_(1e-5 * weight)
            torch.zeros_like(weight)
            torch.zeros_like(weight)
            before = state[number]
            first = 0.9 * before[0] + 0.1 * weight.grad
            second = 0.999 * before[1] + 0.001 * torch.square(weight.grad)
            weight.sub_(1e-3 * first / (torch.sqrt(second) + 1e-8))
            state[number] = first, second


def build(tokens: int, dtype: torch.dtype) -> tuple[Iterable[torch.Tensor], Phases]:
    """The tensors before a step with rows of so many tokens and products in this type, and its phases."""
    embeddings, head, norm = parameter(VOCABULARY, E), parameter(VOCABULARY, E), parameter(E)
    angles = torch.empty(2, tokens, D // 2)
    layers: list[Layer] = [
        {name: parameter(*SHAPES.get(name, (E, E))) for name in WEIGHTS} | {"angles": angles} for _ in range(LAYERS)
    ]
    parameters: list[Any] = [embeddings, *(layer[name] for layer in layers for name in WEIGHTS), norm, head]
    state = {number: (torch.empty_like(one.data), torch.empty_like(one.data)) for number, one in enumerate(parameters)}
    input_ids_BT = torch.empty((ROWS, tokens), dtype=torch.int64)

    def model() -> torch.Tensor:
        x_BTE = embeddings[input_ids_BT]
        for layer in layers:
            x_BTE = block(layer, x_BTE, dtype)
        x_BTE = rms_norm(norm, x_BTE)
        return product(head, x_BTE, dtype)

    phases = step_phases(model, lambda logits: cross_entropy(logits, input_ids_BT), lambda: update(parameters, state))
    moments = [tensor for pair in state.values() for tensor in pair]
    return [*parameters, *moments, angles, input_ids_BT], phases
