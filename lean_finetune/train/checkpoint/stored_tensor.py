"""A tensor as checkpoints keep it: whole in one file, or its rows in the files of several processes."""

from dataclasses import dataclass

import torch

from lean_finetune.model.safetensors_files import StoredTensor


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Where the rows of a tensor are. Any other cut of them is read from there: no process needs the whole."""

    shape: tuple[int, ...]
    """Of the whole."""
    pieces: tuple[tuple[int, StoredTensor], ...]
    """The first row of each stored stretch of rows, and the stretch; a whole tensor is one."""

    @property
    def dtype(self) -> torch.dtype:
        """Of all its pieces."""
        return self.pieces[0][1].dtype

    def read(self) -> torch.Tensor:
        """All of it."""
        return self.read_rows(0, self.shape[0]) if self.shape else self.pieces[0][1].read()

    def read_rows(self, first: int, count: int) -> torch.Tensor:
        """Some rows; no others are read from the disk.

        Raises:
            OSError: a file cannot be read.
            RuntimeError: a row is kept nowhere.
        """
        found = torch.empty((count, *self.shape[1:]), dtype=self.dtype)
        done = first
        for start, stored in sorted(self.pieces, key=lambda piece: piece[0]):
            end = min(start + stored.shape[0], first + count)
            if start <= done < end:
                found[done - first : end - first] = stored.rows(done - start, end - done).read()
                done = end
        if done != first + count:
            raise RuntimeError(f"a checkpoint lacks rows {done} to {first + count} of a tensor of {self.shape}")
        return found
