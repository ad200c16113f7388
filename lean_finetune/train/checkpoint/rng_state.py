"""The random states that dropout draws from."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """States by kind of device, uint8; always the host's, and the GPU's where that is the device."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_state(states: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Draw from here on as `random_state` found it."""
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


@contextmanager
def redrawn_after_fault(device: torch.device) -> Iterator[None]:
    """Where the block ends by an exception, what it drew is to be drawn again."""
    states = random_state(device)
    try:
        yield
    except BaseException:
        set_random_state(states, device)
        raise
