"""Drive a real Chromium through chromedriver: the W3C protocol over HTTP, without a library."""

import base64
import json
import re
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.processes import kill_group
from tests.report.browser import CHROMIUM

DRIVER = shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="needs Chromium and chromedriver")
ARGUMENTS = (
    "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --disable-sync "
    "--disable-background-networking --disable-component-update --disable-quic --hide-scrollbars"
).split()
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
TAB, ENTER, DELETE = "\ue004", "\ue007", "\ue017"
WAIT_SECONDS = 120


class Browser:
    """One window with a profile of its own."""

    def __init__(self, port: int, width: int, height: int = 900):
        """Open it; `width` in pixels, as narrow as a phone."""
        self._root = f"http://127.0.0.1:{port}"
        metrics = {"width": width, "height": height, "pixelRatio": 1.0, "touch": width < 600}
        options = {"args": ARGUMENTS, "binary": CHROMIUM, "mobileEmulation": {"deviceMetrics": metrics}}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"performance": "ALL", "browser": "ALL"}}
        value = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._root += f"/session/{value['sessionId']}"

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._root + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=120) as found:
                return json.load(found)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{method} {path}: {error.read().decode()[:600]}") from None

    def open(self, address: str) -> None:
        """Load a page."""
        self._call("POST", "/url", {"url": address})

    def run(self, script: str, *arguments: Any) -> Any:
        """The value that a script in the page returns."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def wait(self, script: str, *arguments: Any, seconds: float = WAIT_SECONDS) -> Any:
        """The value of a script as soon as it is true."""
        end = time.monotonic() + seconds
        while not (found := self.run(script, *arguments)):
            assert time.monotonic() < end, f"{script}: not within {seconds} s; the page: {self.text()[:1500]}"
            time.sleep(0.3)
        return found

    def text(self) -> str:
        """What the page shows, without its frames."""
        return self.run("return document.body.innerText")

    def element(self, script: str) -> str:
        """The id of the element that a script returns, once it is there."""
        return self.wait(script)[ELEMENT]

    def type(self, element: str, text: str) -> None:
        """Type into an element; into a file field, the path of a file."""
        self._call("POST", f"/element/{element}/value", {"text": text})

    def press(self, *keys: str) -> None:
        """Press keys, one after another, wherever the focus is."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._call("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def picture(self, path: Path) -> None:
        """Write a picture of the window."""
        path.write_bytes(base64.b64decode(self._call("GET", "/screenshot")))

    def requested(self) -> set[str]:
        """Hosts of all requests so far, with their ports; ``data:`` and ``blob:`` ask nobody."""
        entries = self._call("POST", "/se/log", {"type": "performance"})
        messages = (json.loads(entry["message"])["message"] for entry in entries)
        sent = (one["params"]["request"]["url"] for one in messages if one["method"] == "Network.requestWillBeSent")
        return {match[1] for url in sent if (match := re.match("(?:https?|wss?)://([^/]+)", url))}

    def faults(self) -> list[str]:
        """Errors in the browser's console."""
        entries = self._call("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    def close(self) -> None:
        """Close the window."""
        self._call("DELETE", "")


@contextmanager
def browsers() -> Iterator[Callable[..., Browser]]:
    """A function that opens windows of a width; all are closed at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    driver = subprocess.Popen(
        [str(DRIVER), f"--port={port}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    opened: list[Browser] = []

    def open_window(width: int, height: int = 900) -> Browser:
        opened.append(Browser(port, width, height))
        return opened[-1]

    try:
        end = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=5).close()
                break
            except OSError:
                assert time.monotonic() < end, "chromedriver does not answer"
                time.sleep(0.2)
        yield open_window
        for each in opened:
            each.close()
    finally:
        kill_group(driver)
