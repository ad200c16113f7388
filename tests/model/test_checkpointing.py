"""Activation checkpointing: which operations each policy recomputes."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_layers import GradientCheckpointingLayer

from lean_finetune.core.errors import UserError
from lean_finetune.step.loss import summed_loss
from lean_finetune.step.step_loss import TokenLoss
from tests.kit.loaded import load_model
from tests.small_model import CPU, spec_of
from tests.step.common import split

aten = torch.ops.aten


class Counted(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self):
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def backward_counts(directory, **spec) -> dict[str, int]:
    model = load_model(directory, spec_of(**spec), CPU)
    loss = summed_loss(model, split([8])[0], TokenLoss(None))
    with Counted() as counted:
        loss.backward()
    return counted.counts


def test_a_layer_in_n_is_recomputed(small_llama):
    """A policy without an effect."""
    for every, recomputed in ((2, [True, False]), (3, [True, False])):
        spec = spec_of(grad_ckpt=True, grad_ckpt_policy="every_n", grad_ckpt_every=every)
        layers = [m for m in load_model(small_llama, spec, CPU).modules() if isinstance(m, GradientCheckpointingLayer)]
        assert [layer.gradient_checkpointing for layer in layers] == recomputed


def first_recomputed(directory, count: int) -> list[bool]:
    spec = spec_of(grad_ckpt=True, grad_ckpt_policy="first_n", grad_ckpt_layers=count)
    layers = [m for m in load_model(directory, spec, CPU).modules() if isinstance(m, GradientCheckpointingLayer)]
    return [layer.gradient_checkpointing for layer in layers]


def test_the_first_layers_alone_are_recomputed(small_llama):
    """Later layers recomputed, whose activations are freed first in backward: the same time, and a higher peak."""
    assert first_recomputed(small_llama, 1) == [True, False]
    with pytest.raises(UserError, match="grad_ckpt_layers: must be below the 2 layers of the model; got 2"):
        first_recomputed(small_llama, 2)


@pytest.mark.parametrize(("method", "joined"), [("full", "none"), ("lora", "none"), ("lora", "auto")])
def test_selective_recomputes_neither_products_of_weights_nor_attention(small_llama, method, joined):
    """Products recomputed although their outputs were saved; outputs of adapters saved, which are large and cheap."""
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    plain, full, selective = (
        backward_counts(small_llama, method=method, lora_joined=joined, **changes)
        for changes in (
            {},
            {"grad_ckpt": True},
            {"grad_ckpt": True, "grad_ckpt_policy": "selective"},
        )
    )
    assert attention not in plain and full[attention] == 2 and attention not in selective
    if method == "full":
        assert selective["mm"] == plain["mm"] < full["mm"]
    else:  # In each of two layers the products of seven frozen weights, and of their adapters' A, but not of B.
        assert full["mm"] - selective["mm"] == 2 * (7 + (4 if joined == "auto" else 7))
    # Joined MLPs compute their product again in backward.
    assert selective["silu"] == full["silu"] == (4 if joined == "auto" else 2)
