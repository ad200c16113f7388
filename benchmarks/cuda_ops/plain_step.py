"""Forward, backward and AdamW of a transformer of Stanford's course CS336, in plain PyTorch.

The order of operations follows from the recording, the sizes too; the course's public code has the same layers. Every
product has the weight first, as PyTorch's einsum computed it then: results are transposed in memory, and sums over the
features of a token run over the slowest dimension.

Shape legend: B rows, T tokens, H heads, D head size, E hidden size, V vocabulary.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch

from benchmarks.cuda_ops.traced_step import Phases, parameter, step_phases

ROWS, LAYERS, E, HEADS, FFN, VOCABULARY = 4, 32, 2560, 32, 10240, 10000
D = E // HEADS
WEIGHTS = ("norm_1", "query", "key", "value", "out", "norm_2", "gate", "down", "up")
"""Of a layer, in the order in which the optimizer updates them."""
SHAPES = {"norm_1": (E,), "norm_2": (E,), "gate": (FFN, E), "down": (E, FFN), "up": (FFN, E)}
EPS = 1e-5


def product(weight: torch.Tensor, x_BTE: torch.Tensor) -> torch.Tensor:
    """A linear layer whose result has the tokens fastest in memory."""
    B, T, features = x_BTE.shape
    out = torch.bmm(weight[None], x_BTE.reshape(-1, features).t()[None])
    return out.squeeze(0).t().view(B, T, -1)


def rms_norm(weight: torch.Tensor, x_BTE: torch.Tensor) -> torch.Tensor:
    """RMSNorm."""
    norm = torch.linalg.vector_norm(x_BTE, dim=-1, keepdim=True)
    return x_BTE / torch.sqrt(norm**2 / E + EPS) * weight


def rotary(angles: torch.Tensor, x_BHTD: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotate pairs of neighbouring values, written into a new tensor."""
    cos, sin = angles[0][positions], angles[1][positions]
    out = torch.empty_like(x_BHTD)
    out[..., 0::2] = x_BHTD[..., 0::2] * cos - x_BHTD[..., 1::2] * sin
    out[..., 1::2] = x_BHTD[..., 0::2] * sin + x_BHTD[..., 1::2] * cos
    return out


def softmax(scores: torch.Tensor) -> torch.Tensor:
    """Softmax in single operations."""
    maxima = scores.max(dim=-1, keepdim=True).values
    exponentials = torch.exp(scores - maxima)
    return exponentials / exponentials.sum(dim=-1, keepdim=True)


def weighted(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, hidden_TT: torch.Tensor) -> torch.Tensor:
    """Values weighted by the softmax of the scores that are not hidden."""
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key) / math.sqrt(D)
    scores = scores.masked_fill(hidden_TT.expand(scores.shape) == 1, -1e9)
    shares = softmax(scores)
    return torch.einsum("bhqk,bhkd->bhqd", shares, value)


def attention(layer: dict[str, Any], x_BTE: torch.Tensor) -> torch.Tensor:
    """Causal attention in single operations."""
    query, key, value = (product(layer[name], x_BTE) for name in ("query", "key", "value"))
    heads = [each.unflatten(-1, (HEADS, D)).transpose(1, 2) for each in (query, key, value)]
    T = x_BTE.shape[1]
    positions = torch.arange(T).expand(ROWS, T)[:, None]
    rotated_query = rotary(layer["angles"], heads[0], positions)
    rotated_key = rotary(layer["angles"], heads[1], positions)
    hidden = torch.triu(torch.ones(T, T), 1) < 0.5
    hidden = ~hidden
    out = weighted(rotated_query, rotated_key, heads[2], hidden)
    out = out.transpose(1, 2).reshape(ROWS, T, E)
    return product(layer["out"], out)


def mlp(layer: dict[str, Any], x_BTE: torch.Tensor) -> torch.Tensor:
    """Gated feed-forward layer."""
    gate = product(layer["gate"], x_BTE)
    up = product(layer["up"], x_BTE)
    return product(layer["down"], gate * torch.sigmoid(gate) * up)


def block(layer: dict[str, Any], x_BTE: torch.Tensor) -> torch.Tensor:
    """Attention and feed-forward layer, each with its norm and residual."""
    changed = rms_norm(layer["norm_1"], x_BTE)
    changed = attention(layer, changed)
    between = x_BTE + changed
    changed = rms_norm(layer["norm_2"], between)
    return between + mlp(layer, changed)


def cross_entropy(logits_BTV: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in single operations."""
    logits = logits_BTV.reshape(-1, VOCABULARY)
    maxima = logits.max(dim=-1, keepdim=True).values
    logits = logits - maxima
    sums = torch.exp(logits).sum(-1)
    wanted = logits[torch.arange(len(logits)), targets_BT.reshape(-1)]  # The rows' numbers were copied from the host.
    return (sums.log() - wanted).mean()


def update(parameters: list[torch.nn.Parameter], state: list[torch.Tensor]) -> None:
    """The first step of AdamW, parameter by parameter."""
    with torch.no_grad():
        for weight in parameters:
            assert weight.grad is not None
            first, second = torch.zeros_like(weight), torch.zeros_like(weight)
            state += [first, second]
            first.mul_(0.9).add_(weight.grad, alpha=0.1)
            second.mul_(0.999).addcmul_(weight.grad, weight.grad)
            denominator = (second.sqrt() / math.sqrt(0.001)).add_(1e-8)
            weight.addcdiv_(first, denominator)


def build(tokens: int) -> tuple[Iterable[torch.Tensor], Phases]:
    """The tensors before a step with rows of so many tokens, and its phases."""
    embeddings, head, norm = parameter(VOCABULARY, E), parameter(VOCABULARY, E), parameter(E)
    layers: list[dict[str, Any]] = [
        {name: parameter(*SHAPES.get(name, (E, E))) for name in WEIGHTS} | {"angles": torch.empty(2, tokens, D // 2)}
        for _ in range(LAYERS)
    ]
    parameters = [embeddings, *(layer[name] for layer in layers for name in WEIGHTS), norm, head]
    input_ids_BT = torch.empty((ROWS, tokens), dtype=torch.int64)
    state: list[torch.Tensor] = []

    def model() -> torch.Tensor:
        x_BTE = embeddings[input_ids_BT]
        for layer in layers:
            x_BTE = block(layer, x_BTE)
        return product(head, rms_norm(norm, x_BTE))

    phases = step_phases(model, lambda logits: cross_entropy(logits, input_ids_BT), lambda: update(parameters, state))
    return [*parameters, *(layer["angles"] for layer in layers), input_ids_BT], phases
