"""What the processes of a run tell each other apart from tensors: whole numbers and texts, heard by all."""

import numpy as np
import torch
import torch.distributed as dist

from lean_finetune.distributed.processes import ALONE, World
from lean_finetune.distributed.progress_barrier import wait_for_all


class Voices:
    """The processes of a run, all of which speak at the same places. One alone hears itself."""

    def __init__(self, world: World = ALONE, device: torch.device = torch.device("cpu")):  # noqa: B008 - immutable
        """Speak as one of `world`; `device` is where the tensors of its link are."""
        self.rank, self.size = world.rank, world.size
        self._device = device

    @property
    def leads(self) -> bool:
        """Whether this process decides."""
        return self.rank == 0

    def each(self, *own: int) -> list[list[int]]:
        """What every process said, by rank; all say equally many numbers."""
        if self.size == 1:
            return [list(own)]
        said = torch.zeros(self.size, len(own), dtype=torch.int64)
        said[self.rank] = torch.tensor(own)
        said = said.to(self._device)
        dist.all_reduce(said)  # Others add 0.
        return said.tolist()

    def each_after_work(self, *own: int) -> list[list[int]]:
        """As `each`, where one process may have worked alone for long: it is waited for while it makes progress."""
        wait_for_all()
        return self.each(*own)

    def of_first(self, *own: int) -> list[int]:
        """What the first process said."""
        return self.each(*own)[0]

    def texts(self, own: str) -> list[str]:
        """The text of every process, by rank. No pickle: what is sent are bytes, as 64-bit numbers."""
        data = own.encode()
        sizes = [size for (size,) in self.each(len(data))]
        words = -(-max(sizes) // 8)
        sent = np.frombuffer(data.ljust(8 * words, b"\0"), np.int64)
        heard = np.array(self.each(*sent.tolist()), np.int64)
        return [row.tobytes()[:size].decode() for row, size in zip(heard, sizes, strict=True)]
