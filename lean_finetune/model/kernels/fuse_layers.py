"""Let layers run their rotary embedding and SwiGLU by the kernels of this package (train.fused_kernels: auto).

Only functions with the statements of Llama's are replaced, so that the kernels compute what the family's code computes.
Elsewhere than on a GPU with these kernels, the replaced functions call the family's code.
"""

from collections.abc import Callable, Iterator
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers.models.llama import modeling_llama

from lean_finetune.config.schema import Train
from lean_finetune.model.attention.kernels import gpu_capability
from lean_finetune.model.kernels.family_code import same_code
from lean_finetune.model.kernels.layer_ops import Rotate, SiluMul
from lean_finetune.model.kernels.triton_kernels import OLDEST_GPU, has_triton_kernels
from lean_finetune.model.recurrent.packed_layers import with_global
from lean_finetune.patches.of_models import FUSED_LAYERS

ROTARY = "apply_rotary_pos_emb"
"""The function of the rotary embedding in a family's code."""
SILU = ("SiLU", "SiLUActivation")
"""Classes of PyTorch and transformers for the activation."""


def runs_kernels(x: torch.Tensor) -> bool:
    """Whether the kernels run on the device of a tensor, or on the one that it is traced for."""
    if x.device.type == "cuda":
        return has_triton_kernels(x.device)
    capability = gpu_capability(x)
    return capability is not None and capability >= OLDEST_GPU


def why_plain(train: Train) -> str | None:
    """Why no layer of a run has these kernels; None if layers may."""
    if train.fused_kernels != "auto":
        return f"train.fused_kernels={train.fused_kernels}"
    if train.compress_activations != "none" or train.sequence_tiles is not None:
        return "train.compress_activations and sequence_tiles change the same code"
    if max(train.context_parallel, train.tensor_parallel, train.pipeline_stages) > 1:
        return "rows or layers are divided among GPUs"
    return None


def fuse_layers(model: nn.Module, train: Train) -> None:
    """Replace the forward methods of a model's gated MLPs and attention layers that have Llama's code."""
    if why_plain(train) is not None:
        return
    for module, method in _replaced(model):
        FUSED_LAYERS.give_method(module, MethodType(method, module))


def fused_parts(model: nn.Module) -> set[str]:
    """What of a model the kernels can run: "rotary embedding", "SwiGLU"."""
    return {"SwiGLU" if method is _mlp else "rotary embedding" for _, method in _replaced(model)}


def _replaced(model: nn.Module) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
    """Modules with Llama's code, each with its new forward method."""
    for module in model.modules():
        if "forward" in vars(module):  # Something else has replaced it.
            continue
        forward = type(module).forward
        if type(getattr(module, "act_fn", None)).__name__ in SILU and same_code(
            forward, modeling_llama.LlamaMLP.forward
        ):
            yield module, _mlp
        elif _calls_llamas_rotary(forward):
            yield module, _with_rotary(forward)


@cache
def _with_rotary(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward method of attention layers that rotates by the kernel where it can."""
    own = forward.__globals__[ROTARY]

    def rotary(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *more: Any) -> Any:
        whole = (query.ndim, key.ndim, cos.ndim) == (4, 4, 3) and cos.shape[-1] == query.shape[-1] == key.shape[-1]
        if more or not whole or not runs_kernels(query):
            return own(query, key, cos, sin, *more)
        return Rotate.apply(query, key, cos, sin)

    return with_global(forward, ROTARY, rotary)


def _mlp(self: Any, x: torch.Tensor) -> torch.Tensor:
    """`LlamaMLP.forward`."""
    output: torch.Tensor
    if not runs_kernels(x):
        output = type(self).forward(self, x)
        return output
    gate, up = self.gate_proj(x), self.up_proj(x)
    product = SiluMul.apply(gate, up) if gate.dtype == up.dtype else self.act_fn(gate) * up
    output = self.down_proj(product)
    return output


@cache
def _calls_llamas_rotary(forward: Any) -> bool:
    """Whether a method calls functions of the rotary embedding that have the statements of Llama's."""
    code = getattr(forward, "__code__", None)
    if code is None or code.co_freevars or ROTARY not in code.co_names:
        return False
    names = forward.__globals__
    return all(same_code(names.get(name), getattr(modeling_llama, name)) for name in (ROTARY, "rotate_half"))
