"""Norms in one kernel: what they compute, which norms they are, and how many operations a layer then launches."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch._decomp.decompositions import _fused_rms_norm_backward
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

from lean_finetune.config.schema import Train
from lean_finetune.memory.predict.peak import predict
from lean_finetune.memory.predict.traced_step import TracedModel
from lean_finetune.model.norms import fused_norms
from lean_finetune.model.precision import autocast
from lean_finetune.step.loss import summed_loss
from lean_finetune.step.step_loss import TokenLoss
from tests.kit.estimate_cpu import FAMILIES
from tests.kit.random_model import random_model
from tests.kit.specs import llama, padded, random_batch
from tests.memory.common import gpu_target, setting_of
from tests.small_model import CPU, spec_of

VOCABULARY = 256
aten = torch.ops.aten


class Launches(TorchDispatchMode):
    """Counts operations that start a kernel on a GPU: those that make or change memory."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage()._cdata for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        made = [t for t in tree_iter(out) if isinstance(t, torch.Tensor)]
        new = any(t.untyped_storage()._cdata not in known for t in made)
        if (new or func._schema.is_mutable) and "empty" not in str(func) and func.namespace != "prim":
            self.count += 1
        return out


def norm_backward(grad: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """PyTorch's own definition of the kernel, which exists for CUDA alone."""
    of_input = _fused_rms_norm_backward(grad, x, [*weight.shape], rstd, weight, [True, False])[0]
    assert of_input is not None
    return of_input


@contextmanager
def kernels_of_a_gpu(launches: Launches) -> Iterator[None]:
    """Norms as on a GPU: one operation each, whatever PyTorch's code for CPUs calls."""

    def as_one(function: Any) -> Any:
        def call(*args: Any) -> Any:
            launches.count += 1
            with _disable_current_modes():
                return function(*args)

        return call

    with (
        patch.object(fused_norms, "on_gpu", lambda x: True),
        patch.object(fused_norms, "norm", as_one(fused_norms.norm)),
        patch.object(fused_norms, "norm_backward", as_one(norm_backward)),
    ):
        yield


def learnt(train: Train, model: nn.Module) -> tuple[float, torch.Tensor, int, int]:
    """Loss and gradients of a random batch, and the operations of forward and of backward."""
    torch.manual_seed(5)
    batch, forward, backward = random_batch(padded(2, 24, 40), VOCABULARY), Launches(), Launches()
    with kernels_of_a_gpu(forward), forward, autocast(train, "cpu"):
        loss = summed_loss(model, batch, TokenLoss(128, 40.0))
    with kernels_of_a_gpu(backward), backward:
        loss.backward()
    found = [parameter.grad.flatten().double() for parameter in model.parameters() if parameter.grad is not None]
    return loss.item(), torch.cat(found), forward.count, backward.count


def of_random(config: Any, **changes: Any) -> tuple[float, torch.Tensor, int, int]:
    """The same of a model of random weights."""
    torch.manual_seed(0)
    train = spec_of(**changes)
    model = random_model(config, train, CPU)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "lora_B" in name:  # Norms of weight 1 return their input.
                parameter.normal_(mean=float("norm" in name), std=0.1)
    return learnt(train, model)


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_they_compute_what_the_models_code_computes(family: str):
    """A weight that is left out, another eps, or a gradient of another norm."""
    config = FAMILIES[family]
    loss, ours, *_ = of_random(config, fused_norms="auto")
    same, theirs, *_ = of_random(config, fused_norms="none")
    assert loss == pytest.approx(same, abs=1e-6)
    assert 0 < (ours - theirs).norm() / theirs.norm() < 2e-6


def test_rounding_to_16_bits_is_no_coarser():
    """A norm that is rounded more often than the model's."""
    config = llama(128, 256, layers=3, heads=4, kv_heads=2, vocabulary=VOCABULARY)
    exact = of_random(config, fused_norms="none")[1]
    ours, theirs = (of_random(config, precision="bf16", fused_norms=one)[1] for one in ("auto", "none"))
    assert (ours - exact).norm() <= 1.05 * (theirs - exact).norm()


BARS = {("lora", False): (45, 75), ("qlora", True): (50, 120)}
"""By method and checkpointing: most operations of a layer in forward and in backward."""


@pytest.mark.parametrize(("method", "grad_ckpt"), BARS)
def test_a_layer_launches_few_kernels(method: str, grad_ckpt: bool):
    """A cast, a sum or a copy beside the products: 80 and 116 operations of a LoRA layer by peft's code."""
    counts = []
    for layers in (2, 3):
        config = llama(64, 128, layers=layers, heads=4, kv_heads=2, vocabulary=VOCABULARY)
        counts.append(of_random(config, method=method, precision="bf16", grad_ckpt=grad_ckpt)[2:])
    of_layer = tuple(more - less for less, more in zip(*counts, strict=True))
    assert of_layer[0] <= BARS[method, grad_ckpt][0] and of_layer[1] <= BARS[method, grad_ckpt][1], of_layer


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("Llama", {}, True),
        ("Gemma 3", {}, False),
        ("Llama", {"method": "full"}, False),
        ("Llama", {"fused_norms": "none"}, False),
    ],
)
def test_norms_of_other_code_and_trained_ones_keep_their_code(family: str, changes: dict[str, Any], expected: bool):
    """A weight without a gradient, or Gemma's norm, which adds 1 to its weight."""
    model = random_model(FAMILIES[family], spec_of(**changes), CPU)
    norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    assert norms and {"forward" in vars(norm) for norm in norms} == {expected}


def test_a_gpus_trace_counts_the_kernels_memory_and_a_cpus_the_models():
    """An input saved in fp32 that a GPU does not save, or a CPU's prediction that leaves it out."""
    config = llama(256, 512, layers=2, heads=4, kv_heads=2, vocabulary=VOCABULARY)
    steps = ((padded(4, 256, 1000),),)

    def peak(target: Any, choice: str) -> int:
        setting = setting_of(method="lora", precision="bf16", fused_norms=choice)
        return predict(TracedModel(config, setting, target), steps).peak.bytes

    gpu = gpu_target("A100-80GB")
    saved = peak(gpu, "none") - peak(gpu, "auto")
    assert saved >= 2 * 2 * 4 * 256 * 256 * 4  # Of each norm in two layers, an fp32 copy of its input.
