"""8-bit AdamW in Triton's interpreter, against bitsandbytes' rule in PyTorch and its update on a CPU.

`test_kernels.py` runs this in a process with TRITON_INTERPRET=1.
"""

import math
from typing import Any

import bitsandbytes as bnb
import torch
from torch.nn import functional as F

from lean_finetune.step.adamw_8bit import update
from tests.kit.interpreted_triton import interpreted_kernels

BLOCK = 256
OPTIONS: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8, "lr": 1e-2, "weight_decay": 0.1}
BOOKS = [bnb.functional.create_dynamic_map(signed=signed) for signed in (True, False)]
ZEROS = (127, 0)
"""Codes of 0."""


def blocks(values: torch.Tensor, rest: float = 0) -> torch.Tensor:
    """Values in rows of a block, the last one filled up."""
    return F.pad(values.reshape(-1), (0, -values.numel() % BLOCK), value=rest).view(-1, BLOCK)


def nearest(values: torch.Tensor, scales: torch.Tensor, book: torch.Tensor) -> torch.Tensor:
    """Codes of the levels nearest to values in rows of blocks."""
    x = torch.where(scales[:, None] > 0, values / scales[:, None], 0.0)
    return torch.searchsorted((book[1:] + book[:-1]) / 2, x)


def expected(parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
    """Update a parameter and its state by bitsandbytes' rule (its kOptimizerStatic8bit2StateBlockwise), in fp32.

    Returns the size of the terms of each change: the old moment and the gradient may cancel.
    """
    state["step"] += 1
    (beta1, beta2), step = OPTIONS["betas"], state["step"]
    g = blocks(gradient.float())
    finite = torch.isfinite(g)
    g = torch.where(finite, g, 0.0)
    m, v = (
        book[blocks(state[f"state{n}"], zero).long()] * state[f"absmax{n}"][:, None]
        for n, book, zero in zip((1, 2), BOOKS, ZEROS, strict=True)
    )
    terms = m.abs() * beta1 + (1 - beta1) * g.abs()
    m, v = (torch.where(finite, one, 0.0) for one in (m * beta1 + (1 - beta1) * g, v * beta2 + (1 - beta2) * g * g))
    correction1, correction2 = 1 - beta1**step, math.sqrt(1 - beta2**step)
    rate = OPTIONS["lr"] * correction2 / correction1 / (v.sqrt() + OPTIONS["eps"] * correction2)
    before = blocks(parameter.float())
    after = torch.where(finite, before * (1 - OPTIONS["lr"] * OPTIONS["weight_decay"]) - rate * m, before)
    state["absmax1"], state["absmax2"] = m.abs().amax(1), v.amax(1)
    code1, code2 = nearest(m, state["absmax1"], BOOKS[0]), nearest(v, state["absmax2"], BOOKS[1])
    code1 = torch.where((code1 == ZEROS[0]) & (m < 0), code1 - 1, code1)  # A negative moment stays negative.

    def flat(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return values.reshape(-1)[: parameter.numel()].view(parameter.shape).to(dtype)

    parameter.copy_(flat(after, parameter.dtype))
    state["state1"], state["state2"] = flat(code1, torch.uint8), flat(code2, torch.uint8)
    return flat(rate * terms, torch.float32)


def start(values: int) -> dict[str, Any]:
    """State before the first step, as bitsandbytes makes it: codes are 0, with a scale of 0."""
    scales = -(-values // BLOCK)
    return {
        "step": 0,
        **{f"state{n}": torch.zeros(values, dtype=torch.uint8) for n in (1, 2)},
        **{f"absmax{n}": torch.zeros(scales) for n in (1, 2)},
    }


def gradient_of(step: int, values: int, dtype: torch.dtype) -> torch.Tensor:
    """Gradients with zeros, a block that has none before the third step, and values over many decades."""
    gradient = torch.randn(values)
    gradient[: values // 2] *= 10 ** torch.randn(values // 2)
    gradient[::50] = 0
    if step < 3:
        gradient[BLOCK : 2 * BLOCK] = 0
    return gradient.to(dtype)


def close(found: torch.Tensor, other: torch.Tensor, sizes: torch.Tensor | float) -> None:
    """Raise unless weights are equal but for a rounding of their type (fp32: some); `sizes` of what a change sums."""
    rounding = {torch.float32: 1e-6}.get(found.dtype, torch.finfo(found.dtype).eps)
    apart = (found.double() - other.double()).abs() - rounding * other.double().abs() - 2e-6 * sizes - 2e-7
    assert apart.max() <= 0, (found.dtype, apart.max())


def check_rule(dtype: torch.dtype, values: int) -> None:
    """Codes of several steps are those of the rule; so are the weights, up to a rounding."""
    torch.manual_seed(0)
    parameter = torch.randn(values).to(dtype)
    other, state, rule = parameter.clone(), start(values), start(values)
    for step in range(1, 6):
        gradient = gradient_of(step, values, dtype)
        if step == 4:
            gradient[[5, 700]] = torch.tensor([math.inf, math.nan], dtype=dtype)
            untouched = parameter[[5, 700]].clone()
        state["step"] += 1
        update(parameter, gradient, state, OPTIONS)
        sizes = expected(other, gradient, rule)
        if step == 4:
            assert torch.equal(parameter[[5, 700]], untouched), "gradients that are not finite change weights"
            assert state["state1"][5] == ZEROS[0] and state["state2"][700] == ZEROS[1]
        for name in ("state1", "state2"):
            apart = (state[name].int() - rule[name].int()).abs()
            assert apart.max() <= 1 and (apart == 0).float().mean() >= 0.999, (dtype, step, name, apart.max())
        for name in ("absmax1", "absmax2"):
            torch.testing.assert_close(state[name], rule[name], rtol=2e-5, atol=0)
        close(parameter, other, sizes)
        other.copy_(parameter)
        rule = {name: one.clone() if isinstance(one, torch.Tensor) else one for name, one in state.items()}


def check_cpu(dtype: torch.dtype) -> None:
    """A run that goes on with bitsandbytes' update, or ours, on the other's state learns the same.

    On a CPU, bitsandbytes looks up codes in a table of 65,536 parts of -1..1: many small values get another code, whose
    level is as near as a part is long.
    """
    torch.manual_seed(1)
    values, part = 64 * BLOCK, 2.0**-15
    parameter = torch.nn.Parameter(torch.randn(64, BLOCK).to(dtype))
    theirs = bnb.optim.AdamW8bit([parameter], **OPTIONS)
    ours = parameter.detach().clone()
    for step in range(1, 5):
        parameter.grad = torch.randn(64, BLOCK).to(dtype)
        if step > 1:  # Both begin with bitsandbytes' state of the step before.
            state = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in theirs.state[parameter].items()}
        else:
            state = {**start(values), "state1": torch.zeros(64, BLOCK, dtype=torch.uint8)}
            state["state2"] = state["state1"].clone()
        ours.copy_(parameter.detach())
        state["step"] += 1
        update(ours, parameter.grad, state, OPTIONS)
        theirs.step()
        close(ours, parameter.detach(), 0.1)
        for n, book in zip((1, 2), BOOKS, strict=True):
            scales = theirs.state[parameter][f"absmax{n}"]
            torch.testing.assert_close(state[f"absmax{n}"], scales, rtol=2e-6, atol=0)
            found, other = state[f"state{n}"].long(), theirs.state[parameter][f"state{n}"].long()
            assert (book[found] - book[other]).abs().max() <= 2 * part + 0.0145 * ((found - other).abs() == 1).any()
            large = book[other].abs() > 0.01
            assert (found - other)[large].abs().max() <= 1 and (found == other)[large].float().mean() > 0.98


def main() -> None:
    """All checks."""
    with interpreted_kernels(), torch.no_grad():
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            check_rule(dtype, 4096)
            check_rule(dtype, 37 * BLOCK + 100)
            check_cpu(dtype)
    print("equal")


if __name__ == "__main__":
    main()
