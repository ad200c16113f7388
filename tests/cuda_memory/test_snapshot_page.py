"""The page about a snapshot in a browser: complete without network, readable on a phone, escaped, small."""

from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from click.testing import CliRunner

from cuda_memory.page.snapshot_page import MOST_POINTS, drawn_instants
from cuda_memory.snapshot_file import read_snapshot
from cuda_memory.timeline import timeline_of
from cuda_memory.units import MIB
from lean_finetune.cli import main
from tests.cuda_memory.snapshots import Dictionary, Snapshot, frame
from tests.report.browser import look, needs_chromium

FORWARD = frame("/home/user/model.py", 12, "forward")
HOSTILE = frame("<script>alert(1)</script>.py", 3, '"><img src=x onerror=alert(1)>')
STEPS = 4


def snapshot(*, layers: int = 6, leak: int = 0, fails: bool = True, place: Dictionary = FORWARD) -> Snapshot:
    """Steps that allocate activations, release them and update; `leak` tensors are kept after each."""
    found, weights = Snapshot(), 8 * MIB
    found.reserve(0, 64 * MIB)
    found.alloc(0, weights, frame("torch/nn/modules/linear.py", 100, "__init__"))
    at = weights
    for _ in range(STEPS):
        places = [at + k * MIB for k in range(layers)]
        for start in places:
            found.alloc(start, MIB, place)
        for start in reversed(places[leak:]):
            found.free(start)
        at += leak * MIB
        found.alloc(48 * MIB, 4 * MIB, frame("torch/optim/adamw.py", 400, "step"))
        found.free(48 * MIB)
    if fails:
        found.fail(32 * MIB, 10 * MIB, place)
    return found


def page_of(found: Snapshot, directory: Path, *options: str) -> str:
    """The page that the command writes."""
    path, page = found.write(directory / "oom_snapshot.pickle"), directory / "page.html"
    done = CliRunner().invoke(main, ["snapshot", str(path), "--html", str(page), *options])
    assert done.exit_code == 0, done.output
    return page.read_text()


def test_the_page_answers_what_failed_and_what_filled_the_memory(tmp_path: Path):
    text = page_of(snapshot(leak=1), tmp_path, "--gpu", "8GiB")
    for shown in (
        "Out of memory: 32 MiB requested in user/model.py:12 forward, 10 MiB free; tensors had 12 MiB; weights 67 %",
        "Tensors when it failed, by category",
        "<td>user/model.py:12 forward</td><td>4 MiB</td>",
        "On 8GiB: fits:",
        "train.method=qlora",
        "load_in_4bit: true",
        "expandable_segments:True",
        "Dashed red line: a request failed.",
    ):
        assert shown in text, shown


def test_names_of_a_file_are_escaped(tmp_path: Path):
    """A snapshot that somebody sent runs a script in the browser of whoever explains it."""
    text = page_of(snapshot(leak=1, place=HOSTILE), tmp_path)
    assert "&lt;script&gt;alert(1)" in text and "<script" not in text and "<img" not in text


@pytest.mark.parametrize("events", [1, 7, MOST_POINTS, 5003])
def test_few_points_keep_both_peaks(tmp_path: Path, events: int):
    """A timeline that cuts off the very instant it is drawn for."""
    found, random = Snapshot(), np.random.default_rng(events)
    found.reserve(0, 2**40)
    for number, size in enumerate(random.integers(1, 2**20, events).tolist()):
        found.alloc(number << 20, size)
        if random.random() < 0.6:
            found.free(number << 20)
    found.reserve(2**41, 5 * MIB)
    found.release(2**41)
    found.alloc(2**30, 1)
    timeline = timeline_of(read_snapshot(found.write(tmp_path / "run.pickle"))[0])
    instants, reserved = drawn_instants(timeline)
    assert len(instants) <= MOST_POINTS + 2 and np.all(np.diff(instants) >= 0)
    assert timeline.allocated_E[instants].max() == timeline.allocated_E.max()
    assert reserved.max() == timeline.reserved_E.max() == 2**40 + 5 * MIB


@pytest.mark.slow
@needs_chromium
def test_a_browser_asks_for_nothing_else_and_shows_all_on_a_phone(tmp_path: Path):
    """A font or script from elsewhere; a wide table that makes a phone scroll in two directions."""
    text = page_of(snapshot(leak=1), tmp_path)
    seen = "[page.document.documentElement.scrollWidth, $$('svg .capacity').length, "
    seen += "...$$('svg.bars, svg.plot').map(svg => svg.clientWidth)]"
    for width in (400, 1400):
        scroll_width, failures, *charts = look(text, seen, tmp_path / "profile", width=width)
        assert scroll_width <= width and failures == 1 and len(charts) >= 3 and min(charts) > 250


@pytest.mark.parametrize("kind", ["without events", "without blocks", "quiet"])
def test_pages_of_odd_snapshots_can_be_written(tmp_path: Path, kind: str):
    """A snapshot taken without a history, or before anything was allocated: a traceback instead of what is known."""
    found = snapshot(fails=False)
    if kind == "without events":
        found.trace.clear()
    if kind == "without blocks":
        found = Snapshot()
        found.reserve(0, 2 * MIB)
    text = page_of(found, tmp_path)
    assert "Tensors need" in text and "nan" not in text and "None" not in text


def test_a_long_recording_is_a_small_page(tmp_path: Path):
    """A page of ten megabytes that a phone cannot open."""
    found = Snapshot()
    found.reserve(0, 64 * MIB)
    for number in range(1000):
        found.alloc(number % 50 * MIB, MIB, frame(f"model_{number % 200}.py", number, "forward"))
        if number >= 49:
            found.free((number + 1) % 50 * MIB)
    assert len(page_of(found, tmp_path)) < 100_000


def test_the_timeline_is_a_picture_of_its_own(tmp_path: Path):
    """A picture that a browser cannot open, or one with the names of a stranger's file as tags."""
    path = snapshot(leak=1, place=HOSTILE).write(tmp_path / "<b>.pickle")
    picture = tmp_path / "timeline.svg"
    done = CliRunner().invoke(main, ["snapshot", str(path), "--picture", str(picture)])
    assert done.exit_code == 0, done.output
    names = [element.text for element in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")]
    assert names[0] == "<b>.pickle: live memory by category, and reserved memory, MiB" and "reserved (line)" in names


def test_a_page_without_bytes_has_no_shares(tmp_path: Path):
    """A tensor of 0 bytes alone when a request failed: a share of nothing ended in a traceback."""
    found = Snapshot()
    found.reserve(0, 2 * MIB)
    found.alloc(0, 0)
    found.fail(4 * MIB, MIB)
    found.free(0)
    assert "Out of memory" in page_of(found, tmp_path)
