"""Operations of layers as a trace sees them: shapes, orders in memory, and what they keep for backward."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from lean_finetune.model.kernels.layer_ops import Rotate, SiluMul, _like_heads, silu_mul_gradients_

BF16 = torch.bfloat16


@contextmanager
def allocated_on_cpu() -> Iterator[None]:
    """A context in which the operations run on a CPU, and allocate their results alone, which are 0."""
    library = torch.library.Library("lean_finetune", "IMPL")
    like = torch.zeros_like
    library.impl("silu_mul", lambda gate, up: like(gate), "CPU")
    library.impl("silu_mul_gradients_", lambda grad, gate, up: like(up), "CPU")
    library.impl("silu_mul_gradients", lambda grad, gate, up: (like(gate), like(up)), "CPU")
    library.impl("rotate", lambda query, key, *angles: (_like_heads(query).zero_(), _like_heads(key).zero_()), "CPU")
    try:
        yield
    finally:
        library._destroy()


def traced(function, *inputs: torch.Tensor) -> tuple[list[torch.Tensor], set[int]]:
    """The results of a function and the gradients of its inputs, and the ids of the tensors that it keeps."""
    kept: set[int] = set()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.add(id(tensor.untyped_storage()))
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        outs = function(*inputs)
    outs = outs if isinstance(outs, tuple) else (outs,)
    torch.autograd.backward(outs, [torch.empty_like(out) for out in outs])
    return [*outs, *(one.grad for one in inputs if one.grad is not None)], kept


def layout(tensors: list[torch.Tensor]) -> list[tuple]:
    return [(one.shape, one.stride(), one.dtype) for one in tensors]


def test_the_gated_activation_keeps_its_inputs_alone():
    """A trace with other tensors than the kernels allocate; three tensors kept where two are enough."""
    with FakeTensorMode():
        gate, up = (torch.empty(2, 3, 64, dtype=BF16, requires_grad=True) for _ in range(2))
        found, kept = traced(SiluMul.apply, gate, up)
        expected, more = traced(lambda gate, up: F.silu(gate) * up, gate, up)
        assert layout(found) == layout(expected)
        assert kept == {id(one.untyped_storage()) for one in (gate, up)} and len(more) == 3
        assert layout([silu_mul_gradients_(torch.empty_like(gate), gate, up)]) == layout([up])


def test_the_rotation_keeps_the_angles_alone():
    """As above; queries and keys in another order than a layer's product has would be copied."""
    with FakeTensorMode():
        cos, sin = (torch.empty(1, 5, 32, dtype=BF16) for _ in range(2))
        query, key = (
            torch.empty(2, 5, heads * 32, dtype=BF16, requires_grad=True).view(2, 5, heads, 32).transpose(1, 2)
            for heads in (4, 2)
        )
        for one in (query, key):
            one.retain_grad()
        found, kept = traced(Rotate.apply, query, key, cos, sin)
        kept_angles = {id(one.untyped_storage()) for one in (cos, sin)}
        assert kept == kept_angles
        query.grad = key.grad = None
        expected, _ = traced(apply_rotary_pos_emb, query, key, cos, sin)
        assert layout(found) == layout(expected)


def test_a_cpu_has_no_such_operation():
    """Wrong or slow results where the kernels do not run."""
    with pytest.raises(NotImplementedError):
        SiluMul.apply(torch.ones(4), torch.ones(4))
