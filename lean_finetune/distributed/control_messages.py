"""Numbers and texts that the processes of a run exchange outside of training: all send, all receive."""

import numpy as np
import torch
import torch.distributed as dist

from lean_finetune.distributed.processes import SINGLE_PROCESS, World
from lean_finetune.distributed.progress_barrier import wait_for_all


class ControlChannel:
    """Collectives over Python integers and strings; every process makes the same calls in the same order."""

    def __init__(self, world: World = SINGLE_PROCESS, device: torch.device = torch.device("cpu")):  # noqa: B008 - immutable
        """`device` is where the backend's tensors must be: a GPU for NCCL."""
        self.rank, self.size = world.rank, world.size
        self.node = world.rank // world.local_size
        self.device = device

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which decides."""
        return self.rank == 0

    def gather(self, *numbers: int) -> list[list[int]]:
        """The numbers of every process, by rank; all send equally many."""
        if self.size == 1:
            return [list(numbers)]
        table = torch.zeros(self.size, len(numbers), dtype=torch.int64)
        table[self.rank] = torch.tensor(numbers)
        table = table.to(self.device)
        dist.all_reduce(table)  # The others add 0.
        return table.tolist()

    def gather_after_work(self, *numbers: int) -> list[list[int]]:
        """`gather` after a barrier that waits for a process as long as it makes progress."""
        wait_for_all()
        return self.gather(*numbers)

    def failed_ranks(self, failed: bool) -> list[int]:
        """The ranks that call this with an error, after work; all processes call it."""
        return [rank for rank, (one,) in enumerate(self.gather_after_work(int(failed))) if one]

    def from_first(self, *numbers: int) -> list[int]:
        """The numbers of rank 0."""
        return self.gather(*numbers)[0]

    def gather_text(self, text: str) -> list[str]:
        """The text of every process, by rank: its bytes travel as 64-bit numbers, without pickle."""
        data = text.encode()
        sizes = [size for (size,) in self.gather(len(data))]
        words = -(-max(sizes) // 8)
        padded = np.frombuffer(data.ljust(8 * words, b"\0"), np.int64)
        table = np.array(self.gather(*padded.tolist()), np.int64)
        return [row.tobytes()[:size].decode() for row, size in zip(table, sizes, strict=True)]
