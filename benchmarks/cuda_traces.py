"""Recordings of PyTorch's CUDA allocator on real GPUs, replayed in the model with which estimate predicts memory.

`--traces DIR` has tables (.csv, .csv.gz) and files of torch.cuda.memory._dump_snapshot (.pickle, .pkl), whose names and
sources benchmarks/facts/cuda_traces.csv lists. Each request is played from what was reserved when the recording began.
A request differs if it reserves other memory than on the GPU. Where memory ran out, the replay runs again with the
memory that the device had, and must fail at the same request. Recordings of the same events count once, those without
allocations are left out. --quick: the three smallest files.
"""

import csv
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from pathlib import Path

import click

from benchmarks.harness import Measured, Row, at_least, at_most, benchmark
from cuda_memory.recorded_state import expands, settings_of
from cuda_memory.recording import Recording, read_table
from cuda_memory.replay import ExactReplay, replay_exactly
from cuda_memory.snapshot_file import read_snapshot
from cuda_memory.what_if import replay_requests, requests_of
from lean_finetune.core.errors import UserError

SOURCES = Path("benchmarks/facts/cuda_traces.csv")
SUFFIXES: Mapping[str, Callable[[Path], tuple[Recording, ...]]] = {
    ".csv": lambda path: (read_table(path),),
    ".gz": lambda path: (read_table(path),),
    ".pickle": read_snapshot,
    ".pkl": read_snapshot,
}
QUICK_FILES = 3


def measure(quick: bool, traces: Path) -> Measured:
    """Replay every recording of a directory."""
    with SOURCES.open(encoding="utf-8", newline="") as file:
        sources = {row["file"]: row for row in csv.DictReader(file)}
    rows = [_row(recording, sources.get(recording.name, {})) for recording in _recordings(traces, quick)]
    if not rows:
        raise UserError(f"--traces: no recording with allocations is in {traces}; it needs {', '.join(SUFFIXES)}")
    bars = [
        at_least("recordings", len(rows), 1),
        at_most("requests that reserve other memory than on the GPU", sum(row["differ"] for row in rows), 0),
        at_most("requests served at another address than on the GPU", sum(row["elsewhere"] for row in rows), 0),
        at_most("requests that could not be replayed", sum(row["unknown"] for row in rows), 0),
        at_most("recordings whose peak reserved differs", sum(not row["equal"] for row in rows), 0),
        at_most("releases of other memory than on the GPU", sum(row["releases differ"] for row in rows), 0),
        at_most("recordings that run out at another request", sum(row["ends equally"] is False for row in rows), 0),
    ]
    return Measured(rows=rows, bars=bars)


def _recordings(traces: Path, quick: bool) -> Iterator[Recording]:
    """The recordings of a directory, each once."""
    paths = [path for path in sorted(traces.iterdir()) if path.suffix in SUFFIXES]
    if quick:
        paths = sorted(paths, key=lambda path: path.stat().st_size)[:QUICK_FILES]
    seen = set()
    for path in paths:
        for recording in sorted(SUFFIXES[path.suffix](path), key=attrgetter("device")):
            events = tuple((event.action, event.address, event.bytes) for event in recording.events)
            if events not in seen and any(event.action == "alloc" for event in recording.events):
                yield recording
            seen.add(events)


def _row(recording: Recording, source: Mapping[str, str]) -> Row:
    found = replay_exactly(recording)
    streams = {event.stream for event in recording.events} | {segment.stream for segment in recording.segments}
    return {
        "recording": recording.name,
        "device": recording.device,
        "segments": "expandable" if expands(recording) else "fixed",
        "streams": len(streams),
        "allocations": found.allocations,
        "differ": len(found.differences),
        "unknown": found.unknown,
        "elsewhere": found.moved,
        "releases": found.releases,
        "releases differ": found.partial_releases,
        "peak_predicted_bytes": found.peak_reserved_bytes,
        "peak_recorded_bytes": found.recorded_peak_reserved_bytes,
        "equal": found.peak_reserved_bytes == found.recorded_peak_reserved_bytes,
        "ends equally": _ends_equally(recording, found),
        **{column: source.get(column) for column in ("repository", "path", "commit", "licence")},
    }


def _ends_equally(recording: Recording, found: ExactReplay) -> bool | None:
    """Whether memory runs out at the recorded request, in the memory that the device had; None if it never did.

    The device had what was reserved when the request failed, and what the driver then reported as free.
    """
    ends = [(place, event) for place, event in enumerate(recording.events) if event.action == "oom"]
    if not ends:
        return None
    place, event = ends[0]
    limited = replay_requests(
        requests_of(recording),
        "in the device's memory",
        expandable=expands(recording),
        settings=settings_of(recording),
        capacity_bytes=found.reserved_bytes_at_oom[0] + event.address,
        anew=False,
    )
    return limited.failed_event == place


if __name__ == "__main__":
    directory = click.Path(exists=True, file_okay=False, path_type=Path)
    traces = click.Option(["--traces"], type=directory, required=True, help="Directory of recordings.")
    benchmark("cuda_traces", measure, [traces])()
