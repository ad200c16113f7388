"""Which weights tensor parallelism divides: transformers' plan for a family (base_model_tp_plan), and what it needs."""

import re
from dataclasses import dataclass

from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from lean_finetune.core.errors import UserError
from lean_finetune.model.model_config import layer_settings

OUTPUTS, INPUTS = "colwise", "rowwise"
"""A process has a part of a layer's outputs (rows of its weight) or of its inputs (columns of its weight)."""
WHOLE = "replicated_with_grad_allreduce"
"""Every process has the complete weight, and applies it to its own heads: norms of queries and keys."""
HEADS = ("num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """The modules of a model that tensor parallelism changes; a linear layer with an adapter counts as one module."""

    outputs: tuple[nn.Module, ...]
    """Each process computes a part of their outputs. The head, divided by tokens, is not among them."""
    inputs: tuple[nn.Module, ...]
    """Each process computes with a part of their inputs; the outputs of all processes are summed."""
    blocks: tuple[nn.Module, ...]
    """The modules around them (attention, MLP): complete inputs and outputs, parts in between."""


def tensor_plan(lm: PreTrainedModel, size: int) -> TensorPlan:
    """The plan of a model, with or without adapters, for `size` processes.

    Raises:
        UserError: the family or these sizes cannot be divided so.
    """
    styles = _styles(lm.config)
    _refuse_sizes(lm.config, size)
    decoder = lm.get_decoder()
    found: dict[str, list[nn.Module]] = {OUTPUTS: [], INPUTS: [], WHOLE: []}
    blocks: dict[str, nn.Module] = {}
    for path, module in decoder.named_modules():
        style = styles.get(re.sub(r"\.\d+\.", ".*.", path))
        if style is None:
            continue
        found[style].append(module)
        block = path.rpartition(".")[0]
        blocks[block] = decoder.get_submodule(block)
        if style != WHOLE:
            _refuse_layer(path, module, style, size, lm.config.model_type)
    return TensorPlan(outputs=tuple(found[OUTPUTS]), inputs=tuple(found[INPUTS]), blocks=tuple(blocks.values()))


def base_layer(module: nn.Module) -> nn.Module:
    """The linear layer itself, without its adapter."""
    return module.get_base_layer() if isinstance(module, LoraLayer) else module


def _styles(config: PretrainedConfig) -> dict[str, str]:
    """The style of each module's path in the decoder, with `*` for a layer's number."""
    family, styles = config.model_type, getattr(config.get_text_config(), "base_model_tp_plan", None)
    if not styles:
        raise _refused(family, "transformers has no plan for it")
    if other := sorted(set(styles.values()) - {OUTPUTS, INPUTS, WHOLE}):
        what = "it has experts" if any(".experts" in path for path in styles) else f"its plan has {', '.join(other)}"
        raise _refused(family, f"{what}, which is not supported")
    return styles


def _refuse_sizes(config: PretrainedConfig, size: int) -> None:
    """Refuse heads that cannot be divided."""
    for name in HEADS:
        for count in layer_settings(config, name):
            if count is not None and count % size:
                raise UserError(
                    f"train.tensor_parallel: must divide the model's {name}={count}, since a process computes whole "
                    f"heads; got {size}; choose a divisor, or train.sharding=zero3"
                )


def _refuse_layer(path: str, module: nn.Module, style: str, size: int, family: str) -> None:
    """Refuse a layer whose outputs or inputs cannot be divided."""
    layer = base_layer(module)
    if not isinstance(layer, nn.Linear):
        raise _refused(family, f"{path} is a {type(layer).__name__}, not a linear layer")
    width = layer.out_features if style == OUTPUTS else layer.in_features
    if width % size:
        raise UserError(
            f"train.tensor_parallel: must divide the {width} {'outputs' if style == OUTPUTS else 'inputs'} of {path}; "
            f"got {size}; choose a divisor, or train.sharding=zero3"
        )


def _refused(family: str, reason: str) -> UserError:
    return UserError(
        f"train.tensor_parallel: cannot divide the layers of {family}: {reason}; set it to 1, and use "
        "train.sharding=zero3 where the model does not fit"
    )
