"""A headless Chromium, driven through its debugging pipe."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, which is not installed")
OPTIONS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --remote-debugging-pipe"
).split()


class Page:
    """A tab: what it loads, what it logs, and how it is laid out."""

    def __init__(self, process: subprocess.Popen[bytes]):
        self._process = process
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Network", "Log", "Runtime", "Page"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a command of the DevTools protocol; events before it are kept in `events`."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\0")
        self._process.stdin.flush()
        while (answer := self._read()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        text = bytearray()
        while (byte := self._process.stdout.read(1)) != b"\0":
            assert byte, "Chromium ended"
            text += byte
        return json.loads(text)

    def open(self, path: Path, *, width: int, dark: bool = False) -> None:
        """Load a file in a window of a width and a theme."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[theme])
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read())

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"]["value"]

    def requests(self) -> list[str]:
        """Addresses that the page asked for."""
        sent = (event for event in self.events if event["method"] == "Network.requestWillBeSent")
        return [event["params"]["request"]["url"] for event in sent]

    def errors(self) -> list[dict[str, Any]]:
        """Errors in the browser's console."""
        return [
            event["params"]
            for event in self.events
            if event["method"] == "Runtime.exceptionThrown"
            or (event["method"] == "Runtime.consoleAPICalled" and event["params"]["type"] in ("error", "assert"))
            or (event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] == "error")
        ]


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """A tab of a new browser, whose files are below `profile`."""
    assert CHROMIUM is not None
    # The pipe is file descriptors 3 (commands) and 4 (answers).
    command = ["sh", "-c", 'exec "$@" 3<&0 4>&1', "sh", CHROMIUM, *OPTIONS, f"--user-data-dir={profile}"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        with process:
            yield Page(process)
            process.kill()
    finally:
        process.kill()
