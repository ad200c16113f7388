"""Mamba's scan in chunks: the outputs and gradients of a loop over tokens, without its memory."""

import sys
from inspect import signature
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.nn import functional as F
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

from lean_finetune.model.empty_model import REPLACEMENTS, causal_class
from lean_finetune.model.recurrent.selective_scan import CHUNK_TOKENS, selective_scan
from lean_finetune.patches.of_models import use_in_family
from tests.kit.tiny_config import tiny_config

ROWS, CHANNELS, STATE, TOKENS = 2, 6, 4, 2 * CHUNK_TOKENS + 21


def by_token(x: Any, dt: Any, A: Any, B: Any, C: Any, *, D: Any, z: Any, delta_bias: Any) -> tuple[Any, Any]:
    """The definition, in fp64."""
    dt = F.softplus(dt + delta_bias[:, None])
    state = torch.zeros(ROWS, CHANNELS, STATE, dtype=torch.float64)
    outputs = []
    for t in range(x.shape[-1]):
        state = torch.exp(dt[..., t, None] * A) * state + (dt * x)[..., t, None] * B[:, None, :, t]
        outputs.append((state * C[:, None, :, t]).sum(-1))
    return (torch.stack(outputs, -1) + D[:, None] * x) * F.silu(z), state


def arguments(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Random arguments, the same values in each type."""
    torch.manual_seed(0)
    wide, narrow = (ROWS, CHANNELS, TOKENS), (ROWS, STATE, TOKENS)
    shapes = {"x": wide, "dt": wide, "B": narrow, "C": narrow, "z": wide, "D": (CHANNELS,), "delta_bias": (CHANNELS,)}
    values = {name: torch.randn(shape) for name, shape in shapes.items()}
    values["A"] = -torch.rand(CHANNELS, STATE) * 4
    return {name: value.to(dtype).requires_grad_() for name, value in values.items()}


def test_chunks_give_the_outputs_and_gradients_of_single_tokens():
    """A state that does not pass from one chunk to the next, or a gradient that does not pass back."""
    exact, found = arguments(torch.float64), arguments(torch.float32)
    expected, last = by_token(**exact)
    x = found.pop("x")
    scanned, state = selective_scan(x, **found, delta_softplus=True, return_last_state=True)
    torch.testing.assert_close(scanned, expected.float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, last.float(), rtol=1e-4, atol=1e-5)
    (expected.square().sum() + last.sum()).backward()
    (scanned.square().sum() + state.sum()).backward()
    for name, tensor in {**found, "x": x}.items():
        expected_grad: Any = exact[name].grad
        torch.testing.assert_close(tensor.grad, expected_grad.float(), rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("family", ["falcon_mamba", "jamba", "mamba", "zamba"])
def test_the_code_of_a_family_scans_in_chunks(family):
    """A function that transformers renamed: rows of 4096 tokens would be traced for minutes."""
    code: Any = sys.modules[causal_class(tiny_config(family)).__module__]
    assert code.mamba_selective_scan is selective_scan


def test_kernels_of_other_packages_are_not_called(monkeypatch):
    """An installed package whose kernels need a GPU: every trace of a hybrid failed."""

    def double(x: int) -> int:
        return 2 * x

    package: Any = ModuleType("fast_kernels")
    code: Any = ModuleType("transformers.models.hybrid")
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, code.__name__, code)
    package.double = Mock(side_effect=RuntimeError("no GPU"), __signature__=signature(double))
    code.double = use_kernel_func_from_hub_with_fallback("double", package.__name__)(double)
    with pytest.raises(RuntimeError, match="no GPU"):
        code.double(3)
    use_in_family(type("Hybrid", (), {"__module__": code.__name__}), REPLACEMENTS)
    assert code.double(3) == 6
