"""Two `dvc repro` in one checkout."""

import subprocess
import sys

import pytest

from tests.pipeline.clone import Clone, stages_run
from tests.processes import TIMEOUT_SECONDS

REFUSALS = (" is busy, it is being blocked by:", "Unable to acquire lock")
"""DVC's own: a stage or the whole checkout is in use."""


def two_at_once(clone: Clone, target: str) -> list[tuple[int, str]]:
    """Run `dvc repro` of a stage twice at once; return exit code and output of each, the successful ones first."""
    command = [sys.executable, "-m", "dvc", "repro", target]
    running = [
        subprocess.Popen(
            command,
            cwd=clone.root,
            env=clone.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=TIMEOUT_SECONDS)[0] for process in running]
    ended = sorted((process.returncode, output) for process, output in zip(running, outputs, strict=True))
    assert ended[0][0] == 0, ended
    for status, output in ended[1:]:
        # The second may have started when the first had finished.
        assert status == 0 or any(line in output for line in REFUSALS), output
        assert "Traceback" not in output
    assert clone.dvc("status", target).strip() == "Data and pipelines are up to date."
    assert not list(clone.root.glob("data/.*.partial"))
    return ended


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_second_repro_is_refused_and_the_first_gives_the_same_bytes(clone: Clone):
    """Two that wrote one output, or a second one that recorded what the first had not finished."""
    clone.set_params(data__max_length=120)
    ended = two_at_once(clone, "bucket")
    assert any("tokenize" in stages_run(output) for _, output in ended)
    together = (clone.root / "dvc.lock").read_bytes()
    clone.dvc("repro", "--force", "bucket")
    assert (clone.root / "dvc.lock").read_bytes() == together


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_whole_pipelines_at_once_train_once(clone: Clone):
    """A second training in the directory of the first one's checkpoints, or a report of half a run."""
    clone.set_params(data__max_length=112)
    ended = two_at_once(clone, "report")
    assert sum("train" in stages_run(output) for _, output in ended) == 1
    assert (clone.root / "data/report/report.html").is_file()
