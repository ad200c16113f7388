"""Master weights and optimizer state in a file, updated chunk by chunk in host memory (train.offload_to=disk).

Updates work on single values, or on blocks that chunks never divide, so they equal updates of whole tensors to the
bit. Chunks are read ahead and written behind: Rajbhandari et al. 2021 (ZeRO-Infinity), arXiv 2104.07857, section 5.2.2.
"""

import mmap
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from lean_finetune.config.optimizers import OptimizerEntry
from lean_finetune.step.offload.chunk_pipeline import Chunk, ChunkPipeline, FileRange
from lean_finetune.step.offload.host_transfer import HostTransfer
from lean_finetune.step.offload.master_weights import Groups, MasterWeights
from lean_finetune.step.offload.state_file import DiskPlace, FileTensor, StateFile

CHUNK_VALUES = 4 * 2**20
"""Maximum values of a chunk: fp32 ranges of 16 MiB reach a disk's full speed."""
ALIGNED_VALUES = 2**18
"""Chunks begin at multiples of this: the scales of this many 8-bit values fill a block of the file."""
SCALED_VALUES = 256
"""8-bit values that share a scale (bitsandbytes)."""
FEWEST_SLOTS, MOST_SLOTS = 4, 16
"""Slots of the buffer: one for the chunk that is updated, the others for reading ahead and writing."""
MASTER = "master"


class DiskMasterWeights(MasterWeights):
    """`MasterWeights` whose copies and optimizer state are in a file.

    Its state and the inner optimizer's state are tensors mapped from the file, so checkpoints have the names and bytes
    of `MasterWeights`. The update never touches them: it reads the file into a buffer and writes it back.
    """

    def __init__(
        self,
        groups: Groups,
        lr: float,
        build: Callable[[Groups], torch.optim.Optimizer],
        *,
        dtype: torch.dtype | None,
        make_state: Callable[[torch.optim.Optimizer], None],
        entry: OptimizerEntry,
        place: DiskPlace,
    ):
        """As `MasterWeights`, but `build` makes the optimizer without state, and `make_state` makes its state.

        Weights may be in host memory already.

        Raises:
            DiskFault: the disk has no room, or no direct access.
        """
        self._file, self._entry = StateFile(place.directory), entry
        self._stored: dict[nn.Parameter, dict[str, FileTensor]] = {}
        super().__init__(groups, lr, build, dtype=dtype)
        for parameter, files in self._stored.items():
            if state := self._make_state(parameter, files, make_state):
                self.inner.state[self.state[parameter][MASTER]] = state
        self._make_pipeline(place.buffer_bytes)

    def _copied(self, parameter: torch.Tensor, dtype: torch.dtype | None) -> torch.nn.Parameter:
        """A copy of a weight in the file."""
        assert isinstance(parameter, nn.Parameter)
        file = self._file.zeros(tuple(parameter.shape), dtype or parameter.dtype)
        self._stored[parameter] = {MASTER: file}
        file.mapped.copy_(parameter.detach())
        return nn.Parameter(file.mapped)

    def _make_state(
        self, parameter: nn.Parameter, files: dict[str, FileTensor], make_state: Callable[[torch.optim.Optimizer], None]
    ) -> dict[str, Any]:
        """Allocate the state that the first step would create: large tensors in the file, the others in memory."""
        master, groups = self.state[parameter][MASTER], self.inner.param_groups
        first = nn.Parameter(torch.zeros(min(master.numel(), CHUNK_VALUES), dtype=master.dtype))
        self.inner.param_groups = [{**groups[self._inner_group[parameter]], "params": [first]}]
        make_state(self.inner)
        self.inner.param_groups = groups
        state: dict[str, Any] = self.inner.state.pop(first, {})
        for key, value in state.items():
            if key in self._entry.state:
                files[key] = self._file.zeros(tuple(master.shape), value.dtype)
            elif key.startswith("absmax"):
                files[key] = self._file.zeros((-(-master.numel() // SCALED_VALUES),), value.dtype)
        return {**state, **{key: file.mapped for key, file in files.items() if key != MASTER}}

    def _make_pipeline(self, buffer_bytes: int) -> None:
        """Divide the tensors into chunks, as large as the buffer allows."""
        values = CHUNK_VALUES
        while True:
            self._chunks = {p: list(_chunks(p.numel(), files, values)) for p, files in self._stored.items()}
            every = [chunk for chunks in self._chunks.values() for chunk in chunks]
            slot_bytes = max(sum(one.whole_bytes for one in chunk.ranges) for chunk in every)
            gradient_bytes = max(chunk.ranges[0].whole_bytes for chunk in every)
            if gradient_bytes + FEWEST_SLOTS * slot_bytes <= buffer_bytes or values == ALIGNED_VALUES:
                break
            values //= 2
        slots = min(MOST_SLOTS, (buffer_bytes - gradient_bytes) // slot_bytes, max(FEWEST_SLOTS, len(every)))
        self._pipeline = ChunkPipeline(self._file, every, slots=slots, slot_bytes=slot_bytes)
        weights = list(self._stored)
        self._gradient = torch.frombuffer(mmap.mmap(-1, gradient_bytes), dtype=torch.uint8)
        cuda = weights[0].device.type == "cuda"
        self._through = HostTransfer(weights, None, room=self._gradient) if cuda else None

    def _update(self, parameter: torch.nn.Parameter, lr: float) -> None:
        """Update one tensor, chunk by chunk; every chunk sees the state of the whole tensor before the step."""
        state = self.inner.state.get(self.state[parameter][MASTER], {})
        gradient, weights = parameter.grad, parameter.detach().view(-1)
        assert gradient is not None
        groups, keys = self.inner.param_groups, list(self._stored[parameter])
        changed: dict[str, Any] = {}
        try:
            for chunk in self._chunks[parameter]:
                slot = self._pipeline.fetch(chunk)
                tensors = dict(zip(keys, chunk.tensors(slot), strict=True))
                master = nn.Parameter(tensors.pop(MASTER))
                part = slice(chunk.first, chunk.first + len(master))
                master.grad = self._to_host(gradient.view(-1)[part], master.dtype)
                same = {key: value for key, value in state.items() if key not in keys}
                changed = {key: v.clone() if isinstance(v, torch.Tensor) else v for key, v in same.items()}
                if state:
                    self.inner.state[master] = {**changed, **tensors}
                self.inner.param_groups = [{**groups[self._inner_group[parameter]], "lr": lr, "params": [master]}]
                self.inner.step()
                changed = {key: self.inner.state[master][key] for key in same}
                self.inner.state.pop(master, None)
                self._to_weights(master.detach(), weights[part])
                self._pipeline.release(chunk, slot)
        finally:
            self.inner.param_groups = groups
        for key, value in changed.items():
            if isinstance(value, torch.Tensor):
                state[key].copy_(value)
            else:
                state[key] = value
        parameter.grad = None

    def _to_host(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Gradients in host memory in this type, valid until the next call."""
        if self._through is not None:
            return self._through.to_host(values, dtype)
        if values.dtype == dtype:
            return values
        return self._gradient[: values.numel() * dtype.itemsize].view(dtype).copy_(values)

    def _to_weights(self, values: torch.Tensor, weights: torch.Tensor) -> None:
        """Overwrite weights with updated ones, rounded to their type."""
        if self._through is not None:
            self._through.to_device(values, weights)
        else:
            weights.copy_(values)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free the gradients at the end of a step, when the file must be complete for a checkpoint."""
        self._pipeline.flush()
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See MasterWeights."""
        self._pipeline.flush()
        self._pipeline.forget()
        super().load_state_dict(state_dict)


def _chunks(count: int, files: dict[str, FileTensor], values: int) -> Iterator[Chunk]:
    """The chunks of a tensor of `count` values; each has at most `values` and a range of every file."""
    for first in range(0, count, values):
        ranges = []
        for key, file in files.items():
            shared = SCALED_VALUES if key.startswith("absmax") else 1
            start = file.start + first // shared * file.mapped.itemsize
            size = -(-min(values, count - first) // shared)
            ranges.append(FileRange(start=start, count=size, dtype=file.mapped.dtype))
        yield Chunk(first=first, ranges=tuple(ranges))
