"""Random states of the host and the GPU, which dropout draws from."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """Return random states (uint8) by device type: the host's, and the GPU's if `device` is one."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_state(states: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Restore what `random_state` returned."""
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


@contextmanager
def restored_after_fault(device: torch.device) -> Iterator[None]:
    """Restore the random states if the block raises, so that a repeated step draws the same numbers."""
    states = random_state(device)
    try:
        yield
    except BaseException:
        set_random_state(states, device)
        raise
