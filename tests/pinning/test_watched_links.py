"""What DVC itself sees through the links that pin_data leaves."""

import os
import sys
from pathlib import Path

import pytest

from lean_finetune.pinning.watched_links import DIRECTORY_LINKS, FILE_LINKS, watch_sources
from tests.processes import run_bounded

STAGE = """
stages:
  pin_data:
    cmd: python --version
    deps:
{deps}
"""


@pytest.fixture
def status(tmp_path, monkeypatch):
    """A DVC project whose one stage depends on the links; a function says whether it is up to date, then reruns it."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "locks").mkdir()
    (project / "locks/README.md").touch()
    monkeypatch.chdir(project)
    deps = "".join(f"    - locks/{link}\n" for link in (*DIRECTORY_LINKS, FILE_LINKS))
    Path("dvc.yaml").write_text(STAGE.format(deps=deps))
    environment = {**os.environ, "DVC_NO_ANALYTICS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def dvc(*arguments: str) -> str:
        command = [sys.executable, "-m", "dvc", *arguments]
        return run_bounded(command, env=environment, check=True).stdout

    dvc("init", "--no-scm", "-q")

    def is_clean() -> bool:
        clean = "up to date" in dvc("status", "pin_data")
        dvc("repro", "-q", "pin_data")
        return clean

    return is_clean


@pytest.mark.slow
def test_dvc_notices_every_change_of_several_sources_and_nothing_else(status, tmp_path):
    """DVC does not follow a link to a directory that lies inside a dependency: such a source would go stale."""
    one, two = tmp_path / "one", tmp_path / "two"
    for path in (one / "deep", two):
        path.mkdir(parents=True)
    file, other = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    for path in (one / "deep/rows.jsonl", two / "rows.jsonl", file, other):
        path.write_text("1\n")
    watch_sources(Path("locks"), [one, file, two, other], None)
    status()
    assert status()
    for edited in (one / "deep/rows.jsonl", two / "rows.jsonl", file, other):
        edited.write_text("1\n2\n")
        assert not status(), edited
    (two / "new.jsonl").write_text("1\n")
    assert not status()
    (one / "deep/rows.jsonl").unlink()
    assert not status()
    watch_sources(Path("locks"), [one, file, two, other], None)
    assert status()
