"""Two `dvc repro` in one checkout."""

import subprocess
import sys

import pytest

from tests.pipeline.clone import Clone, stages_run
from tests.processes import TIMEOUT_SECONDS

REFUSALS = (" is busy, it is being blocked by:", "Unable to acquire lock")
"""DVC's own: a stage or the whole checkout is in use."""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_second_repro_is_refused_and_the_first_gives_the_same_bytes(clone: Clone):
    """Two that wrote one output, or a second one that recorded what the first had not finished."""
    clone.set_params(data__max_length=120)
    command = [sys.executable, "-m", "dvc", "repro", "bucket"]
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
    assert ended[0][0] == 0 and "tokenize" in stages_run(ended[0][1]), ended
    for status, output in ended[1:]:
        # The second may have started when the first had finished.
        assert status == 0 or any(line in output for line in REFUSALS), output
        assert "Traceback" not in output
    together = (clone.root / "dvc.lock").read_bytes()
    assert clone.dvc("status", "bucket").strip() == "Data and pipelines are up to date."
    clone.dvc("repro", "--force", "bucket")
    assert (clone.root / "dvc.lock").read_bytes() == together
