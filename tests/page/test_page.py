"""The page in a real Chromium, as its users meet it: on a phone and on a desktop, with hostile inputs, two at once."""

import json
import os
import pickle
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from cuda_memory.units import GIB, MIB
from tests.conftest import ROOT
from tests.cuda_memory.snapshots import Snapshot, frame
from tests.page.opened_page import FIELD, SCRIPT, answered, click, fill, opened, serving, sound
from tests.page.webdriver import ENTER, TAB, needs_browser
from tests.processes import run_bounded

pytest.importorskip("gradio", reason="needs the extra [page]")
pytestmark = [pytest.mark.slow, needs_browser]

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(cwd=tmp_path_factory.mktemp("local")) as address:
        yield address


@pytest.fixture(scope="module")
def hosted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving("--hosted", cwd=tmp_path_factory.mktemp("hosted")) as address:
        yield address


@pytest.mark.parametrize("width", [400, 1400])
def test_fit_says_what_the_command_says(local, open_window, width, tmp_path):
    """A second computation would drift from the command's."""
    window = opened(open_window(width), local)
    fill(window, "Longest row", "1024")
    click(window, "Does it fit?")
    text = answered(window, "#fit-answer", "usable on RTX-4090")
    command = window.wait(f"return (() => {{ {FIELD} }})()?.value".replace("arguments[0]", "'The same'"))
    first, second = command.splitlines()
    assert first == "lean-finetune fit --model=llama-3.1-8b --gpu=RTX-4090 --length=1024"
    assert second.startswith("lean-finetune run my-run --data=rows.jsonl --model=llama-3.1-8b --gpu=RTX-4090")
    window.picture(tmp_path / f"fit-{width}.png")
    sound(window, local)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "lean_finetune", *first.split()[1:], "--verdict", "--json"]
    said = json.loads(run_bounded(words, env=environment, cwd=tmp_path).stdout)
    assert said["verdict_text"] in text


def test_keyboard_alone_asks_and_reads(local, open_window):
    """From the address bar with Tab and Enter, without a pointer."""
    window = opened(open_window(1400), local)
    for _ in range(40):
        window.press(TAB)
        if window.run("return document.activeElement.innerText === 'Does it fit?'"):
            break
    style = "const style = getComputedStyle(document.activeElement); return style.outlineStyle + style.boxShadow"
    assert window.run(style) != "nonenone"  # The focus is seen.
    window.press(ENTER)
    answered(window, "#fit-answer", "usable on RTX-4090")
    for _ in range(10):
        window.press(TAB)
        if window.run("return document.activeElement.tagName === 'IFRAME'"):
            break
    assert window.run("return document.activeElement.tagName === 'IFRAME'")


def test_hostile_names_and_a_yaml_bomb_are_one_escaped_line(local, open_window):
    window = opened(open_window(400), local)
    fill(window, "Model", SCRIPT)
    click(window, "Does it fit?")
    assert "<img src=x" in answered(window, "#fit-answer", "Error: .*onerror")
    click(window, "Other parameters")
    fill(window, "YAML", BOMB)
    click(window, "Does it fit?")
    answered(window, "#fit-answer", "config.yaml:.*more than 20000 values")
    fill(
        window, "YAML", f"base_model: '{SCRIPT}'\nadapter: lora\nsequence_len: 512\nmicro_batch_size: 1\ndatasets: []\n"
    )
    click(window, "Does it fit?")
    answered(window, "#fit-answer", "Error: .*img src")
    sound(window, local)


@pytest.mark.parametrize("width", [400, 1400])
def test_snapshot_shows_the_page_of_the_command(local, open_window, width, tmp_path):
    snapshot = Snapshot()
    snapshot.reserve(0, 40 * MIB)
    snapshot.alloc(0, 30 * MIB, frame(f"{SCRIPT}.py", 3, SCRIPT))
    path = snapshot.write(tmp_path / "<b onclick=run()>.pickle")
    window = opened(open_window(width), local, "Snapshot")
    window.type(window.element("return document.querySelector('#snapshot-file input[type=file]')"), str(path))
    window.wait("return document.querySelector('#snapshot-file').innerText.includes('pickle')")
    click(window, "What fills")
    assert "<img src=x" in answered(window, "#snapshot-answer", "Timeline.*What filled the memory")
    window.picture(tmp_path / f"snapshot-{width}.png")
    sound(window, local)


def test_a_large_and_a_false_pickle_are_refused(local, open_window, tmp_path):
    """2 GiB need not be uploaded to be refused, and a pickle that would run a program runs none."""
    window = opened(open_window(1400), local, "Snapshot")
    large = tmp_path / "large.pickle"
    with large.open("wb") as file:
        file.truncate(2 * GIB)
    fill(window, "Or the file", str(large))
    click(window, "What fills")
    answered(window, "#snapshot-answer", "Error: .*must have at most 1 GiB")

    class Program:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/ran",)

    (tmp_path / "program.pickle").write_bytes(pickle.dumps(Program()))
    fill(window, "Or the file", str(tmp_path / "program.pickle"))
    click(window, "What fills")
    answered(window, "#snapshot-answer", "Error: .*program.pickle")
    assert not (tmp_path / "ran").exists()
    sound(window, local)


def test_hosted_page_has_limits(hosted, open_window, tmp_path):
    window = opened(open_window(400), hosted)
    assert "Or the file" not in window.text()
    tabs = window.run("return [...document.querySelectorAll('[role=tab]')].map(one => one.innerText.trim())")
    assert set(tabs) == {"Fit", "Snapshot"}, "a stranger could start programs here"
    config = json.loads(urllib.request.urlopen(f"{hosted}config", timeout=30).read())
    assert len(config["dependencies"]) == 2, "events that no tab has"
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    fill(window, "Model", str(tmp_path))
    click(window, "Does it fit?")
    answered(window, "#fit-answer", "Error: the model must be one of the list or a hub id")
    click(window, "Other parameters")
    config = f"base_model: {tmp_path}\nadapter: lora\nsequence_len: 512\nmicro_batch_size: 1\ndatasets: []\n"
    fill(window, "YAML", config)
    click(window, "Does it fit?")
    assert "usable on" not in answered(window, "#fit-answer", "Error: (?!the model must be one)")
    large = tmp_path / "large.pickle"
    with large.open("wb") as file:
        file.truncate(2 * GIB)
    request = urllib.request.Request(f"{hosted}gradio_api/upload", b"", {"Content-Length": str(2 * GIB)})
    with pytest.raises(urllib.error.HTTPError, match="413"):
        urllib.request.urlopen(request, timeout=30)


def test_two_users_at_once_see_their_own_answers(hosted, open_window, tmp_path):
    """Both are answered, and neither sees the other's file."""
    texts = {}
    windows = {}
    for name in ("first", "second"):
        snapshot = Snapshot()
        snapshot.reserve(0, 20 * MIB)
        snapshot.alloc(0, 5 * MIB, frame(f"of_{name}.py", 7, "forward"))
        (tmp_path / name).mkdir()
        path = snapshot.write(tmp_path / name / "snapshot.pickle")
        windows[name] = opened(open_window(1400), hosted, "Snapshot")
        windows[name].type(
            windows[name].element("return document.querySelector('#snapshot-file input[type=file]')"), str(path)
        )
        windows[name].wait("return document.querySelector('#snapshot-file').innerText.includes('pickle')")
    for window in windows.values():
        click(window, "What fills")
    for name, window in windows.items():
        texts[name] = answered(window, "#snapshot-answer", "What filled the memory")
    assert "of_first.py" in texts["first"] and "of_second.py" not in texts["first"]
    assert "of_second.py" in texts["second"] and "of_first.py" not in texts["second"]


@pytest.mark.parametrize("width", [400, 1400])
def test_experiments_are_those_of_the_project(open_window, width, tmp_path):
    """The rows of `compare`, in the checkout under test."""
    with serving(cwd=ROOT) as address:
        window = opened(open_window(width), address, "Experiments")
        click(window, "Compare")
        answered(window, "#experiments-answer", "experiment.*workspace.*baseline")
        window.picture(tmp_path / f"experiments-{width}.png")
        sound(window, address)
