"""Who may ask the page: checked before Gradio, so these tests need neither Gradio nor a browser."""

import asyncio
from typing import Any

import pytest

from lean_finetune.page.guard import Guard
from lean_finetune.page.limits import HOSTED, LOCAL, TEXT_BYTES

HOST, KEY = "127.0.0.1:7000", "the-key"


async def passed_on(scope: Any, receive: Any, send: Any) -> None:
    """Stands for Gradio: reads the whole request, then says so."""
    while (message := await receive()).get("more_body"):
        pass
    status = 200 if message["type"] == "http.request" else 499
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": b"passed on"})


def ask(
    guard: Guard, path: str = "/", *, method: str = "GET", query: str = "", parts: Any = (b"",), **headers: str
) -> Any:
    """Status and headers of an answer; `parts` are those of the request's body."""
    given = {"host": HOST, **{name.replace("_", "-"): value for name, value in headers.items()}}
    coded = [(name.encode(), value.encode()) for name, value in given.items()]
    scope = {"type": "http", "method": method, "path": path, "query_string": query.encode(), "headers": coded}
    messages = [
        {"type": "http.request", "body": part, "more_body": number < len(parts) - 1}
        for number, part in enumerate(parts)
    ]
    sent: list[Any] = []

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(guard(scope, receive, send))
    return sent[0]["status"], {name.decode(): value.decode() for name, value in sent[0]["headers"]}


def guard(kept: int = 0) -> Guard:
    return Guard(passed_on, LOCAL, hosts={HOST}, key=KEY, kept_bytes=lambda: kept)


def cookie(found: Guard) -> str:
    status, headers = ask(found, query=f"key={KEY}")
    assert status == 303 and headers["location"] == "/"
    assert "HttpOnly" in headers["set-cookie"] and "SameSite=Strict" in headers["set-cookie"]
    return headers["set-cookie"].partition(";")[0]


def test_only_who_has_the_key_is_let_in():
    """Other users of the machine reach 127.0.0.1 too."""
    found = guard()
    assert ask(found)[0] == ask(found, query="key=wrong")[0] == ask(found, cookie="a=b")[0] == 403
    status, headers = ask(found, cookie=cookie(found))
    assert status == 200 and "default-src 'self'" in headers["content-security-policy"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "rebound.example:7000"}, 421),  # A name that was made to point to 127.0.0.1.
        ({"host": ""}, 421),
        ({"origin": "https://other.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://127.0.0.1:7001"}, 403),
        ({"origin": f"http://{HOST}"}, 200),
    ],
)
def test_other_sites_cannot_ask_through_the_users_browser(headers, status):
    found = guard()
    assert ask(found, "/gradio_api/queue/join", method="POST", cookie=cookie(found), **headers)[0] == status


@pytest.mark.parametrize("path", ["/gradio_api/proxy=https://a.example", "/gradio_api/info", "/monitoring", "/docs"])
def test_what_the_page_does_not_use_is_not_there(path):
    found = guard()
    assert ask(found, path, cookie=cookie(found))[0] == 404


def test_a_request_has_a_limit_that_is_announced_or_counted():
    found = guard()
    own = cookie(found)
    join = {"path": "/gradio_api/queue/join", "method": "POST", "cookie": own}
    assert ask(found, **join, content_length=str(TEXT_BYTES + 1))[0] == 413
    assert ask(found, **join, content_length="-1")[0] == 413
    part = b"x" * (TEXT_BYTES // 2)
    assert ask(found, **join, parts=(part, part))[0] == 200
    assert ask(found, **join, parts=(part, part, b"x", b""))[0] == 499
    upload = {"path": "/gradio_api/upload", "method": "POST", "cookie": own}
    assert ask(found, **upload, content_length=str(2 << 30))[0] == 413
    assert ask(guard(kept=5 << 30), **{**upload, "cookie": ""})[0] == 503


def test_a_hosted_page_has_any_name_and_no_key():
    found = Guard(passed_on, HOSTED, hosts=None, key=None, kept_bytes=lambda: 0)
    assert ask(found, host="page.example")[0] == 200
    assert ask(found, host="page.example", origin="https://other.example")[0] == 403
