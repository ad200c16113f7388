"""Layers with adapters that read one input: together they compute what each computes by peft's code."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from lean_finetune.config.schema import Train
from lean_finetune.model.joined_adapters.calls import GatedMlp, alike_inputs, gated_mlp
from lean_finetune.model.joined_adapters.join import apart_note, joined_layers, reason_apart, why_alone
from lean_finetune.model.precision import autocast
from lean_finetune.step.loss import summed_loss
from lean_finetune.step.step_loss import TokenLoss
from tests.kit.estimate_cpu import FAMILIES
from tests.kit.loaded import load_model
from tests.kit.random_model import random_model
from tests.kit.specs import llama, padded, random_batch
from tests.kit.tiny_config import COUNTED, tiny_config
from tests.small_model import CPU, spec_of

VOCABULARY = 256
ALIKE = 1e-6
"""Relative difference of fp32 gradients that are summed in another order; of some families twice as much."""
SMALL = llama(64, 128, layers=2, heads=4, kv_heads=2, vocabulary=VOCABULARY)
SWITCHES: list[dict[str, Any]] = [
    {},
    {"grad_ckpt": True},
    {"grad_ckpt": True, "grad_ckpt_policy": "selective"},
    {"sequence_tiles": 2},
    {"compress_activations": "int8"},
]


def drawn(model: nn.Module) -> Any:
    """The model with B drawn at random, so that every gradient has a value."""
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.02)
    return model


def learnt(model: nn.Module, train: Train) -> tuple[float, torch.Tensor]:
    """The loss of a random batch, and the gradients of all adapters."""
    torch.manual_seed(5)
    batch = random_batch(padded(2, 24, 40), VOCABULARY)
    with autocast(train, "cpu"):
        loss = summed_loss(model, batch, TokenLoss(128, 40.0))
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return loss.item(), torch.cat([gradient.flatten().double() for gradient in gradients])


def of_random(config: PretrainedConfig, **changes: Any) -> tuple[float, torch.Tensor]:
    """The same of a model of random weights."""
    torch.manual_seed(0)
    train = spec_of(**changes)
    return learnt(drawn(random_model(config, train, CPU)), train)


def apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The relative difference of gradients."""
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Gemma 3", "Mistral", "Phi 3"])
def test_losses_and_gradients_are_those_of_pefts_code(family: str):
    """A product, a bias, a scale or an activation of another value."""
    config = FAMILIES[family]
    (loss, ours), (same, theirs) = (of_random(config, lora_joined=joined) for joined in ("auto", "none"))
    assert loss == pytest.approx(same, abs=ALIKE) and apart(ours, theirs) < ALIKE
    # Of a gated MLP the module itself has code of ours.
    modules = random_model(config, spec_of(fused_norms="none"), CPU).modules()
    assert sum("forward" in vars(module) for module in modules) == 2 * (4 if family == "Phi 3" else 5)


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_they_are_so_with_every_switch_of_memory(switches: dict[str, Any]):
    """An output that selective checkpointing kept and that changed, or a recomputed input of another group."""
    changes = {"method": "qlora", "lora_rslora": True, **switches}
    (loss, ours), (same, theirs) = (of_random(SMALL, lora_joined=joined, **changes) for joined in ("auto", "none"))
    assert loss == pytest.approx(same, abs=ALIKE) and 0 < apart(ours, theirs) < ALIKE


@pytest.mark.slow
@pytest.mark.parametrize("family", COUNTED)
def test_every_family_learns_what_it_learns_by_pefts_code(family: str, tmp_path: Path):
    """Code of a family that calls a layer with another input than it seems."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny_config(family)).save_pretrained(tmp_path)
    found = []
    for joined in ("auto", "none"):
        train = spec_of(lora_joined=joined)
        found.append(learnt(drawn(load_model(tmp_path, train, CPU)), train))
    (loss, ours), (same, theirs) = found
    assert loss == pytest.approx(same, abs=ALIKE) and apart(ours, theirs) < 2 * ALIKE


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_rounding_to_16_bits_is_no_coarser(method: str):
    """A sum that is rounded once more than peft's."""
    config = llama(128, 256, layers=3, heads=4, kv_heads=2, vocabulary=VOCABULARY)
    exact = of_random(config, method=method, lora_joined="none")[1]
    ours, theirs = (of_random(config, method=method, precision="bf16", lora_joined=one)[1] for one in ("auto", "none"))
    assert apart(ours, exact) <= 1.05 * apart(theirs, exact)


def adapted(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, LoraLayer)]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"lora_joined": "none"}, "train.lora.joined=none"),
        ({"lora_dropout": 0.1}, "train.lora.dropout"),
        ({"lora_dora": True}, "train.lora.dora"),
        ({"method": "int8_lora"}, "train.method=int8_lora"),
        ({"tensor_parallel": 2}, "train.tensor_parallel"),
        ({"method": "full"}, "has no adapters"),
    ],
)
def test_what_excludes_it_is_named_and_runs_pefts_code(changes: dict[str, Any], reason: str):
    """A switch that is silently without effect, or dropout that is left out."""
    train = spec_of(**changes, fused_norms="none")
    named = reason_apart(train)
    assert named is not None and reason in named
    silent = train.method == "full" or train.lora.joined == "none"
    assert apart_note(train) == (
        None if silent else f"train.lora.joined: adapters are computed by peft's code, as {named}"
    )
    model = random_model(SMALL, train, CPU)
    assert not any("forward" in vars(module) for module in model.modules())


def test_layers_are_grouped_by_their_input():
    """Layers that are left to peft's code, and an MLP that is not recognised."""
    model: Any = random_model(SMALL, spec_of(lora_joined="none"), CPU)
    model = model.get_base_model()
    found = {name for _, _, groups in joined_layers(model) for name in groups}
    assert found == {("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)}
    assert [mlp for _, mlp, _ in joined_layers(model) if mlp] == 2 * [
        GatedMlp(gate="gate_proj", up="up_proj", down="down_proj", activation="act_fn")
    ]
    assert {why_alone(layer) for layer in adapted(model)} == {None}


def test_adapters_that_are_off_or_merged_are_left_out():
    """Log-probabilities of the reference with adapters, or an effect that counts twice."""
    model: Any = drawn(random_model(SMALL, spec_of(), CPU))
    ids = torch.arange(8)[None]
    together = model(input_ids=ids).logits
    with torch.no_grad():
        alone = model(input_ids=ids).logits
    with model.disable_adapter():
        without = model(input_ids=ids).logits
    model.merge_adapter()
    merged = model(input_ids=ids).logits
    model.unmerge_adapter()
    assert (together - alone).abs().max() < 1e-5 < (together - without).abs().max()
    assert (merged - together).abs().max() < 1e-4


def test_gradients_are_not_copied():
    """A gradient that autograd clones: twice the memory of gradients for a moment, and an operation for each."""
    train = spec_of()
    model = drawn(random_model(SMALL, train, CPU))
    learnt(model, train)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    storages = {gradient.untyped_storage().data_ptr() for gradient in gradients}
    # In each of two layers: those of q, k and v; of o; of the MLP.
    assert len(storages) == 2 * 3 and len(gradients) == 2 * 7 * 2


class Block:
    """Calls in every form."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def forward(self, x: Any, other: Any = None) -> Any:
        q, k = self.q(x).view(2), self.norm(self.k(x))
        g = self.g(x) if other is None else self.h(x)
        x = x + 1
        v = self.v(x)
        if other is not None:
            v = self.w(x) + self.u(x)
        return self.o(q + k + v + g), self.p(x), self.r(x, other)


def test_calls_are_grouped_if_all_or_none_run_on_one_value():
    """A layer computed for an input that its code has changed, or that it does not read."""
    assert set(alike_inputs(Block.forward)) == {("q", "k"), ("w", "u"), ("v", "p")}
    assert gated_mlp(Block.forward) is None
