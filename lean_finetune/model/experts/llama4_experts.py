"""Llama 4's experts in the form of other families: chosen experts alone run, and 4 or 8 bits pack them.

transformers' code runs every expert on a copy of every token, multiplied by the router's score; an expert that was not
chosen multiplies zeros and adds zeros. Here the copies of the chosen experts alone exist.

Shape legend: T tokens, C experts chosen for a token, E experts, D hidden size.
"""

from typing import Any

import torch
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts, Llama4TextModel, Llama4TextMoe

from lean_finetune.model.experts.experts_forward import experts_forward


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
        grouped = {Llama4TextMoe: GroupedMoe, Llama4TextExperts: GroupedExperts}
        for module in self.modules():  # type: ignore[attr-defined]
            module.__class__ = grouped.get(type(module), type(module))

    def get_decoder(self) -> Llama4TextModel:
        """The decoder that takes token ids."""
        return next(module for module in self.modules() if isinstance(module, Llama4TextModel))  # type: ignore[attr-defined]
