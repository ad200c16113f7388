"""Who may ask the page what: the checks before Gradio sees a request.

A page on the loopback interface can be reached by every site that its user opens, and by every other user of the
machine. So the request must name this page as its host (a name that was made to point here does not), come from this
page or from none, and bring the key that the command printed, which is kept in a cookie.
"""

import secrets
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs, urlsplit

from lean_finetune.page.limits import TEXT_BYTES, Limits

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

UPLOAD = "/gradio_api/upload"
PATHS = (
    "/assets/",
    "/static/",
    "/gradio_api/queue/",
    "/gradio_api/upload",
    "/gradio_api/heartbeat/",
    "/gradio_api/file=",
)
"""Beginnings of the paths that the page uses; Gradio has many others."""
EXACT = (
    "/",
    "/config",
    "/theme.css",
    "/favicon.ico",
    "/manifest.json",
    "/gradio_api/startup-events",
    "/gradio_api/cancel",
)
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; object-src 'none'; base-uri 'self'; "
    "form-action 'self'"
)
"""Nothing is asked of another server. Gradio's own scripts need `unsafe-inline` and `unsafe-eval`."""
OPEN = ("/manifest.json", "/favicon.ico")
"""Browsers ask for these without cookies."""
COOKIE = "lean_finetune_page"


class Guard:
    """An ASGI application in front of another one."""

    def __init__(
        self, app: App, limits: Limits, *, hosts: Iterable[str] | None, key: str | None, kept_bytes: Callable[[], int]
    ):
        """`hosts` may be asked for; None: any. `key` must be brought; None: none. `kept_bytes`: of uploads on disk."""
        self._app, self._limits, self._kept_bytes = app, limits, kept_bytes
        self._hosts = None if hosts is None else {host.lower() for host in hosts}
        self._key, self._cookie = key, f"{COOKIE}_{secrets.token_hex(4)}"

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if (refused := self._refusal(scope, headers)) is not None:
            return await answer(send, *refused)
        asked = parse_qs(scope["query_string"].decode("latin-1")).get("key", [""])[0]
        if (
            self._key is not None
            and scope["path"] == "/"
            and secrets.compare_digest(asked.encode(), self._key.encode())
        ):
            cookie = f"{self._cookie}={self._key}; Path=/; HttpOnly; SameSite=Strict"
            return await answer(send, 303, "", [("location", "/"), ("set-cookie", cookie)])
        if not self._has_key(headers) and scope["path"] not in OPEN:
            return await answer(send, 403, "Open the address that `lean-finetune page` printed, with its key.")
        await self._app(scope, self._limited(scope, receive), self._with_policy(send))

    def _refusal(self, scope: Message, headers: MutableMapping[str, str]) -> tuple[int, str] | None:
        """Status and reason if the request is none of this page."""
        host, origin, path = headers.get("host", "").lower(), headers.get("origin"), scope["path"]
        if self._hosts is not None and host not in self._hosts:
            return 421, "This page has another address: open the one that the command printed."
        if origin is not None and urlsplit(origin).netloc.lower() != host:
            return 403, "Only the page itself may ask this."
        if scope["method"] not in ("GET", "HEAD", "POST"):
            return 405, "Not allowed."
        if path not in EXACT and not path.startswith(PATHS):
            return 404, "There is no such page."
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self._most(path):
            return 413, f"At most {self._most(path):,} bytes are read."
        if path == UPLOAD and self._kept_bytes() > self._limits.kept_upload_bytes:
            return 503, "Too many uploads are being read; try again in a minute."
        return None

    def _most(self, path: str) -> int:
        """Bytes of a request. An upload has a few hundred more than its file."""
        return self._limits.upload_bytes + 65_536 if path == UPLOAD else TEXT_BYTES

    def _has_key(self, headers: MutableMapping[str, str]) -> bool:
        if self._key is None:
            return True
        try:
            found = SimpleCookie(headers.get("cookie", "")).get(self._cookie)
        except CookieError:
            return False
        return found is not None and secrets.compare_digest(found.value.encode(), self._key.encode())

    def _limited(self, scope: Message, receive: Receive) -> Receive:
        """Read a request up to its limit; after that it is as if the visitor had left."""
        left = self._most(scope["path"])

        async def limited() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            return message if left >= 0 else {"type": "http.disconnect"}

        return limited

    def _with_policy(self, send: Send) -> Send:
        """Answers with headers that keep the browser to this page."""
        ancestors = "" if self._hosts is None else "; frame-ancestors 'none'"
        more = [
            (b"content-security-policy", (POLICY + ancestors).encode()),
            (b"referrer-policy", b"no-referrer"),
            (b"x-content-type-options", b"nosniff"),
        ]

        async def send_with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", []), *more]}
            await send(message)

        return send_with_policy


async def answer(send: Send, status: int, text: str, headers: Iterable[tuple[str, str]] = ()) -> None:
    """Answer with a plain text."""
    every = [("content-type", "text/plain; charset=utf-8"), ("x-content-type-options", "nosniff"), *headers]
    coded = [(name.encode(), value.encode()) for name, value in every]
    await send({"type": "http.response.start", "status": status, "headers": coded})
    await send({"type": "http.response.body", "body": text.encode()})
