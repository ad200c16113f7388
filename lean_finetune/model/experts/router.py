"""The router of a mixture of experts: which parameters it has, and which layers beside it take no adapter."""

import sys
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from lean_finetune.core.errors import UserError
from lean_finetune.model.experts.experts_forward import expert_modules

ROUTERS = ("gate", "router")
"""Names of routers in transformers, beside `experts`."""


def router_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The routers by name.

    Raises:
        UserError: a layer has experts and no router of a known name.
    """
    modules, found = dict(model.named_modules()), {}
    for name, _ in expert_modules(model):
        block = name.rpartition(".")[0]
        routers = {
            f"{block}.{child}": modules[f"{block}.{child}"] for child in ROUTERS if f"{block}.{child}" in modules
        }
        if not routers:
            raise UserError(f"model.name: the router beside {name} is of an unknown kind; choose another model")
        found.update(routers)
    return found


def router_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of the routers by name."""
    return {
        f"{name}.{path}": parameter
        for name, router in router_modules(model).items()
        for path, parameter in router.named_parameters()
    }


def gates(model: nn.Module) -> set[str]:
    """Paths of linear layers that choose experts, or weigh a shared one: they take no adapter."""
    modules = dict(model.named_modules())
    inside = {
        f"{name}.{path}".removesuffix(".")
        for name, router in router_modules(model).items()
        for path, module in router.named_modules()
        if isinstance(module, nn.Linear)
    }
    blocks = {name.rpartition(".")[0] for name, _ in expert_modules(model)}
    weighing = {
        f"{block}.{child}"
        for block in blocks
        for child, module in modules[block].named_children()
        if isinstance(module, nn.Linear) and module.out_features == 1
    }
    return inside | weighing


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
    chosen = getattr(lm.config.get_text_config(), "num_experts_per_tok", None)
    if loss is None or chosen is None or not isinstance(router_logits, tuple) or not router_logits:
        raise UserError(
            f"train.router_aux_loss: transformers has none for {lm.config.model_type}; set train.router_aux_loss=0.0"
        )
    experts = next(module.num_experts for _, module in expert_modules(lm))
    balance: torch.Tensor = loss(router_logits, experts, chosen)
    return balance


def prepare_routers(model: PreTrainedModel, choice: Literal["frozen", "trained"]) -> None:
    """Freeze the routers unless they are trained.

    Raises:
        UserError: they are to be trained and the model has none.
    """
    routers = router_parameters(model)
    if choice == "trained" and not routers:
        raise UserError(f"train.router: {model.config.model_type} has no experts; got trained; set train.router=frozen")
    if choice == "frozen":
        for parameter in routers.values():
            parameter.requires_grad_(False)
