"""Memory of tokenize's processes: bounded, and no more of it for ten times the input."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from stages.pin import main as pin
from tests.conftest import ROOT
from tests.data.common import chat_row
from tests.processes import killed_after
from tests.workspace import invoke, lay_out, write_rows

MIB = 1 << 20
SMALL_ROWS = 12_000
"""About 10 MiB: several blocks for each worker, so that all of a run's buffers exist."""


def peak_bytes(directory: Path) -> int:
    """Highest resident memory of the stage's processes together, pages that they share counted in each."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    peak = 0
    command = [sys.executable, "-m", "stages.tokenize"]
    with (
        subprocess.Popen(
            command, cwd=directory, env=environment, stderr=subprocess.PIPE, start_new_session=True
        ) as process,
        killed_after(process),
    ):
        watched = psutil.Process(process.pid)
        while process.poll() is None:
            try:
                family = [watched, *watched.children(recursive=True)]
                peak = max(peak, sum(one.memory_info().rss for one in family))
            except psutil.NoSuchProcess:
                continue
            time.sleep(0.02)
        assert process.stderr is not None and process.returncode == 0, process.stderr and process.stderr.read()
    return peak


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.skipif(sys.platform != "linux", reason="the bound is that of forked workers")
def test_memory_is_bounded_and_flat(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lay_out(tmp_path, data__source="rows.jsonl", run__data_workers=2)
    peaks = []
    for rows in (SMALL_ROWS, 10 * SMALL_ROWS):
        answer = "It is known. " * 50
        write_rows(Path("rows.jsonl"), [chat_row(f"What of {n}?", f"{n}: {answer}") for n in range(rows)])
        for what in ("data", "model"):
            assert invoke(pin, what).exit_code == 0
        peaks.append(peak_bytes(tmp_path))
    assert peaks[1] <= 330 * MIB
    assert peaks[1] <= 1.05 * peaks[0] + 8 * MIB
