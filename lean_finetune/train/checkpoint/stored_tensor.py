"""A tensor in a checkpoint: in one file, or its rows in the files of several processes."""

from dataclasses import dataclass

import torch

from lean_finetune.model.safetensors_files import StoredTensor


@dataclass(frozen=True, kw_only=True)
class CheckpointTensor:
    """Locates the rows of a tensor. A process can read any range of rows without loading the others."""

    shape: tuple[int, ...]
    """Of the full tensor."""
    ranges: tuple[tuple[int, StoredTensor], ...]
    """First row of each stored range, and the stored tensor."""

    @property
    def dtype(self) -> torch.dtype:
        """Of all ranges."""
        return self.ranges[0][1].dtype

    def read(self) -> torch.Tensor:
        """Read the full tensor."""
        return self.read_rows(0, self.shape[0]) if self.shape else self.ranges[0][1].read()

    def read_rows(self, first: int, count: int) -> torch.Tensor:
        """Read a range of rows; no others are read from the disk.

        Raises:
            OSError: a file cannot be read.
            RuntimeError: a row is in no file.
        """
        rows = torch.empty((count, *self.shape[1:]), dtype=self.dtype)
        done = first
        for start, stored in sorted(self.ranges, key=lambda one: one[0]):
            end = min(start + stored.shape[0], first + count)
            if start <= done < end:
                rows[done - first : end - first] = stored.rows(done - start, end - done).read()
                done = end
        if done != first + count:
            raise RuntimeError(f"a checkpoint lacks rows {done} to {first + count} of a tensor of {self.shape}")
        return rows
