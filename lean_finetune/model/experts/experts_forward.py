"""Route tokens to experts and run them: the router, its balancing loss, and how evenly tokens are spread."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import MergeModulelist
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts, Llama4TextModel, Llama4TextMoe

from lean_finetune.core.errors import UserError
from lean_finetune.model.experts.grouped_matmul import combine, dispatch, grouped_linear, packing_of
from lean_finetune.patches.of_models import LLAMA4_EXPERTS

# How evenly the tokens of a step are spread over the experts of a mixture.
#
# Each layer adds up its rows by expert on the device. Two figures are computed from them at the end of the step, so
# that no layer waits for the device. Padding at the end of rows counts, because it is computed too.
#
# Shape legend: E experts.

ROWS = "_rows_by_expert"
"""Attribute of a module of experts: its rows by expert in this step, (E,), int32."""
_counting: ContextVar[Literal["off", "on", "idle"]] = ContextVar("counting", default="off")


@contextmanager
def counting_rows(*, idle: bool) -> Iterator[None]:
    """A context of a forward pass, in which experts count their rows; those of an `idle` micro-batch as zero.

    A layer that backward recomputes is outside of it, so it is counted once.
    """
    before = _counting.set("idle" if idle else "on")
    try:
        yield
    finally:
        _counting.reset(before)


def count_rows(module: Any, ends_E: torch.Tensor) -> None:
    """Add a micro-batch's rows by expert.

    Args:
        module: of experts.
        ends_E: rows up to the end of each expert.
    """
    if (counting := _counting.get()) == "off":
        return
    rows_E = torch.zeros_like(ends_E) if counting == "idle" else ends_E.diff(prepend=ends_E.new_zeros(1))
    before = getattr(module, ROWS, None)
    setattr(module, ROWS, rows_E if before is None else before + rows_E)


def forget_rows(modules: Iterable[nn.Module]) -> None:
    """Forget the rows that experts counted in an earlier step, which may have failed."""
    for module in modules:
        module.__dict__.pop(ROWS, None)


def expert_load(
    modules: Iterable[nn.Module], sum_over_ranks: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor | None:
    """The rows of the busiest expert relative to an even share (mean of the layers), and the share of idle experts.

    Args:
        modules: of a model, after the forward passes of a step.
        sum_over_ranks: sums a tensor over all processes.

    Returns:
        Two values, fp32, on the device; None without experts.
    """
    counted = [module.__dict__.pop(ROWS) for module in modules if ROWS in module.__dict__]
    if not counted:
        return None
    rows = sum_over_ranks(torch.cat(counted))
    layers = rows.split([len(rows_E) for rows_E in counted])
    busiest = torch.stack([rows_E.max() * len(rows_E) / rows_E.sum() for rows_E in layers])
    return torch.stack([busiest.mean(), (rows == 0).float().mean()])


# Experts of a mixture: their forward pass with memory that does not depend on the routing.
#
# transformers stacks the experts of a layer in one parameter for each projection and calls a registered function. Ours
# multiplies all rows of an expert together (see `grouped_matmul`), reads packed weights, and adds low-rank adapters
# as matmuls of rows, x A_e B_e, where peft would build the change of all experts' weights.
#
# Shape legend: T tokens, C experts chosen for a token, S = T × C rows, E experts, D hidden size.

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


EXPERTS_OPTION = {"experts_implementation": EXPERTS}
"""The option that gives a model our forward of experts, also where they belong to another family inside it (InternVL
with Qwen3-MoE). Models without experts ignore it."""

ALL_EXPERTS_FUNCTIONS.register(EXPERTS, experts_forward)


# The router of a mixture of experts: which parameters it has, and which layers beside it take no adapter.

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


# Llama 4's experts in the form of other families: chosen experts alone run, and 4 or 8 bits pack them.
#
# transformers' code runs every expert on a copy of every token, multiplied by the router's score; an expert that was
# not chosen multiplies zeros and adds zeros. Here the copies of the chosen experts alone exist.
#
# Shape legend: T tokens, C experts chosen for a token, E experts, D hidden size.


class GroupedExperts(Llama4TextExperts):
    """Experts that run through `experts_forward`; the attributes are those that transformers gives other families."""

    has_gate, has_bias, has_post_expert_norm, is_transposed, is_concatenated = True, False, False, False, True
    _is_transposed_unknown_to_peft = True
    forward = experts_forward  # type: ignore[assignment]

    def _apply_gate(self, up: torch.Tensor) -> torch.Tensor:
        gate, up = up.chunk(2, dim=-1)
        return up * self.act_fn(gate)


class GroupedMoe(Llama4TextMoe):
    """A layer whose router's scores multiply the inputs of experts, where other families multiply outputs."""

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's output (T, D), and the router's logits (T, E)."""
        hidden_TD = hidden_states.reshape(-1, self.hidden_dim)
        scores_TE, logits_TE = self.router(hidden_TD)
        scores_TC, chosen_TC = scores_TE.topk(self.top_k)
        rows_SD = (hidden_TD[:, None] * scores_TC[:, :, None]).flatten(0, 1)
        routed_SD = self.experts(rows_SD, chosen_TC.view(-1, 1), torch.ones_like(scores_TC).view(-1, 1))
        return self.shared_expert(hidden_TD) + routed_SD.view(*chosen_TC.shape, -1).sum(1), logits_TE


class Llama4:
    """Mixed into the classes of Llama 4: its experts as above, and its decoder, which transformers does not name."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        grouped: dict[type, type] = {Llama4TextMoe: GroupedMoe, Llama4TextExperts: GroupedExperts}
        for module in self.modules():  # type: ignore[attr-defined]
            if (kind := grouped.get(type(module))) is not None:
                LLAMA4_EXPERTS.give_class(module, kind)

    def get_decoder(self) -> Llama4TextModel:
        """The decoder that takes token ids."""
        return next(module for module in self.modules() if isinstance(module, Llama4TextModel))  # type: ignore[attr-defined]


def stored_by_expert(config: PretrainedConfig) -> bool:
    """Whether a family's files have a tensor for each expert, which transformers stacks while loading."""
    conversions = get_checkpoint_conversion_mapping(config.get_text_config().model_type) or ()
    operations = (operation for one in conversions for operation in getattr(one, "operations", ()))
    return any(isinstance(operation, MergeModulelist) for operation in operations)
