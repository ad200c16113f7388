"""The pipeline benchmark, with two small stages."""

import shutil
from pathlib import Path

import pytest

from benchmarks import pipeline
from benchmarks.processes import WHOLE_RUN
from lean_finetune.core.errors import UserError
from tests.processes import run_bounded

REPO = Path(__file__).resolve().parents[2]
STAGES = """\
stages:
  small:
    cmd: python -c "import time; time.sleep(0.3); open('small.txt', 'w').write('a')"
    params:
    - data.max_rows
    outs:
    - small.txt
  large:
    cmd: python -c "import time; b = bytearray(50 << 20); time.sleep(0.3); open('large.txt', 'w').write('b')"
    deps:
    - small.txt
    outs:
    - large.txt
"""


@pytest.fixture
def toy(tmp_path, monkeypatch) -> Path:
    """A repository with two stages and our parameters, as the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    monkeypatch.setattr(pipeline, "NO_OP_ROUNDS", 1)
    shutil.copy(REPO / "params.yaml", tmp_path)
    (tmp_path / ".dvc").mkdir()
    shutil.copy(REPO / ".dvc/config", tmp_path / ".dvc")
    return tmp_path


def commit(files: str) -> None:
    Path("dvc.yaml").write_text(files)
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    for arguments in (["init", "--quiet"], ["add", "."], [*identity, "commit", "--quiet", "-m", "toy"]):
        run_bounded(["git", *arguments], check=True)


@pytest.mark.slow
def test_every_stage_and_the_no_op_are_measured_in_a_clone(toy):
    commit(STAGES)
    measured = pipeline.measure(quick=True)
    rows = {row["what"]: row for row in measured.rows}
    assert list(rows) == ["small", "large", WHOLE_RUN, "(no-op repro, median)"]
    assert rows["large"]["peak_rss_bytes"] > 50 << 20 > rows["small"]["peak_rss_bytes"]
    assert rows[WHOLE_RUN]["wall_s"] > rows["small"]["wall_s"] + rows["large"]["wall_s"] > 0.4
    assert [bar.name for bar in measured.bars] == ["no-op dvc repro, seconds"]
    assert measured.bars[0].value == rows["(no-op repro, median)"]["wall_s"] > 0.1
    assert not list(toy.glob("*.txt")) and not (toy / "dvc.lock").exists()


@pytest.mark.slow
def test_a_no_op_that_runs_a_stage_is_an_error(toy):
    commit(STAGES.replace("  large:\n", "  large:\n    always_changed: true\n"))
    with pytest.raises(UserError, match="a second `dvc repro` must run nothing, got: Running stage 'large'"):
        pipeline.measure(quick=True)


def test_a_failed_stage_is_reported_with_its_error_line(toy):
    commit("stages:\n  bad:\n    cmd: >-\n      echo 'error: no such row' && exit 1\n")
    with pytest.raises(UserError, match="failed in a clone: error: no such row"):
        pipeline.measure(quick=False)
