"""The stages under DVC: a line for each, none of DVC's own, and errors in one line. Stages here are shell commands."""

import json
import logging
import os
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from dvc.repo import Repo

from lean_finetune.commands.run.pipeline import StageFailed, end_stages, run_pipeline
from lean_finetune.commands.run.shown import Shown
from lean_finetune.core.errors import UserError
from lean_finetune.core.stage_command import REPORT_FILE
from tests.json_answers import check_event
from tests.processes import command_words, run_bounded, wait_for

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Of DVC's libraries.
PIPELINE = """
stages:
  first:
    desc: Copy the rows.
    cmd: 'cp rows.txt first.txt; echo "note: first speaks"'
    deps: [rows.txt]
    outs: [first.txt]
  second:
    desc: Copy them again.
    cmd: '{second}'
    deps: [first.txt]
    outs: [second.txt]
"""


def make(directory: Path, second: str = "cp first.txt second.txt") -> None:
    """A DVC project of two stages in a git repository."""
    run_bounded(["git", "init", "-q", str(directory)], check=True)
    logging.getLogger("dvc").setLevel(logging.WARNING)
    Repo.init(str(directory)).close()
    (directory / "dvc.yaml").write_text(PIPELINE.format(second=second))
    (directory / "rows.txt").write_text("1\n")


def run(capfd: pytest.CaptureFixture[str], *, as_json: bool = False) -> tuple[list[str], list[str], str]:
    """The stages that ran, the lines of standard output, and standard error."""
    with Shown(as_json=as_json) as shown:
        ran = run_pipeline(shown)
    captured = capfd.readouterr()
    return ran, captured.out.splitlines(), captured.err


def test_each_stage_that_runs_has_one_line_and_dvc_none(home: Path, capfd: pytest.CaptureFixture[str]):
    """`Updating lock file`, `Use dvc push` and commands between the lines that matter."""
    make(home)
    lines = ["[1/2] first: Copy the rows.", "note: first speaks", "[2/2] second: Copy them again."]
    assert run(capfd) == (["first", "second"], lines, "")
    assert run(capfd) == ([], [], "")
    (home / "rows.txt").write_text("2\n")
    assert run(capfd)[0] == ["first", "second"] and (home / "second.txt").read_text() == "2\n"
    (home / "second.txt").unlink()
    assert run(capfd)[1] == ["[2/2] second: the same as in an earlier run, taken from the cache"]


def test_events_are_json_lines_and_stages_print_to_standard_error(home: Path, capfd: pytest.CaptureFixture[str]):
    """A line of a stage between the events of a script that reads them."""
    make(home)
    _, lines, err = run(capfd, as_json=True)
    events = [json.loads(line) for line in lines]
    assert [(one["event"], one["stage"]) for one in events] == [
        *(("stage", "first"), ("stage_end", "first")),
        *(("stage", "second"), ("stage_end", "second")),
    ]
    assert events[0] == {"event": "stage", "stage": "first", "number": 1, "of": 2, "cached": False}
    for event in events:
        check_event(event)
    assert events[1]["seconds"] >= 0 and err == "note: first speaks\n"


def test_a_failed_stage_decides_the_exit_code(home: Path, capfd: pytest.CaptureFixture[str]):
    """`dvc repro` exits with 255, and adds two lines to that of the stage."""
    make(home, 'echo "error: no" >&2; exit 3')
    with Shown(as_json=False) as shown, pytest.raises(StageFailed) as failed:
        run_pipeline(shown)
    assert (failed.value.stage, failed.value.exit_code) == ("second", 3)
    captured = capfd.readouterr()
    assert captured.err == "error: no\n" and captured.out.endswith("[2/2] second: Copy them again.\n")


FAILING = """
import click
from lean_finetune.core.errors import UserError
from lean_finetune.core.stage_command import StageCommand

@click.command(cls=StageCommand)
def stage():
    raise UserError("rows.txt:1: must be a word; got 1; write one", "see line 1")

stage()
"""


def test_the_line_of_a_failed_stage_is_known(home: Path, capfd: pytest.CaptureFixture[str]):
    """A script that reads the events had to find the reason in all that stages print."""
    (home / "failing.py").write_text(FAILING)
    make(home, f"PYTHONPATH={shlex.quote(os.pathsep.join(sys.path))} {shlex.quote(sys.executable)} failing.py")
    with Shown(as_json=True) as shown, pytest.raises(StageFailed) as failed:
        run_pipeline(shown)
    line = "rows.txt:1: must be a word; got 1; write one"
    assert failed.value.lines == [line, "see line 1"] and failed.value.exit_code == 1
    assert capfd.readouterr().err == f"note: first speaks\nerror: {line}\n  see line 1\n"
    assert REPORT_FILE not in os.environ


def test_a_stage_without_memory_is_named(home: Path):
    """The kernel ends it without a word."""
    make(home, "kill -9 $$")
    with Shown(as_json=False) as shown, pytest.raises(UserError, match="second: SIGKILL ended it") as failed:
        run_pipeline(shown)
    assert failed.value.exit_code == 137


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("stages: [", "dvc: "),
        (PIPELINE.format(second="true"), "second.txt"),
        (PIPELINE.replace("deps: [rows.txt]", "deps: [none.txt]").format(second="true"), "none.txt"),
    ],
)
def test_what_dvc_refuses_is_one_line(home: Path, change: str, says: str):
    make(home)
    (home / "dvc.yaml").write_text(change)
    with Shown(as_json=False) as shown, pytest.raises(UserError, match=says) as refused:
        run_pipeline(shown)
    assert str(refused.value).startswith("dvc: ") and "\n" not in str(refused.value)


def test_a_lock_of_another_process_is_one_line(home: Path, capfd: pytest.CaptureFixture[str]):
    """DVC names pages of its manual, and zc.lockfile prints a line of its own."""
    make(home, "sleep 60")
    with Repo(str(home)) as other, other.lock, Shown(as_json=False) as shown:
        with pytest.raises(UserError, match="dvc: another process runs this project's pipeline; wait for it"):
            run_pipeline(shown)
    assert capfd.readouterr() == ("", "")
    locked = home / ".dvc/tmp/rwlock"
    program = textwrap.dedent("""
        from lean_finetune.commands.run.pipeline import run_pipeline
        from lean_finetune.commands.run.shown import Shown
        with Shown(as_json=False) as shown:
            run_pipeline(shown)
    """)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", program], env=environment, start_new_session=True)
    try:
        until = time.monotonic() + 60
        while not locked.exists() or "second.txt" not in locked.read_text():
            assert time.monotonic() < until and process.poll() is None
            time.sleep(0.05)
        with Shown(as_json=False) as shown, pytest.raises(UserError, match=f"process {process.pid} runs"):
            run_pipeline(shown)
    finally:
        os.killpg(process.pid, 9)
        process.wait()
    capfd.readouterr()
    (home / "dvc.yaml").write_text(PIPELINE.format(second="cp first.txt second.txt"))
    ran, _, err = run(capfd)
    assert ran == ["second"] and err == "", "DVC says that it removed the lock of a process that had been killed"


def test_a_stage_ends_beside_a_process_that_has_ended():
    """A command of DVC that nobody had waited for yet kept the stage alive."""
    with (
        subprocess.Popen(["true"]) as ended,
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "stages.train"]) as stage,
    ):
        wait_for(lambda: not command_words(psutil.Process(ended.pid)))
        end_stages()
        assert stage.poll() is not None or stage.wait(1) == -signal.SIGTERM
