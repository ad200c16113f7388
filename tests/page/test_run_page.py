"""*Run* in a real Chromium: a run is started, watched, stopped and continued; two users see the same one."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.page.opened_page import SCRIPT, answered, click, fill, opened, press, serving, sound
from tests.page.webdriver import Browser, needs_browser
from tests.processes import run_bounded

pytest.importorskip("gradio", reason="needs the extra [page]")
pytestmark = [pytest.mark.slow, needs_browser]

SMALL = {
    "data.max_rows": 120,
    "data.heldout_fraction": 0.1,
    "train.tokens_per_step": 2048,
    "train.epochs": 8,
    "evaluate.generate_rows": 6,
    "evaluate.max_new_tokens": 8,
    "run.cpu_threads": 1,
    "run.checkpoint_seconds": 0.05,
}
SETS = "\n".join(f"{key}={value}" for key, value in SMALL.items())
RUN = "#run-answer"


START, STOP = "run-start", "run-stop"


@contextmanager
def ended_run(place: Path) -> Iterator[None]:
    """No run is left, whatever fails."""
    try:
        yield
    except BaseException:
        with suppress(OSError, ValueError, ProcessLookupError):
            os.kill(json.loads((place / "scratch/page/process.json").read_text())["pid"], signal.SIGTERM)
        raise


def press_by_pointer(window: Browser, button: str) -> None:
    window.run("document.getElementById(arguments[0]).click()", button)


def test_a_run_is_started_watched_stopped_and_continued(open_window, tmp_path):
    """By keyboard alone on a desktop; a second user on a phone sees the same run, and a later page too."""
    place = tmp_path / "project"
    place.mkdir()
    with serving(cwd=place) as address, ended_run(place):
        window = opened(open_window(1400), address, "Run")
        answered(window, RUN, "No page has started a run here")
        assert list(place.iterdir()) == []
        click(window, "Model, rows and parameters")
        fill(window, "Parameters of the run", SETS)
        press(window, START)
        answered(window, RUN, "Runs: stage .* of 10, train.*Step.*predicted.*Loss, nats per trained token")
        window.run("document.querySelector('#run-answer iframe').contentDocument.isFirst = true")
        second = opened(open_window(400), address, "Run")
        answered(second, RUN, "Runs: stage .* of 10, train")
        press_by_pointer(second, START)
        second.wait("return document.querySelector('#run-said').innerText.includes('run goes on')")
        second.picture(tmp_path / "run-400.png")
        is_first = "return document.querySelector('#run-answer iframe').contentDocument.isFirst"
        assert window.run(is_first), "the frame was loaded again, and flickers"
        window.picture(tmp_path / "run-1400.png")
        press(window, STOP)
        for each in (window, second):
            answered(each, RUN, "Stopped. Run goes on from here")
        assert "stopped by SIGTERM" in answered(window, RUN, "Last lines")
        assert list(place.glob("scratch/train/*/step-*")), "no checkpoint was saved"
        for each in (window, second):
            sound(each, address)
        press_by_pointer(second, START)
        second.wait("return document.querySelector('#run-said').innerText === ''")
    with serving(cwd=place) as address:  # The run goes on without a page.
        later = opened(open_window(1400), address, "Run")
        answered(later, RUN, "Runs: stage .* of 10, train|Finished")
        answered(later, RUN, "Finished.*What came out.*before training, .* after")
        later.picture(tmp_path / "run-finished.png")
        sound(later, address)
        for width in (400, 1400):
            other = opened(open_window(width), address, "Experiments")
            click(other, "Compare")
            answered(other, "#experiments-answer", "workspace.*baseline.*Training loss.*Memory of each")
            other.run("document.querySelector('#experiments-answer').scrollIntoView()")
            other.picture(tmp_path / f"compared-{width}.png")
            sound(other, address)
        events = [json.loads(line) for line in (place / "scratch/page/events.jsonl").read_text().splitlines()]
        assert [one["stage"] for one in events if one["event"] == "stage"][:2] == ["pin_code", "train"]
        assert run_bounded(["git", "status", "--short"], cwd=place).stdout == ""


def test_hostile_fields_are_one_escaped_line(open_window, tmp_path):
    """The command refuses them, and makes no project."""
    with serving(cwd=tmp_path) as address, ended_run(tmp_path):
        window = opened(open_window(400), address, "Run")
        click(window, "Model, rows and parameters")
        fill(window, "Model of the run", SCRIPT)
        fill(window, "Rows", SCRIPT)
        press_by_pointer(window, START)
        answered(window, RUN, "Failed: .*<img src=x")
        fill(window, "Parameters of the run", f"train.{SCRIPT}=1")
        press_by_pointer(window, START)
        answered(window, RUN, "Failed: .*unknown parameter.*")
        press_by_pointer(window, STOP)
        window.wait("return document.querySelector('#run-said').innerText.includes('no run goes on')")
        sound(window, address)
        assert [path.name for path in tmp_path.iterdir()] == ["scratch"]
