"""A page of its own process, and what its users do in a browser."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.conftest import ROOT
from tests.page.webdriver import DELETE, ELEMENT, ENTER, TAB, Browser
from tests.processes import kill_group

SCRIPT = '<img src=x onerror="window.ran=1"><script>window.ran=1</script>${window.ran=1}{{window.ran=1}}'
BUTTON = (
    "return [...document.querySelectorAll('button')].find(one => one.innerText.includes(arguments[0]) && "
    "!one.closest('.visually-hidden, [aria-hidden=true]'))"
)
DOCUMENT = "document.querySelector(arguments[0] + ' iframe')?.contentDocument?.body?.innerText"
FIELD = (
    "return document.querySelector(`[aria-label^='${arguments[0]}']`) ?? [...document.querySelectorAll('label')]"
    ".find(one => one.innerText.startsWith(arguments[0]))?.querySelector('input, textarea')"
)


@contextmanager
def serving(*options: str, cwd: Path) -> Iterator[str]:
    """The address of a page of its own process."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "lean_finetune", "page", *options]
    process = subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    try:
        found = re.search(r"http://127\.0\.0\.1:\d+/\S*", process.stdout.readline())
        assert found is not None
        yield found[0]
        os.kill(process.pid, signal.SIGINT)
        code = process.wait(60)
        assert code in (0, 130), code
    finally:
        kill_group(process)
        process.stdout.close()


def opened(window: Browser, address: str, tab: str = "Fit") -> Browser:
    window.open(address)
    window.wait("return document.body.innerText.includes('Does it fit?')")
    window.run(f"({BUTTON[7:]}).click()", tab)
    return window


def click(window: Browser, name: str) -> None:
    window.run(f"({BUTTON[7:]}).click()", name)


def press(window: Browser, button: str) -> None:
    """Go to a button with Tab alone, and press it with Enter."""
    for _ in range(60):
        if window.run("return document.activeElement.id === arguments[0]", button):
            break
        window.press(TAB)
    assert window.run("return document.activeElement.id === arguments[0]", button)
    window.press(ENTER)


def fill(window: Browser, label: str, text: str) -> None:
    """Replace the text of a field, as with the keyboard."""
    field = window.wait(FIELD, label)[ELEMENT]
    window.run("arguments[0].focus(); arguments[0].select()", {ELEMENT: field})
    window.type(field, f"{DELETE}{text}")
    window.press(TAB)


def answered(window: Browser, view: str, pattern: str) -> str:
    """The text of an answer, once it matches."""
    return window.wait(
        f"const text = {DOCUMENT}; return text && new RegExp(arguments[1], 's').test(text) && text", view, pattern
    )


def sound(window: Browser, address: str) -> None:
    """No script of a stranger ran, no other server was asked, no error was logged, and nothing sticks out."""
    frames = "[...document.querySelectorAll('iframe')]"
    assert window.run(f"return window.ran === undefined && {frames}.every(one => one.contentWindow.ran === undefined)")
    assert window.requested() <= {address.split("/")[2]} and window.faults() == []
    assert window.run("return document.documentElement.scrollWidth <= innerWidth")
    inner = (
        "[...document.querySelectorAll('iframe')].every(one => one.contentDocument.body.scrollWidth <= one.clientWidth)"
    )
    assert window.run(f"return {inner}")
