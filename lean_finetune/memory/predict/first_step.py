"""Memory over the first optimizer step of tools that make the optimizer's state in it.

Here the state exists before the first step, so a run that is too large ends there. Most tools make it in the first
update, as PyTorch's optimizers do: such a run loads, passes forward and backward, and then runs out of memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from lean_finetune.memory.predict.process_memory import closed_form
from lean_finetune.memory.predict.state_formulas import MASTER_WEIGHTS
from lean_finetune.memory.predict.traced_step import TracedModel
from lean_finetune.memory.trace.memory_trace import GRADIENTS, OPTIMIZER, Peak


@dataclass(frozen=True, kw_only=True)
class FirstStep:
    """Bytes of tensors at four instants, in order."""

    loading: int
    """Weights are loaded, and their fp32 copies made: before the first forward pass."""
    forward: int
    """Peak of the first forward pass."""
    after_backward: int
    """Gradients exist, activations no more."""
    update: int
    """Peak of the first update."""
    before_update: int
    """The highest peak before the update."""

    def instants(self) -> Mapping[str, int]:
        """The bytes by name, in order."""
        return {
            "loading": self.loading,
            "forward": self.forward,
            "after backward": self.after_backward,
            "first update": self.update,
        }

    def dies_in_update(self, room_bytes: int) -> bool:
        """Whether the first update is the first instant that does not fit."""
        return self.before_update <= room_bytes < self.update

    @staticmethod
    def of_tool(by_phase: Mapping[str, Peak]) -> "FirstStep":
        """From the peaks by phase of another tool's first step, of one micro-batch."""
        loading, forward = by_phase["loading"].bytes, by_phase["forward"].bytes
        gradients = max(peak.by_category.get(GRADIENTS, 0) for peak in by_phase.values())
        return FirstStep(
            loading=loading,
            forward=forward,
            after_backward=loading + gradients,
            update=by_phase["optimizer"].bytes,
            before_update=max(forward, by_phase["backward"].bytes),
        )


def first_step(model: TracedModel, by_phase: Mapping[str, Peak], *, several: bool) -> FirstStep:
    """What a run on one GPU would need if its optimizer's state were made in its first update.

    `by_phase` are its peaks here. `several`: a step has more than one micro-batch, so gradients exist in forward.
    """
    lines = [line for line in closed_form(model) if not line["category"].startswith(("host_", "disk_"))]
    states = (line for line in lines if line["category"] == OPTIMIZER and not line["why"].startswith(MASTER_WEIGHTS))
    made_later = sum(line["bytes"] for line in states)
    gradients = sum(line["bytes"] for line in lines if line["category"] == GRADIENTS)
    state_bytes = sum(line["bytes"] for line in lines) - made_later
    return FirstStep(
        loading=state_bytes - gradients,
        forward=by_phase["forward"].bytes - made_later - several * gradients,
        after_backward=state_bytes,
        update=by_phase["optimizer"].bytes,
        before_update=max(by_phase[phase].bytes for phase in ("forward", "backward")) - made_later,
    )
