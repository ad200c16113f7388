"""Mamba's selective scan in chunks of a row, in plain PyTorch, in place of transformers' loop over tokens.

That loop keeps all states of a row for backward, and its gradients take time quadratic in the row's length. Here
only the states between chunks are kept, and backward computes those of a chunk again.

Shape legend: B rows, T tokens, C tokens of a chunk, D channels, N state size.
"""

from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

CHUNK_TOKENS = 128
"""More tokens need more memory, fewer take more operations: a chunk has some B × C × D × N tensors in fp32."""


def selective_scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **kwargs: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Outputs (B, D, T) of a selective state-space model (Gu and Dao 2023, arXiv 2312.00752), and its last state.

    The arguments are those of transformers' function: hidden_states, dt and the gate z (B, D, T), A (D, N), B and C
    (B, N, T), D and delta_bias (D). State t is exp(dt A) times state t - 1, plus dt B times the hidden state; it is
    (B, D, N) in fp32, zero before the first token. `kwargs` choose among implementations of transformers.
    """
    dtype = hidden_states.dtype
    if delta_bias is not None:
        dt = dt + delta_bias.to(dt.dtype)[..., None]
    if delta_softplus:
        dt = F.softplus(dt)
    state = torch.zeros(*hidden_states.shape[:2], A.shape[-1], device=A.device)
    outputs = []
    for chunk in zip(*(tensor.split(CHUNK_TOKENS, dim=-1) for tensor in (hidden_states, dt, B, C)), strict=True):
        output, state = checkpoint(_chunk, state, A, *chunk, use_reentrant=False, preserve_rng_state=False)
        outputs.append(output)
    scanned = torch.cat(outputs, dim=1).transpose(1, 2).to(dtype)
    if D is not None:
        scanned = scanned + hidden_states * D[:, None]
    if z is not None:
        scanned = scanned * F.silu(z)
    return (scanned, state) if return_last_state else scanned


def _chunk(
    state_BDN: torch.Tensor,
    A_DN: torch.Tensor,
    hidden_BDC: torch.Tensor,
    dt_BDC: torch.Tensor,
    B_BNC: torch.Tensor,
    C_BNC: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs (B, C, D) of the tokens of a chunk, and the state after the last of them."""
    dt_BCD = dt_BDC.transpose(1, 2).float()
    decay_BCDN = torch.exp(dt_BCD[..., None] * A_DN)
    added_BCDN = (dt_BCD * hidden_BDC.transpose(1, 2))[..., None] * B_BNC.transpose(1, 2)[:, :, None].float()
    states_BCDN = _Recurrence.apply(decay_BCDN, added_BCDN, state_BDN)
    output_BCD = (states_BCDN @ C_BNC.transpose(1, 2)[..., None].float())[..., 0]
    return output_BCD, states_BCDN[:, -1]


class _Recurrence(torch.autograd.Function):
    """States of h[t] = decay[t] * h[t-1] + added[t], and their gradients, which follow the same rule backwards."""

    @staticmethod
    def forward(ctx: Any, decay_BCDN: torch.Tensor, added_BCDN: torch.Tensor, state_BDN: torch.Tensor) -> torch.Tensor:
        """The states (B, C, D, N) from the state before the first token."""
        states_BCDN = added_BCDN.clone()
        states_BCDN[:, 0].add_(decay_BCDN[:, 0] * state_BDN)
        _accumulate(decay_BCDN.clone(), states_BCDN)
        ctx.save_for_backward(decay_BCDN, states_BCDN, state_BDN)
        return states_BCDN

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Gradients of the three arguments."""
        decay_BCDN, states_BCDN, state_BDN = ctx.saved_tensors
        # In reversed order, a token's gradient gets that of the next token times that token's decay.
        grad_BCDN = grads[0].flip(1)
        _accumulate(torch.cat([decay_BCDN[:, :1], decay_BCDN[:, 1:].flip(1)], dim=1), grad_BCDN)
        grad_BCDN = grad_BCDN.flip(1)
        before_BCDN = torch.cat([state_BDN[:, None], states_BCDN[:, :-1]], dim=1)
        return grad_BCDN * before_BCDN, grad_BCDN, grad_BCDN[:, 0] * decay_BCDN[:, 0]


def _accumulate(decay_BCDN: torch.Tensor, values_BCDN: torch.Tensor) -> None:
    """Turn values into the states of the recurrence, in place; `decay_BCDN` is overwritten.

    After k rounds each token has the sum over 2**k tokens (Hillis and Steele 1986). The first decay is not used.
    """
    step = 1
    while step < values_BCDN.shape[1]:
        later = decay_BCDN[:, step:]
        values_BCDN[:, step:].add_(later * values_BCDN[:, :-step])
        later.mul_(decay_BCDN[:, :-step].clone())
        step *= 2
