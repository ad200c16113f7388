"""Let layers with adapters that read one input compute together (train.lora.joined).

`joined_layers` decides once, from the model's modules and the source of their forward methods. What it leaves out goes
on with peft's code: `train` may exclude all layers, and a layer's kind itself alone. Names, parameters and saved files
do not change.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import PreTrainedModel

from lean_finetune.config.schema import Train
from lean_finetune.core.optional_bitsandbytes import bnb
from lean_finetune.model.joined_adapters.calls import GatedMlp, alike_inputs, gated_mlp
from lean_finetune.model.joined_adapters.products import ACTIVATIONS, Activation, Group, Joined, JoinedMlp
from lean_finetune.model.kernels.fuse_layers import why_plain
from lean_finetune.patches.of_models import JOINED_ADAPTERS
from lean_finetune.pinning.adapter_files import ADAPTER

KEY = "train.lora.joined"
ACTIVATION_CLASSES = {"SiLUActivation": "silu", "SiLU": "silu", "GELUActivation": "gelu", "GELUTanh": "gelu_tanh"}
"""Classes of transformers and PyTorch, and the function that they compute."""


def reason_apart(train: Train) -> str | None:
    """Why no layer of a run computes together with others; None if layers may."""
    if not train.adapted:
        return f"train.method={train.method} has no adapters"
    if train.lora.joined == "none":
        return f"{KEY}=none"
    if train.method == "int8_lora":
        return "train.method=int8_lora multiplies by bitsandbytes' own code"
    if train.lora.dropout:
        return "train.lora.dropout gives each layer another input"
    if train.lora.dora:
        return "train.lora.dora scales the sum of a layer and its adapter"
    if train.tensor_parallel > 1:
        return "train.tensor_parallel divides the adapters"
    return None


def apart_note(train: Train) -> str | None:
    """A line on adapters that peft's code computes although they may be joined; None for other runs."""
    reason = reason_apart(train)
    if reason is None or not train.adapted or train.lora.joined == "none":
        return None
    return f"{KEY}: adapters are computed by peft's code, as {reason}"


@dataclass(kw_only=True, eq=False)
class _Layers:
    """Adapted layers of one input, and the outputs that wait for the call of their layer."""

    layers: list[Any]
    group: Group
    input: torch.Tensor | None = None
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, layers: list[Any], *, in_place: bool) -> "_Layers":
        """These layers, in the order of their calls."""
        A, B = ([getattr(layer, f"lora_{side}")[ADAPTER] for layer in layers] for side in "AB")
        group = Group(
            bases=[layer.get_base_layer() for layer in layers],
            A=A,
            B=B,
            scales=[layer.scaling[ADAPTER] for layer in layers],
            ranks=[one.out_features for one in A],
            in_place=in_place,
        )
        return cls(layers=layers, group=group)

    def together_on(self, x: torch.Tensor) -> bool:
        """Whether to compute together: for backward alone, with all adapters in use, converted by autocast alone.

        Without backward, losses and logits are those of peft's code to the last bit, as in stage evaluate.
        """
        if not torch.is_grad_enabled() or any(layer.disable_adapters or layer.merged for layer in self.layers):
            return False
        return torch.is_autocast_enabled(x.device.type) or self.group.A[0].weight.dtype == x.dtype

    def forward(self, number: int, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The output of layer `number`; the call of the first computes those of all."""
        if self.input is x and number in self.outputs:
            output = self.outputs.pop(number)
            if not self.outputs:
                self.input = None
            return output
        if number or args or kwargs or not self.together_on(x):
            layer = self.layers[number]
            alone: torch.Tensor = type(layer).forward(layer, x, *args, **kwargs)
            return alone
        first, *others = Joined.apply(self.group, _as_multiplied(x), *self.group.parameters())
        if others:
            self.input, self.outputs = x, dict(enumerate(others, 1))
        return first


@dataclass(kw_only=True, eq=False)
class _Mlp:
    """A gated MLP of adapted layers."""

    module: nn.Module
    gate_up: _Layers
    down: _Layers
    activation: Activation

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Its output."""
        if not (self.gate_up.together_on(hidden) and self.down.together_on(hidden)):
            alone: torch.Tensor = type(self.module).forward(self.module, hidden)
            return alone
        gate_up, down = self.gate_up.group, self.down.group
        parameters = (*gate_up.parameters(), *down.parameters())
        output: torch.Tensor = JoinedMlp.apply(gate_up, down, self.activation, _as_multiplied(hidden), *parameters)
        return output


def _as_multiplied(x: torch.Tensor) -> torch.Tensor:
    """An input in the type of its product."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def join_adapters(model: nn.Module, train: Train) -> None:
    """Replace the forward methods of a model's adapted layers, and of MLPs of them. Call before tiles wrap MLPs."""
    if reason_apart(train) is not None:
        return
    # Selective checkpointing keeps outputs of the frozen layers, which must not change afterwards.
    in_place = not (train.grad_ckpt and train.grad_ckpt_policy == "selective")
    # Liger's kernel computes its own product, and compression needs what autograd saves for single operations.
    whole_mlps = train.fused_kernels != "liger" and train.compress_activations == "none"
    for module, mlp, groups in joined_layers(model):
        if mlp is not None and whole_mlps:
            gate_up = _Layers.of([getattr(module, mlp.gate), getattr(module, mlp.up)], in_place=in_place)
            down = _Layers.of([getattr(module, mlp.down)], in_place=in_place)
            activation = _activation(module, mlp)
            if activation is ACTIVATIONS["silu"]:
                activation = activation._replace(kernels=why_plain(train) is None)
            JOINED_ADAPTERS.give_method(
                module, _Mlp(module=module, gate_up=gate_up, down=down, activation=activation).forward
            )
            continue
        for names in groups:
            together = _Layers.of([getattr(module, name) for name in names], in_place=in_place)
            for number, layer in enumerate(together.layers):
                JOINED_ADAPTERS.give_method(layer, partial(together.forward, number))


def joined_layers(model: nn.Module) -> Iterator[tuple[nn.Module, GatedMlp | None, list[tuple[str, ...]]]]:
    """Modules with adapted layers that compute by this code, the MLP that each is, and its layers by their input."""
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    for module in list(model.modules()):
        names = [name for name, child in module.named_children() if child is not head and not why_alone(child)]
        if not names or isinstance(module, LoraLayer):
            continue
        forward = type(module).forward
        own_code = "forward" not in vars(module)
        calls = alike_inputs(forward) if own_code else ()
        found = [tuple(name for name in group if name in names) for group in calls]
        groups = [group for group in found if len(group) > 1 and len({*group}) == len(group)]
        # A layer of two groups is called twice.
        shared = [name for group in groups for name in group]
        groups = [group for group in groups if all(shared.count(name) == 1 for name in group)]
        alone = [(name,) for name in names if not any(name in group for group in groups)]
        mlp = gated_mlp(forward) if own_code else None
        if mlp is not None and (not {mlp.gate, mlp.up, mlp.down} <= {*names} or _activation(module, mlp) is None):
            mlp = None
        yield module, mlp, [*groups, *alone]


def _activation(module: nn.Module, mlp: GatedMlp) -> Any:
    """The activation of an MLP; None if its gradient is not known here."""
    name = ACTIVATION_CLASSES.get(type(getattr(module, mlp.activation)).__name__)
    return None if name is None else ACTIVATIONS[name]


def why_alone(layer: nn.Module) -> str | None:
    """Why a module computes by its own code; None for an adapted layer that can compute with others."""
    if not isinstance(layer, LoraLayer):
        return "has no adapter"
    base = layer.get_base_layer()
    if type(base) not in (nn.Linear, bnb.nn.Linear4bit):
        return f"is a {type(base).__name__}"
    if "forward" in vars(layer) or "forward" in vars(base):
        return "has code of its own"
    if list(layer.lora_A) != [ADAPTER] or layer.lora_variant or layer.lora_bias[ADAPTER]:
        return "has another kind of adapter"
    if not isinstance(layer.lora_dropout[ADAPTER], nn.Identity):
        return "drops values of its input"
    return None
