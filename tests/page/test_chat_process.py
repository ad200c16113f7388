"""The chat process that all windows share: whose answer is whose, and how it ends."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lean_finetune.core.errors import UserError
from lean_finetune.page.project import chat_process
from lean_finetune.page.project.chat_process import ChatModel

MODEL = """
import json, signal, sys, time
def say(**event): print(json.dumps(event), flush=True)
if "--image=none" in sys.argv:
    print("error: --image: no such file", file=sys.stderr); sys.exit(2)
say(event="ready", words=sys.argv[1:])
for line in sys.stdin:
    text = json.loads(line)["messages"][-1]["content"]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        say(event="text", text=text)
        if text == "long": time.sleep(60)
        if text == "crash": sys.exit("Traceback: something broke")
        say(event="answer", text=text, stopped=False)
    except KeyboardInterrupt:
        say(event="answer", text=None, stopped=True)
"""
"""Stands for `lean-finetune chat --json`: repeats the question."""


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The processes that were started, in a directory with a model."""
    monkeypatch.chdir(tmp_path)
    Path("data/tuned").mkdir(parents=True)
    Path("data/tuned/config.json").write_text("{}")
    Path("a.png").touch()
    Path("none").touch()
    found, popen = [], subprocess.Popen

    def start(command: list[str], **options: Any) -> Any:
        found.append(popen([sys.executable, "-c", MODEL, *command[3:]], **options))
        return found[-1]

    monkeypatch.setattr(chat_process.subprocess, "Popen", start)
    yield found
    for process in found:
        process.kill()
        process.wait()


@pytest.fixture
def model(started: list[Any]) -> Iterator[ChatModel]:
    made = ChatModel()
    yield made
    made.end()


def asked(model: ChatModel, text: str, images: tuple[str, ...] = (), who: str = "a") -> list[Any]:
    return list(model.answer([{"role": "user", "content": text}], images, who))


def test_all_windows_share_one_process_until_images_or_the_model_change(model: ChatModel, started: list[Any]):
    """Two copies of a model in a memory that has room for one, or answers of yesterday's model."""
    assert [one["event"] for one in asked(model, "x")] == ["ready", "text", "answer"]
    assert asked(model, "y", who="b")[-1]["text"] == "y" and len(started) == 1
    assert asked(model, "x", ("a.png",))[0]["words"] == ["chat", "--json", "--image=a.png"]
    assert len(started) == 2 and started[0].poll() is not None
    Path("data/tuned/new").write_text("{}")
    Path("data/tuned/new").replace("data/tuned/config.json")
    asked(model, "x", ("a.png",))
    assert len(started) == 3 and started[1].poll() is not None
    model.end()
    assert started[2].poll() is not None and asked(model, "x")[-1]["text"] == "x"


def test_an_answer_is_stopped_by_its_asker_alone(model: ChatModel):
    answer = model.answer([{"role": "user", "content": "long"}], (), "a")
    assert [next(answer)["event"], next(answer)["event"]] == ["ready", "text"]
    model.stop("b")
    model.stop("a")
    assert next(answer) == {"event": "answer", "text": None, "stopped": True}
    assert list(answer) == []
    model.stop("a")
    assert asked(model, "x")[-1]["text"] == "x"


def test_a_window_that_is_closed_leaves_nothing_to_the_next(model: ChatModel, started: list[Any]):
    """The rest of another user's answer."""
    answer = model.answer([{"role": "user", "content": "long"}], (), "a")
    next(answer), next(answer)
    answer.close()
    assert [one.get("text") for one in asked(model, "x", who="b")] == [None, "x", "x"] and len(started) == 1


def test_what_ends_the_process_is_one_line_and_the_next_question_starts_another(model: ChatModel, started: list[Any]):
    with pytest.raises(UserError, match="code 1: Traceback: something broke"):
        asked(model, "crash")
    with pytest.raises(UserError, match="--image: no such file"):
        asked(model, "x", ("none",))
    with pytest.raises(UserError, match="drop it again"):
        asked(model, "x", ("gone.png",))
    answer = model.answer([{"role": "user", "content": "long"}], (), "a")
    next(answer), next(answer)
    model.end()
    with pytest.raises(UserError, match="unloaded meanwhile"):
        next(answer)
    assert asked(model, "x")[-1]["text"] == "x" and len(started) == 4


def test_no_process_starts_while_the_page_ends(model: ChatModel, started: list[Any]):
    model.close()
    with pytest.raises(UserError):
        asked(model, "x")
    assert started[0].poll() is not None


def test_no_model_and_a_run_are_refused_before_anything_is_loaded(
    model: ChatModel, started: list[Any], monkeypatch: pytest.MonkeyPatch
):
    Path("data/tuned/config.json").rename("data/tuned/other.json")
    with pytest.raises(UserError, match="here is no trained model yet"):
        asked(model, "x")
    state = replace(chat_process.read_state(), is_running=True)
    monkeypatch.setattr(chat_process, "read_state", lambda: state)
    with pytest.raises(UserError, match="run goes on"):
        asked(model, "x")
    assert started == []
