"""A page as a headless Chromium shows it."""

import html
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.processes import run_bounded

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, which is not installed")
OPTIONS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --enable-logging=stderr "
    "--virtual-time-budget=5000 --dump-dom"
).split()
FRAME = """<iframe srcdoc="{page}" width="{width}" height="900"></iframe>
<script>onload = () => setTimeout(() => {{
  const page = document.querySelector("iframe").contentWindow, $$ = x => [...page.document.querySelectorAll(x)];
  const requests = page.performance.getEntriesByType("resource").map(entry => entry.name);
  document.body.textContent = JSON.stringify({{requests, value: {expression}}});
}}, 500)</script>"""


def look(text: str, expression: str, directory: Path, *, width: int, dark: bool = False) -> Any:
    """The value of a JavaScript expression in a page: `page` is its window, `$$` finds all elements of a selector.

    A page that requests another file, or with an error in the browser's console, fails the test.
    """
    assert CHROMIUM is not None
    directory.mkdir(exist_ok=True)
    (directory / "frame.html").write_text(FRAME.format(page=html.escape(text), width=width, expression=expression))
    theme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    command = [CHROMIUM, *OPTIONS, theme, f"--user-data-dir={directory}", f"{directory}/frame.html"]
    done = run_bounded(command, check=True, timeout_seconds=60)
    messages = [line.partition("CONSOLE")[2] for line in done.stderr.splitlines()]
    assert not re.search("error|uncaught|refused", "\n".join(messages), re.IGNORECASE), messages
    found = json.loads(html.unescape(re.search("<body>(.*)</body>", done.stdout, re.DOTALL)[1]))  # type: ignore[index]
    assert found["requests"] == []
    return found["value"]
