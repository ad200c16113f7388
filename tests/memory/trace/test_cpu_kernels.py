"""What the CPU's kernels allocate beside their results, against the allocator's own events."""

from itertools import accumulate
from typing import Any

import pytest
import torch

from lean_finetune.memory.trace.cpu_kernels import cpu_rules
from lean_finetune.train.monitor.measured_peak import MEMORY_EVENT, memory_profile

aten = torch.ops.aten
CASES: list[tuple[type[torch.nn.Module], tuple[int, ...], tuple[int, ...]]] = [
    (torch.nn.Conv2d, (14, 14), (2, 3, 56, 70)),
    (torch.nn.Conv3d, (2, 16, 16), (12, 3, 2, 16, 16)),
]
"""Of towers: kind, pixels of a patch, shape of the input."""


def highest_bytes(profiler: Any) -> int:
    """The most bytes in use at once."""
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == MEMORY_EVENT]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())), default=0)


@pytest.mark.parametrize("onednn", [True, False])
@pytest.mark.parametrize(("kind", "patch", "shape"), CASES)
def test_patches_are_embedded_with_as_much_memory_as_the_rule_says(kind, patch, shape, onednn):
    """Forward of a mixture of Qwen3-VL was predicted 0.6 % too low: it is highest while patches are embedded."""
    embedding, x = kind(3, 32, patch, stride=patch), torch.randn(shape)
    with torch.backends.mkldnn.flags(enabled=onednn, allow_tf32=None):
        arguments: tuple[Any, ...] = (
            x,
            embedding.weight,
            embedding.bias,
            patch,
            [0] * len(patch),
            [1] * len(patch),
            False,
            [0],
            1,
        )
        with torch.no_grad(), memory_profile() as profiler:
            out = aten.convolution.default(*arguments)
        beside = cpu_rules().workspaces_first[aten.convolution.default](*arguments)
        assert highest_bytes(profiler) == out.nbytes + beside > out.nbytes
        if onednn:
            return
        grad = torch.ones_like(out)
        arguments = (grad, *arguments[:2], [32], *arguments[3:], [False, True, True])
        with memory_profile() as profiler:
            made = aten.convolution_backward.default(*arguments)
        beside = cpu_rules().workspaces[aten.convolution_backward.default](*arguments)
        assert highest_bytes(profiler) == sum(one.nbytes for one in made if one is not None) + beside


@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16, None])
@pytest.mark.parametrize("values", [torch.float32, torch.bfloat16])
def test_the_statistics_of_a_layer_norm_have_the_type_that_the_rule_says(values, weight):
    """A SmolVLM whose tower is trained beside adapters in 16 bits was predicted 0.27 % too low."""
    if (values, weight) == (torch.float32, torch.bfloat16):
        pytest.skip("PyTorch refuses weights of fewer bits than the values")
    given = None if weight is None else torch.ones(8, dtype=weight)
    arguments: tuple[Any, ...] = (torch.ones(2, 3, 8, dtype=values), [8], given, given, 1e-5)
    out = aten.native_layer_norm.default(*arguments)
    made = cpu_rules().expansions[aten.native_layer_norm.default](*arguments)
    assert [(one.shape, one.stride(), one.dtype) for one in made] == [
        (one.shape, one.stride(), one.dtype) for one in out
    ]


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [20, 96, 192, 768])
def test_flash_attention_needs_as_much_memory_as_the_rules_say(tokens, dtype, heads_first):
    """Backward of a GPT-NeoX on 8-bit weights with compressed activations was predicted 0.86 % too low.

    A layer's backward is then highest inside attention, whose tiles nothing counted.
    """
    flash = aten._scaled_dot_product_flash_attention_for_cpu
    q, k, v = (torch.randn(1, tokens, 2, 8, dtype=dtype).transpose(1, 2) for _ in range(3))
    grad = torch.randn(1, 2, tokens, 8, dtype=dtype) if heads_first else torch.randn_like(q)
    with torch.backends.mkldnn.flags(enabled=False, allow_tf32=None):
        with memory_profile() as profiler:
            out = flash.default(q, k, v)
        beside = cpu_rules().workspaces[flash.default](q, k, v)
        assert highest_bytes(profiler) == sum(one.nbytes for one in out) + beside
        with memory_profile() as profiler:
            made = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(grad, q, k, v, *out, 0.0, False)
    rule: Any = cpu_rules().workspaces[aten._scaled_dot_product_flash_attention_for_cpu_backward.default]
    beside = sum(rule(grad, q, k, v, *out, 0.0, False))
    assert highest_bytes(profiler) == sum(one.nbytes for one in made) + beside


@pytest.mark.parametrize("second", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
def test_operands_of_two_types_need_as_much_memory_as_the_rules_say(name, first, second):
    """Weights in 8 bits are unpacked by `mul_` with fp32 scales: wide layers were predicted 26 % too low in bf16."""
    x, scales = torch.ones(64, 32, dtype=first), torch.ones(64, 1, dtype=second)
    for in_place in ("", "_"):
        function = getattr(aten, name + in_place).Tensor
        with memory_profile() as profiler:
            out = function(x, scales)
        made = 0 if in_place else out.nbytes
        rule: Any = cpu_rules().workspaces[function]
        assert highest_bytes(profiler) == made + rule(x, scales), in_place
        del out  # Not freed inside the next profile.
