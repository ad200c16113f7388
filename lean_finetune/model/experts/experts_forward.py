"""Experts of a mixture: their forward pass with memory that does not depend on the routing.

transformers stacks the experts of a layer in one parameter for each projection and calls a registered function. Ours
multiplies all rows of an expert together (see `grouped_products`), reads packed weights, and adds low-rank adapters as
products of rows, x A_e B_e, where peft would build the change of all experts' weights.

Shape legend: T tokens, C experts chosen for a token, S = T × C rows, E experts, D hidden size.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from lean_finetune.model.experts.expert_load import count_rows
from lean_finetune.model.experts.grouped_products import combine, dispatch, grouped_linear
from lean_finetune.model.experts.packed_weights import packing_of

EXPERTS = "lean_grouped"
"""Name of our function for transformers."""
UP_PROJECTIONS = ("gate_up_proj", "up_proj")
DOWN_PROJECTION = "down_proj"
ADAPTERS = "_expert_adapters"
"""Attribute of a module of experts: its active adapters by parameter."""
TRANSPOSED = "_is_transposed_unknown_to_peft"
"""Attribute of a module of experts whose weights are transposed, though transformers' class does not say so to peft."""


def experts_forward(
    module: Any, hidden_TD: torch.Tensor, experts_TC: torch.Tensor, weights_TC: torch.Tensor
) -> torch.Tensor:
    """The weighted sum of each token's experts, (T, D) → (T, D); a choice beyond the experts counts for nothing."""
    weights_TC = weights_TC.masked_fill(experts_TC >= module.num_experts, 0.0)
    experts_TC = experts_TC.clamp(max=module.num_experts - 1)
    experts_S, order_S = experts_TC.flatten().sort(stable=True)
    row_of_S = torch.empty_like(order_S)
    row_of_S[order_S] = torch.arange(len(order_S), device=order_S.device)
    all_experts = torch.arange(module.num_experts, device=experts_S.device)
    ends_E = torch.searchsorted(experts_S, all_experts, right=True, out_int32=True)
    count_rows(module, ends_E)
    up_name, _ = expert_parameters(module)
    dtype = _compute_dtype(hidden_TD, getattr(module, up_name))
    rows = dispatch(hidden_TD.to(dtype), order_S, row_of_S)
    up = _linear(module, up_name, rows, experts_S, ends_E)
    del rows
    activated = module._apply_gate(up) if module.has_gate else module.act_fn(up)
    del up
    down = _linear(module, DOWN_PROJECTION, activated, experts_S, ends_E)
    if getattr(module, "has_post_expert_norm", False):  # transformers 5.17 has no such norm.
        down = module.post_expert_norm(down).to(down.dtype)
    return combine(down, weights_TC, order_S, row_of_S).to(hidden_TD.dtype)


def _linear(module: Any, name: str, rows: torch.Tensor, experts_S: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """One projection of all experts, with its adapter and bias."""
    weights, packing = getattr(module, name), packing_of(module, name)
    dtype = _compute_dtype(rows, weights)
    rows = rows.to(dtype)
    plain = weights if packing is not None else weights.to(dtype)
    out = grouped_linear(rows, plain, ends_E, transposed=is_transposed(module), packing=packing)
    if (adapter := getattr(module, ADAPTERS, {}).get(name)) is not None:
        low = grouped_linear(rows, adapter.A_ERK.to(dtype), ends_E, transposed=False)
        out = out + adapter.scale * grouped_linear(low, adapter.B_ENR.to(dtype).contiguous(), ends_E, transposed=False)
    if module.has_bias:
        out = out + getattr(module, f"{name}_bias").to(dtype)[experts_S]
    return out


def _compute_dtype(rows: torch.Tensor, weights: torch.Tensor) -> torch.dtype:
    """Autocast's type, as for linear layers; without autocast the weights' type, or the rows' if weights are packed."""
    device = rows.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return weights.dtype if weights.dtype.is_floating_point else rows.dtype


def expert_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Modules of experts that run through `experts_forward`, by name."""
    return ((name, module) for name, module in model.named_modules() if is_grouped(module))


def has_experts(model: nn.Module) -> bool:
    """Whether a model has such modules."""
    return any(True for _ in expert_modules(model))


def is_grouped(module: nn.Module) -> bool:
    """Whether transformers stacks all experts of a layer in this module, and calls a registered function for them."""
    return hasattr(module, "is_concatenated")


def is_transposed(module: Any) -> bool:
    """Whether the weights of a module of experts are (E, K, N), for K inputs and N outputs, and not (E, N, K)."""
    return bool(getattr(module, TRANSPOSED, module.is_transposed))


def expert_parameters(module: Any) -> tuple[str, str]:
    """Names of the two projections of a module of experts."""
    return UP_PROJECTIONS[0 if module.has_gate else 1], DOWN_PROJECTION


def experts_option(kind: type[PreTrainedModel]) -> dict[str, str]:
    """The option that gives a model of this class our forward of experts; empty if it has none."""
    return {"experts_implementation": EXPERTS} if kind._can_set_experts_implementation() else {}


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, experts_forward)
