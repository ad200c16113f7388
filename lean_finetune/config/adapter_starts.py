"""How LoRA adapters can start (`train.lora.init`): names, methods and memory of each start.

To add a start, add an entry here and its function to `model.adapter_init.START_FUNCTIONS`. The schema takes the names
from here, the rules take the methods, and `memory.predict` takes the memory that a start needs.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class AdapterStart:
    """What the rest of the project needs to know of a start."""

    methods: tuple[str, ...]
    """Values of train.method that it works with."""
    reason: str = ""
    """Why it works with no other method, for the message that refuses one."""
    changes_frozen_weights: bool = False
    """The initial A and B then stay in host memory, to save an adapter for the original weights."""
    changes_output: bool = False
    """The model with its first adapters is another one than the base."""
    fp32_copies: int = 0
    """fp32 copies of an adapted weight that exist at the same time, including the weight itself."""


ADAPTER_STARTS: dict[str, AdapterStart] = {
    "default": AdapterStart(methods=("full", "lora", "qlora", "int8_lora")),  # A is random, B is zero.
    "pissa": AdapterStart(
        methods=("lora",),
        reason="changes the frozen weights, which must not be quantised after",
        changes_frozen_weights=True,
        fp32_copies=3,
    ),
    "loftq": AdapterStart(
        methods=("qlora",), reason="starts from what 4 bits lost", changes_output=True, fp32_copies=3
    ),
}
