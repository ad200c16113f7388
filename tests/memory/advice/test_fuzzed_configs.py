"""Mutated configurations through the whole `lean-finetune fit`: an answer or one line, in bounded time and memory."""

import json
import sys

import pytest

from tests.conftest import ROOT
from tests.memory.advice.fuzz_config import MOST_BYTES, MOST_CPU_SECONDS
from tests.processes import run_bounded

SEED, TRIES = 29, 300
FEWEST_ANSWERED = 30


@pytest.mark.slow
def test_mutated_configurations_end_in_an_answer_or_one_line():
    """config.json of strangers that takes all memory or hours, or ends in a traceback."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.memory.advice.fuzz_config", str(SEED), str(TRIES)]
    done = run_bounded(command, cwd=ROOT, timeout_seconds=5400)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0 and len(rows) == TRIES, (rows[-1:], done.stderr[-2000:])
    assert [row for row in rows if row["end"] == "fault"] == []
    assert max(row["cpu_seconds"] for row in rows) < MOST_CPU_SECONDS
    assert max(row["peak_bytes"] for row in rows) < MOST_BYTES
    assert sum(row["end"] == "answered" for row in rows) >= FEWEST_ANSWERED
