"""Shapes for which a CPU's library of matrix products makes kernels, and keeps them."""

from collections.abc import Iterable

import numpy as np
import torch

from lean_finetune.config.schema import Train
from lean_finetune.plan.batch_plan import MicroBatch


class KernelShapes:
    """Counts the shapes of a process's micro-batches, where oneDNN makes kernels for each.

    It does so for products in 16 bits on a CPU: by the tokens of a micro-batch (linear layers), and by the length of
    each row (attention). Products in fp32 run in another library, which keeps nothing.
    """

    def __init__(self, device: torch.device, train: Train):
        """A process that has seen no shape."""
        self._makes_kernels = (
            device.type == "cpu" and train.precision != "fp32" and torch.backends.mkldnn.is_available()
        )
        self._seen: set[tuple[str, int]] = set()

    def after(self, micro_batches: Iterable[MicroBatch], lengths: np.ndarray) -> int | None:
        """The shapes so far with those of these micro-batches; None where no kernels are made.

        `lengths` are the tokens of every training row.
        """
        if not self._makes_kernels:
            return None
        for one in micro_batches:
            rows = lengths[one.rows].tolist() if one.flat else [one.length]
            self._seen |= {("tokens", one.padded_tokens), *(("row", length) for length in rows)}
        return len(self._seen)
