"""Snapshots in the form of torch.cuda.memory._dump_snapshot, written by hand: a CPU cannot record one."""

import pickle
from pathlib import Path
from typing import Any

from cuda_memory.units import MIB

BASE = 0x7F0000000000
Dictionary = dict[str, Any]


def frame(file: str, line: int, function: str) -> Dictionary:
    """A frame as torch/csrc/profiler/python/combined_traceback.cpp makes it."""
    return {"name": function, "filename": file, "line": line}


class Snapshot:
    """The allocator of one device: segments, live blocks, and what was recorded."""

    def __init__(self, *, expandable: bool = False, recording: bool = True) -> None:
        self.expandable, self.recording = expandable, recording
        self.segments: dict[int, int] = {}
        self.blocks: dict[int, tuple[int, list[Dictionary]]] = {}
        self.trace: list[Dictionary] = []
        self.annotations: list[Dictionary] = []

    def _event(self, action: str, address: int, size: int, frames: list[Dictionary]) -> None:
        if self.recording:
            place = "device_free" if action == "oom" else "addr"
            event = {"action": action, place: address, "size": size, "stream": 0, "time_us": 10 * len(self.trace)}
            self.trace.append({**event, "pool_id": (0, 0), "frames": frames})

    def reserve(self, start: int, size: int) -> None:
        """Reserve memory at an offset."""
        self._event("segment_map" if self.expandable else "segment_alloc", BASE + start, size, [])
        self.segments[BASE + start] = size

    def release(self, start: int) -> None:
        self._event(
            "segment_unmap" if self.expandable else "segment_free", BASE + start, self.segments[BASE + start], []
        )
        del self.segments[BASE + start]

    def alloc(self, start: int, size: int, *frames: Dictionary) -> None:
        shared = [dict(each) for each in frames]  # One list for the event and the block, as PyTorch makes it.
        self._event("alloc", BASE + start, size, shared)
        self.blocks[BASE + start] = size, shared if self.recording else []

    def free(self, start: int) -> None:
        size, _ = self.blocks.pop(BASE + start)
        self._event("free_requested", BASE + start, size, [])
        self._event("free_completed", BASE + start, size, [])

    def fail(self, size: int, free: int, *frames: Dictionary) -> None:
        """Run out of memory."""
        self._event("oom", free, size, list(frames))

    def content(self, *, keep: int | None = None, device: int = 0) -> Dictionary:
        """The dictionary; of the events, only the last `keep`."""
        trace = self.trace if keep is None else self.trace[len(self.trace) - keep :]
        settings = {"expandable_segments": self.expandable, "max_split_size": -1, "roundup_power2_divisions": {"1": 0}}
        return {
            "segments": [self._segment(start, size, device) for start, size in sorted(self._ranges().items())],
            "device_traces": [[] for _ in range(device)] + [trace],
            "allocator_settings": settings,
            "external_annotations": self.annotations,
        }

    def _ranges(self) -> dict[int, int]:
        """Reserved memory; adjoining ranges of an expandable segment are one."""
        ranges: dict[int, int] = {}
        for start, size in sorted(self.segments.items()):
            last = next(reversed(ranges), None)
            if self.expandable and last is not None and last + ranges[last] == start:
                ranges[last] += size
            else:
                ranges[start] = size
        return ranges

    def _segment(self, start: int, size: int, device: int) -> Dictionary:
        blocks, at = [], start
        for address, (requested, frames) in sorted(self.blocks.items()):
            if start <= address < start + size:
                rounded = -(-requested // 512) * 512
                if at < address:
                    blocks.append(_block(at, address - at, 0, "inactive", []))
                blocks.append(_block(address, rounded, requested, "active_allocated", frames))
                at = address + rounded
        if at < start + size:
            blocks.append(_block(at, start + size - at, 0, "inactive", []))
        return {
            "device": device,
            "address": start,
            "total_size": size,
            "allocated_size": 0,
            "active_size": 0,
            "requested_size": 0,
            "stream": 0,
            "segment_type": "small" if size <= 2 * MIB else "large",
            "segment_pool_id": (0, 0),
            "is_expandable": self.expandable,
            "frames": [],
            "blocks": blocks,
        }

    def write(self, path: Path, **options: Any) -> Path:
        """Write the snapshot as `_dump_snapshot` does."""
        path.write_bytes(pickle.dumps(self.content(**options), protocol=4))
        return path


def _block(address: int, size: int, requested: int, state: str, frames: list[Dictionary]) -> Dictionary:
    return {"address": address, "size": size, "requested_size": requested, "state": state, "frames": frames}


FORWARD = frame("model.py", 7, "forward")


def small_snapshot() -> Snapshot:
    """A recording that begins with one segment and one block of weights."""
    snapshot = Snapshot(recording=False)
    snapshot.reserve(0, 20 * MIB)
    snapshot.alloc(0, 5 * MIB)
    snapshot.recording = True
    snapshot.alloc(5 * MIB, 3 * MIB, FORWARD)
    snapshot.reserve(64 * MIB, 40 * MIB)
    snapshot.alloc(64 * MIB, 40 * MIB, FORWARD)
    snapshot.free(5 * MIB)
    return snapshot
