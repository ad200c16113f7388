"""The optimizers that `train.optimizer` can name. To add one, add an entry to `OPTIMIZERS`.

An entry is all there is: the schema takes the names from here, training builds the class, `memory.predict` computes the
bytes of state, and advice and the rules between settings read the rest. Classes are named by their import path, so that
reading params.yaml never imports torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class OptimizerEntry:
    """One optimizer: how it is built, the state it keeps, and what excludes it."""

    factory: str
    """Import path of a class that takes parameter groups, `lr` and `options`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the class. Weight decay must be decoupled from the gradient.

    A class of torch.optim needs `fused=True` or `foreach=False` here: PyTorch's default is another one for a traced
    parameter than for a parameter on CUDA, so the prediction would be that of another update.
    """
    state: Mapping[str, int] = field(default_factory=dict)
    """State tensors by their key in `optimizer.state[parameter]`, each with its values per trained value.

    They start at zero. Optimizers of bitsandbytes make them themselves.
    """
    state_bits: int | None = None
    """Bits of a state value: 8 (in blocks, with scales), 32, or None for the type of the trained tensor."""
    factored: bool = False
    """A matrix keeps fp32 sums of its rows and of its columns (Adafactor); `state` is empty."""
    step_count: Literal["device", "host"] | None = None
    """Device of the step count of each trained tensor, an fp32 tensor; None: the count is a Python number."""
    paged: bool = False
    """On CUDA, large state tensors are managed memory, which moves to the host when the GPU is full."""
    use_instead: str | None = None
    """For `paged`: the optimizer to use where it is excluded."""
    lighter: str | None = None
    """The same algorithm with less state; advice proposes it where memory is short."""

    @property
    def values_per_trained_value(self) -> int:
        """State values per trained value."""
        return sum(self.state.values())

    @property
    def updates_by_value(self) -> bool:
        """Whether a part of a tensor can be updated alone, with the same part of each state tensor."""
        return not self.factored and all(count == 1 for count in self.state.values())

    @property
    def has_state(self) -> bool:
        """Whether it has any state."""
        return bool(self.state) or self.factored


# Each optimizer's published constants.
_ADAM: Mapping[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8}
_LION: Mapping[str, Any] = {"betas": (0.9, 0.99)}
_ADEMAMIX: Mapping[str, Any] = {"betas": (0.9, 0.999, 0.9999), "alpha": 5.0, "eps": 1e-8}
_BNB_STATE = {"state1": 1, "state2": 1}

OPTIMIZERS: dict[str, OptimizerEntry] = {
    # Loshchilov & Hutter 2019. Fused updates in place; PyTorch's foreach form holds further copies of the parameters.
    "adamw": OptimizerEntry(
        factory="torch.optim.AdamW",
        options={**_ADAM, "fused": True},
        state={"exp_avg": 1, "exp_avg_sq": 1},
        step_count="device",
        lighter="adamw_8bit",
    ),
    # Dettmers et al. 2021, arXiv 2110.02861.
    "adamw_8bit": OptimizerEntry(factory="bitsandbytes.optim.AdamW8bit", options=_ADAM, state=_BNB_STATE, state_bits=8),
    "paged_adamw_8bit": OptimizerEntry(
        factory="bitsandbytes.optim.PagedAdamW8bit",
        options=_ADAM,
        state=_BNB_STATE,
        state_bits=8,
        paged=True,
        use_instead="adamw_8bit",
    ),
    "paged_adamw_32bit": OptimizerEntry(
        factory="bitsandbytes.optim.PagedAdamW32bit",
        options=_ADAM,
        state=_BNB_STATE,
        state_bits=32,
        paged=True,
        use_instead="adamw",
    ),
    # Chen et al. 2023, arXiv 2302.06675: one moment; wants a learning rate 3 to 10 times smaller than AdamW's.
    "lion": OptimizerEntry(factory="bitsandbytes.optim.Lion", options=_LION, state={"state1": 1}, state_bits=32),
    "lion_8bit": OptimizerEntry(
        factory="bitsandbytes.optim.Lion8bit", options=_LION, state={"state1": 1}, state_bits=8
    ),
    # Shazeer & Stern 2018, arXiv 1804.04235, at the given learning rate. PyTorch's own form scales that rate by each
    # tensor's size, and waits for the device twice a tensor to do so.
    "adafactor": OptimizerEntry(
        factory="transformers.optimization.Adafactor",
        options={"scale_parameter": False, "relative_step": False},
        factored=True,
    ),
    # Pagliardini et al. 2024, arXiv 2409.03137: state1 stacks the fast and the slow mean of gradients.
    "ademamix_8bit": OptimizerEntry(
        factory="bitsandbytes.optim.AdEMAMix8bit", options=_ADEMAMIX, state={"state1": 2, "state2": 1}, state_bits=8
    ),
    # Without momentum, so without state; decay inside the gradient then equals decoupled decay.
    "sgd": OptimizerEntry(factory="torch.optim.SGD", options={"momentum": 0.0, "fused": True}),
}
