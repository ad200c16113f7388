"""The benchmark of recordings: what it counts, and the bars that a wrong model of the allocator breaks."""

from pathlib import Path

import pytest

from benchmarks import cuda_traces
from lean_finetune.core.errors import UserError

MIB = 1 << 20
HEAD = "event,address,bytes,where\n"
RIGHT = f"segment_alloc,0,{20 * MIB},\nalloc,0,{5 * MIB},\n"
WRONG = f"{RIGHT}segment_alloc,{64 * MIB},{20 * MIB},\nalloc,{64 * MIB},{5 * MIB},\n"
"""15 MiB of the first segment are free."""


def write(folder: Path, **tables: str) -> Path:
    for name, rows in tables.items():
        (folder / f"{name}.csv").write_text(HEAD + rows)
    return folder


def failed_bars(folder: Path) -> list[str]:
    return [bar.name for bar in cuda_traces.measure(quick=False, traces=folder).bars if not bar.holds]


def test_each_recording_counts_once_and_those_without_allocations_do_not(tmp_path):
    folder = write(tmp_path, first=RIGHT, copied=RIGHT, empty=f"segment,0,{2 * MIB},\n")
    measured = cuda_traces.measure(quick=False, traces=folder)
    assert [(row["recording"], row["allocations"], row["equal"]) for row in measured.rows] == [("copied.csv", 1, True)]
    assert all(bar.holds for bar in measured.bars)


def test_a_segment_that_the_model_does_not_reserve_breaks_the_bars(tmp_path):
    assert failed_bars(write(tmp_path, wrong=WRONG)) == [
        "requests that reserve other memory than on the GPU",
        "requests served at another address than on the GPU",
        "recordings whose peak reserved differs",
    ]


@pytest.mark.parametrize(("free_mib", "broken"), [(10, []), (400, ["recordings that run out at another request"])])
def test_memory_must_run_out_at_the_same_request(tmp_path, free_mib, broken):
    """`oom` names in `address` what the driver reported as free."""
    folder = write(tmp_path, ended=f"{RIGHT}oom,{free_mib * MIB},{100 * MIB},\n")
    assert failed_bars(folder) == broken


def test_a_directory_without_recordings_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"--traces: no recording with allocations"):
        cuda_traces.measure(quick=True, traces=tmp_path)
