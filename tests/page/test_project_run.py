"""The run that a page starts: one at a time, whoever asks, and its state in files that may be damaged."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from lean_finetune.core.errors import UserError
from lean_finetune.page.jobs import option_words
from lean_finetune.page.project import project_run
from lean_finetune.page.project.project_run import PLACE, RunState, read_state, start_run, stop_run
from lean_finetune.page.project.run_document import Training, run_document, status
from lean_finetune.page.project.training_curves import LiveCurves

HOSTILE = "</pre><img src=x onerror=run()><script>run()</script>'\"&"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def sleeper(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stands for `lean-finetune run`: a process that says its words, and waits for a signal."""
    program = "import json, sys, time; print(json.dumps({'event': 'words', 'words': sys.argv[1:]}), flush=True)"
    started, popen = [], subprocess.Popen

    def start(command: list[str], **options: Any) -> Any:
        started.append(popen([sys.executable, "-c", f"{program}; time.sleep(60)", *command[3:]], **options))
        return started[-1]

    monkeypatch.setattr(project_run.subprocess, "Popen", start)
    yield started
    for process in started:
        process.kill()
        process.wait()


def until(event: Any) -> None:
    end = time.monotonic() + 30
    while not event():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_one_run_at_a_time_which_stops_by_a_signal(place: Path, sleeper: Any):
    """Two users who press Run, or a page that was opened again: two trainings in one project."""
    assert read_state().started == 0 and list(place.iterdir()) == []
    with pytest.raises(UserError, match="no run goes on"):
        stop_run()
    start_run(["--set=seed=1"])
    until(lambda: read_state().events)
    state = read_state()
    assert state.is_running and state.events[0]["words"] == ["run", str(place), "--json", "--set=seed=1"]
    with pytest.raises(UserError, match="this project's run goes on"):
        start_run([])
    assert len(sleeper) == 1
    stop_run()
    until(lambda: not read_state().is_running)
    assert sleeper[0].wait(30) == -signal.SIGTERM
    assert status(read_state()) == ("Stopped. Run goes on from here", True)
    (place / "rows.jsonl").touch()
    start_run([])
    until(lambda: read_state().events)
    assert read_state().events[0]["words"] == ["run", ".", "--json"], "no project is made around a user's files"
    assert not read_state().is_stopping


def test_of_users_who_press_run_at_once_one_starts_it(sleeper: Any):
    def press(_: int) -> str:
        try:
            start_run([])
        except UserError as refusal:
            return str(refusal)
        return "started"

    with ThreadPoolExecutor(8) as users:
        said = list(users.map(press, range(8)))
    assert said.count("started") == 1 and len(sleeper) == 1
    assert all("shown below" in one for one in said if one != "started")


def test_another_process_with_the_number_of_an_ended_run_is_not_it(place: Path):
    """A signal to a stranger's process."""
    PLACE.mkdir(parents=True)
    own = psutil.Process()
    about = {"pid": own.pid, "created": own.create_time() - 100, "started": 1.0}
    (PLACE / "process.json").write_text(json.dumps(about))
    assert not read_state().is_running
    with pytest.raises(UserError):
        stop_run()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"pid": "x", "created": 1, "started": 1}', "null"])
def test_damaged_files_are_no_run(place: Path, text: str):
    PLACE.mkdir(parents=True)
    (PLACE / "process.json").write_text(text)
    (PLACE / "events.jsonl").write_text(f'{text}\nnull\n{{"event": 3}}\n{{"event": "stage", "stage": "train"')
    state = read_state()
    assert (state.is_running, state.started, state.events) == (False, 0.0, [])
    assert "No page has started" in run_document(state, training_of())


def test_a_field_is_a_value_and_never_an_option():
    assert option_words({"model": "--json", "data": ""}, " a=1 \n\n") == ["--model=--json", "--set=a=1"]
    with pytest.raises(UserError, match="characters"):
        option_words({"model": "a\x1b[2J"}, None)


STEP = {"step": "4", "loss": "1.5", "heldout_loss": "", "allocated_bytes": "1024", "tokens": "100", "seconds": "0.5"}
END = {
    "event": "end",
    "fits": True,
    "peak_bytes_predicted": 4096,
    "peak_bytes_measured": 4000,
    "base_loss": 2.0,
    "tuned_loss": 1.0,
    "answers": [{"prompt": HOSTILE, "expected": HOSTILE, "base": HOSTILE, "tuned": HOSTILE}],
}


def training_of(*steps: Any, written: float = 0.0) -> Training:
    return Training(steps=steps, written=written, peak_bytes=4096, planned_steps=10)


def state_of(*events: Any, **changes: Any) -> RunState:
    values = {
        "is_running": False,
        "is_stopping": False,
        "started": 1.0,
        "said_last": 5.0,
        "events": events,
        "said": [HOSTILE],
        **changes,
    }
    return RunState(**values)


def test_every_text_of_a_run_is_escaped():
    """Names of stages, of files in messages, and answers of the model."""
    stage = {"event": "stage", "stage": HOSTILE, "number": 1, "of": HOSTILE, "cached": False}
    failed = {"event": "failed", "stage": HOSTILE, "exit_code": 1, "error": HOSTILE}
    for events in ((stage, END), (stage, failed), (stage, {"event": "note", "text": HOSTILE})):
        for is_running in (True, False):
            state = state_of(*events, is_running=is_running, said=[HOSTILE, f"error: {HOSTILE}"])
            found = run_document(state, training_of(STEP))
            assert "<img" not in found and "<script" not in found and "&lt;img src=x" in found


def test_the_document_says_where_the_run_is_and_what_came_out():
    stage = {"event": "stage", "stage": "train", "number": 8, "of": 10, "cached": False}
    assert status(state_of(stage, is_running=True))[0] == "Runs: stage 8 of 10, train"
    assert status(state_of(stage, is_running=True, is_stopping=True))[0].startswith("Stops")
    failed = {"event": "failed", "stage": "train", "exit_code": 3, "error": "no memory"}
    assert status(state_of(stage, failed)) == ("Stage train failed: no memory", False)
    assert status(state_of({"event": "error", "error": "--set: wrong"})) == ("Failed: --set: wrong", False)
    assert status(state_of(stage))[0].startswith("Failed: it was ended")
    found = run_document(state_of(stage, END), training_of(STEP))
    for part in ("Finished", "of 10", "4 KiB predicted", "200 tokens/s", "2 before training, 1 after", "(+2.4%)"):
        assert part in found, part
    outside = "started outside of this page"
    assert outside not in found and outside in run_document(state_of(stage, END), training_of(STEP, written=6.0))
    assert outside not in run_document(state_of(stage, is_running=True), training_of(STEP, written=6.0))


def test_curves_are_read_as_they_grow(place: Path):
    """A line that is half-written, one that is damaged, a run that starts over, and an earlier run's curves."""
    curves = LiveCurves()
    assert curves.steps(0.0) == ()
    live = place / "scratch/train/a/curves.csv"
    live.parent.mkdir(parents=True)
    live.write_text("step,loss,allocated_bytes\n0,2.0,\n1,1.")
    assert [step["loss"] for step in curves.steps(0.0)] == ["2.0"]
    with live.open("a") as file:
        file.write("5,7\nx,1,\n2,nan,\n3,1.0,inf\n4\n5,0.5,\n")
    assert [(step["step"], step["loss"]) for step in curves.steps(0.0)] == [("0", "2.0"), ("1", "1.5"), ("5", "0.5")]
    again = live.with_name("new")
    again.write_text("step,loss,allocated_bytes\n0,3.0,\n")
    again.replace(live)
    assert [step["loss"] for step in curves.steps(0.0)] == ["3.0"]
    os.utime(live, (50, 50))
    assert curves.steps(60.0) == () and len(curves.steps(50.0)) == 1
    finished = place / "data/train/curves.csv"
    finished.parent.mkdir(parents=True)
    finished.write_text("step,loss,allocated_bytes\n7,0.1,\n")
    assert [step["step"] for step in curves.steps(0.0)] == ["7"]
