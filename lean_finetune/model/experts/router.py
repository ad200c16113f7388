"""The router of a mixture of experts: which parameters it has, and which layers beside it take no adapter."""

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lean_finetune.core.errors import UserError
from lean_finetune.model.experts.experts_forward import expert_modules


def mixture_blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module, int]]:
    """Each module that has experts as a child: its name, itself, and its number of experts."""
    modules = dict(model.named_modules())
    for name, experts in expert_modules(model):
        parent = name.rpartition(".")[0]
        yield parent, modules[parent], experts.num_experts


def router_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of the routers by name: those beside the experts with one row for each expert."""
    found = {}
    for name, block, experts in mixture_blocks(model):
        inside = {id(parameter) for _, module in expert_modules(block) for parameter in module.parameters()}
        for path, parameter in block.named_parameters():
            if id(parameter) not in inside and parameter.ndim <= 2 and len(parameter) == experts:
                found[f"{name}.{path}"] = parameter
    return found


def gates(model: nn.Module) -> set[str]:
    """Names of linear layers that choose or weigh experts: direct children of a module with experts."""
    return {
        f"{name}.{child}"
        for name, block, _ in mixture_blocks(model)
        for child, module in block.named_children()
        if isinstance(module, nn.Linear)
    }


def balancing_loss(lm: PreTrainedModel, router_logits: Any) -> torch.Tensor:
    """Transformers' auxiliary loss of a family (Fedus et al. 2021, arXiv 2101.03961, equations 4 to 6).

    It is least, and the number of chosen experts, when all experts get equally many tokens. Padding counts as tokens.

    Args:
        lm: the model.
        router_logits: those of each layer, (T, E), as its decoder returns them.

    Raises:
        UserError: the family has no such loss.
    """
    loss = getattr(sys.modules[type(lm).__module__], "load_balancing_loss_func", None)
    if loss is None or not isinstance(router_logits, tuple) or not router_logits:
        raise UserError(
            f"train.router_aux_loss: transformers has none for {lm.config.model_type}; set train.router_aux_loss=0.0"
        )
    experts = next(module.num_experts for _, module in expert_modules(lm))
    balance: torch.Tensor = loss(router_logits, experts, lm.config.get_text_config().num_experts_per_tok)
    return balance


def freeze_routers(model: nn.Module) -> None:
    """Leave the routers as they are in training."""
    for parameter in router_parameters(model).values():
        parameter.requires_grad_(False)
