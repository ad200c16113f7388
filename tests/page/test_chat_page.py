"""*Chat* in a real Chromium: the answers of `lean-finetune chat`, for two users at once, with images, by keyboard."""

import os
import shutil
import sys
from pathlib import Path

import psutil
import pytest
from PIL import Image
from safetensors.torch import load_file, save_file

from lean_finetune.pinning.locate import TINY_DIRECTORY
from tests.conftest import ROOT
from tests.page.opened_page import SCRIPT, click, opened, press, serving, sound
from tests.page.webdriver import ENTER, Browser, needs_browser
from tests.processes import run_bounded
from tests.small_vision import vision_model

pytest.importorskip("gradio", reason="needs the extra [page]")
pytestmark = [pytest.mark.slow, needs_browser]

QUESTION = "10 + 65 = ?"


def said_by_the_command(question: str, place: Path, *options: str) -> str:
    """The answer in a terminal."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    (place / "questions.txt").write_text(f"{question}\n")
    shell = ["sh", "-c", 'exec "$@" < questions.txt', "sh"]
    command = [*shell, sys.executable, "-m", "lean_finetune", "chat", *options]
    return run_bounded(command, cwd=place, env=environment, timeout_seconds=120, check=True).stdout.strip()


def ask(window: Browser, question: str) -> None:
    """Type a question and send it with Enter."""
    field = window.element("return document.querySelector('#chat-question textarea, #chat-question input')")
    window.type(field, question)
    window.press(ENTER)


def shown(window: Browser, text: str) -> str:
    """The conversation, once it has a text."""
    found = "const found = document.querySelector('#chat-shown').innerText"
    return window.wait(f"{found}; return found.replace(/\\s+/g, ' ').includes(arguments[0]) && found", text)


def note(window: Browser, text: str) -> None:
    window.wait("return document.querySelector('#chat-said').innerText.includes(arguments[0])", text)


def loaded(place: Path) -> list[int]:
    """Processes that have the model."""
    found = psutil.process_iter(["pid", "cmdline", "cwd"])
    return [
        one.info["pid"]
        for one in found
        if one.info["cwd"] == str(place) and "lean_finetune chat --json" in " ".join(one.info["cmdline"] or ())
    ]


def test_two_users_chat_with_one_loaded_model(open_window, tmp_path):
    shutil.copytree(TINY_DIRECTORY, tmp_path / "data/tuned")
    expected = " ".join(said_by_the_command(QUESTION, tmp_path).split())
    with serving(cwd=tmp_path) as address:
        window, second = opened(open_window(1400), address, "Chat"), opened(open_window(400), address, "Chat")
        ask(window, QUESTION)
        shown(window, expected)
        note(window, "conversations of at most")
        ask(second, SCRIPT)
        note(second, "conversations of at most")
        assert "<img src=x" in shown(second, "window.ran=1")
        assert QUESTION not in shown(second, "window.ran=1") and "<img" not in shown(window, expected)
        assert len(loaded(tmp_path)) == 1
        ask(window, "And 1 + 1?")
        shown(window, "And 1 + 1?")
        note(window, "conversations of at most")
        window.picture(tmp_path / "chat-1400.png")
        second.picture(tmp_path / "chat-400.png")
        press(window, "chat-new")
        window.wait("return !document.querySelector('#chat-shown').innerText.includes('10 + 65')")
        ask(window, QUESTION)
        shown(window, expected)
        note(window, "conversations of at most")
        press(window, "chat-unload")
        note(window, "Its memory is free")
        assert loaded(tmp_path) == []
        ask(second, "And now?")
        note(second, "conversations of at most")
        for each in (window, second):
            sound(each, address)
    assert loaded(tmp_path) == [], "it outlives the page"


def test_a_model_that_takes_images_is_shown_one(open_window, tmp_path):
    weights = load_file(vision_model(tmp_path / "data/tuned") / "model.safetensors")
    larger = {name: 6 * tensor if tensor.ndim > 1 else tensor for name, tensor in weights.items()}
    save_file(larger, tmp_path / "data/tuned/model.safetensors", metadata={"format": "pt"})  # Answers with text.
    name = "<b onclick=run()>.png"
    Image.radial_gradient("L").convert("RGB").resize((112, 84)).save(tmp_path / name)
    options = ("--image", str(tmp_path / name))
    expected, without = (
        " ".join(said_by_the_command("What is it?", tmp_path, *more).split()) for more in (options, ())
    )
    assert len(expected) > 100 and expected[:100] != without[:100]
    with serving(cwd=tmp_path) as address:
        window = opened(open_window(400), address, "Chat")
        click(window, "Images")
        window.type(
            window.element("return document.querySelector('#chat-images input[type=file]')"), str(tmp_path / name)
        )
        window.wait("return document.querySelector('#chat-images').innerText.includes('png')")
        ask(window, "What is it?")
        shown(window, expected[:20])
        window.picture(tmp_path / "chat-image-400.png")
        click(window, "New conversation")
        window.wait("return document.querySelectorAll('#chat-shown [data-testid=bot]').length === 0")
        ask(window, "Another one?")
        window.wait("return document.querySelectorAll('#chat-shown [data-testid=bot]').length > 0")
        click(window, "Stop the answer")
        note(window, "Stopped; the question is left out")
        sound(window, address)
        shutil.rmtree(tmp_path / "data/tuned")
        shutil.copytree(TINY_DIRECTORY, tmp_path / "data/tuned")
        ask(window, "Again?")
        note(window, "takes no images")
        shutil.rmtree(tmp_path / "data/tuned")
        ask(window, "Again?")
        note(window, "no trained model yet")
