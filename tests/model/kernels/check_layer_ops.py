"""The gated activation and the rotation in Triton's interpreter, against transformers' code and its gradients.

`test_kernels.py` runs this in a process with TRITON_INTERPRET=1.
"""

import copy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from lean_finetune.model.kernels import fuse_layers, layer_ops
from lean_finetune.model.kernels.layer_ops import Rotate, SiluMul, silu_mul_gradients_
from tests.kit.interpreted_triton import interpreted_kernels
from tests.kit.tiny_config import tiny_config
from tests.small_model import save_small_llama, spec_of
from tests.step.common import run, split

HALF_TYPES = (torch.bfloat16, torch.float16)
ROWS, TOKENS = 2, 7


def on_cpu() -> None:
    """Let the CPU run the kernels, which in this process Triton interprets."""
    for name, launch in layer_ops.LAUNCHES.items():
        layer_ops._library.impl(name, launch, "CPU")


def close(found: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor) -> None:
    """Raise unless a result is exact in fp32, and in 16 bits rounded once and as near to it as the plain code's."""
    if found.dtype == torch.float32:
        torch.testing.assert_close(found, exact, rtol=2e-6, atol=2e-6)
        return
    torch.testing.assert_close(found, exact.to(found.dtype), rtol=1.01 * torch.finfo(found.dtype).eps, atol=1e-6)
    assert (found.float() - exact).norm() <= 1.001 * (plain.float() - exact).norm()


def check_silu_mul(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """The product and its gradients, also with that of gate in place."""
    torch.manual_seed(0)
    values = [torch.randn(shape).to(dtype) for _ in range(3)]
    results: dict[str, list[Any]] = {}
    for name, kind in (("exact", torch.float32), ("plain", dtype), ("found", dtype)):
        gate, up = (one.to(kind, copy=True).requires_grad_() for one in values[:2])
        product = SiluMul.apply(gate, up) if name == "found" else F.silu(gate) * up
        product.backward(values[2].to(kind))
        results[name] = [product.detach(), gate.grad, up.grad]
    for found, exact, plain in zip(results["found"], results["exact"], results["plain"], strict=True):
        close(found, exact, plain)
    up_grad = silu_mul_gradients_(values[2], values[0], values[1])  # Now values[2] is the gradient of gate.
    assert torch.equal(values[2], results["found"][1]) and torch.equal(up_grad, results["found"][2])


def check_rotate(dtype: torch.dtype, heads: tuple[int, int], size: int, *, shared: bool, transposed: bool) -> None:
    """Queries and keys of rows with angles of their own or not, and gradients in another order than theirs."""
    torch.manual_seed(0)
    angles = torch.randn(1 if shared else ROWS, TOKENS, size)  # Both halves differ, as no model's do.
    values = [torch.randn(ROWS, TOKENS, count, size).to(dtype) for count in heads]
    grads = [torch.randn(ROWS, count, TOKENS, size).to(dtype) for count in heads]
    if transposed:
        grads = [one.transpose(1, 2).contiguous().transpose(1, 2) for one in grads]
    results = {}
    for name, kind in (("exact", torch.float32), ("plain", dtype), ("found", dtype)):
        cos, sin = (one.to(dtype).to(kind) for one in (angles.cos(), angles.sin()))
        query, key = (one.to(kind, copy=True).transpose(1, 2).requires_grad_() for one in values)
        rotated = Rotate.apply(query, key, cos, sin) if name == "found" else apply_rotary_pos_emb(query, key, cos, sin)
        torch.autograd.backward(rotated, [one.to(kind) for one in grads])
        results[name] = [*(one.detach() for one in rotated), query.grad, key.grad]
        if name == "found":
            assert all(one.transpose(1, 2).is_contiguous() for one in results[name][:2])
    for found, exact, plain in zip(results["found"], results["exact"], results["plain"], strict=True):
        close(found, exact, plain)


def check_model(config: PretrainedConfig, grad_ckpt: bool) -> None:
    """The loss of a model and all its gradients, with its code and with the kernels, in fp32."""
    torch.manual_seed(0)
    tokens = torch.randint(config.vocab_size, (2, 9))
    plain = AutoModelForCausalLM.from_config(config).train()
    fused = copy.deepcopy(plain)
    fuse_layers.fuse_layers(fused, spec_of(method="full", fused_kernels="auto"))
    assert fuse_layers.fused_parts(plain) == {"SwiGLU", "rotary embedding"}
    losses = []
    for model in (plain, fused):
        if grad_ckpt:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        losses.append(loss.detach())
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
    for one, other in zip(fused.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert (one.grad - other.grad).norm() <= 1e-6 * max(other.grad.norm().item(), 1e-3)


def check_steps(directory: Path, method: str) -> None:
    """Losses and gradient norms of some steps, in fp32: adapters that compute together have a function of their own."""
    found, expected = (
        run(directory, split([8]), method=method, fused_kernels=kernels)[0] for kernels in ("auto", "none")
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.loss, other.loss, rtol=1e-5, atol=0)
        torch.testing.assert_close(one.grad_norm, other.grad_norm, rtol=1e-5, atol=0)


def main() -> None:
    """All checks."""
    on_cpu()
    fuse_layers.runs_kernels = lambda x: True
    with interpreted_kernels():
        for family in ("llama", "qwen3", "granite"):
            check_model(tiny_config(family), grad_ckpt=family == "qwen3")
        with TemporaryDirectory() as directory:
            save_small_llama(Path(directory), dtype=torch.float32)
            for method in ("full", "lora"):
                check_steps(Path(directory), method)
    with interpreted_kernels():
        for dtype in (torch.float32, *HALF_TYPES):
            check_silu_mul(dtype, (3, 5, 999))
            check_silu_mul(dtype, (2, 1024))
            check_rotate(dtype, (4, 2), 64, shared=True, transposed=False)
            check_rotate(dtype, (33, 1), 128, shared=False, transposed=True)
            check_rotate(dtype, (3, 3), 96, shared=True, transposed=True)
    print("equal")


if __name__ == "__main__":
    main()
