"""The page and its server: the tabs, and what keeps strangers out."""

import os
import secrets
import socket
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lean_finetune.core.errors import UserError
from lean_finetune.page.guard import Guard
from lean_finetune.page.jobs import end_commands
from lean_finetune.page.limits import HOSTED, LOCAL, Limits

LOOPBACK = "127.0.0.1"
CSS = """
.gradio-container { padding: 0 !important; }
.gradio-container main { padding: 12px !important; margin: 0 auto !important; width: 100%; }
.gradio-container main { max-width: 1200px !important; }
.gradio-container .wrap.fillable, .gradio-container main > .wrap { padding: 0 !important; }
h1 { font-size: 1.4rem !important; margin: 0 !important; }
iframe.answer { width: 100%; min-height: 60px; border: 0; }
.quiet { color: var(--body-text-color-subdued); font-size: 0.87rem; overflow-wrap: anywhere; }
.refusal { border-left: 6px solid #c0283a; padding: 0.4rem 0.8rem; overflow-wrap: anywhere; }
footer { display: none !important; }
"""
SUBDUED = ("body_text_color_subdued", "block_info_text_color", "input_placeholder_color")
KEPT_SECONDS = 600
"""Uploads that nobody asked about are removed after it."""


def build(limits: Limits, uploads: Path, ending: ExitStack) -> Any:
    """The page as an ASGI application. `uploads` is where Gradio puts files that are being read.

    `ending` gets what must end with the page.
    """
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ["GRADIO_TEMP_DIR"] = str(uploads)
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    import gradio as gr
    from fastapi import FastAPI

    from lean_finetune.page.fit_view import fit_view
    from lean_finetune.page.snapshot_view import snapshot_view

    fonts = ["system-ui", "sans-serif"], ["ui-monospace", "monospace"]
    quiet = {"light": "#59636e", "dark": "#9aa5b1"}  # As in the style sheet of reports: legible on both grounds.
    theme = gr.themes.Default(font=fonts[0], font_mono=fonts[1]).set(
        **{f"{name}{suffix}": quiet[mode] for name in SUBDUED for suffix, mode in (("", "light"), ("_dark", "dark"))}
    )
    with gr.Blocks(
        title="lean-finetune", analytics_enabled=False, fill_width=True, delete_cache=(60, KEPT_SECONDS)
    ) as blocks:
        gr.HTML("<h1>lean-finetune</h1>")
        with gr.Tab("Fit"):
            fit_view(limits)
        with gr.Tab("Snapshot"):
            snapshot_view(limits)
        if not limits.is_hosted:
            from lean_finetune.page.chat_view import chat_view
            from lean_finetune.page.experiments_view import experiments_view
            from lean_finetune.page.project.chat_process import ChatModel
            from lean_finetune.page.run_view import run_view

            model = ChatModel()
            ending.callback(model.close)
            with gr.Tab("Run"):
                run_view(free_memory=model.end)
            with gr.Tab("Chat"):
                chat_view(model)
            with gr.Tab("Experiments"):
                experiments_view(limits)
    blocks.queue(max_size=limits.waiting, api_open=False)
    return gr.mount_gradio_app(
        FastAPI(docs_url=None, redoc_url=None, openapi_url=None),
        blocks,
        "/",
        footer_links=[],
        run_history=False,
        max_file_size=limits.upload_bytes,
        show_error=True,
        ssr_mode=False,
        enable_monitoring=False,
        pwa=False,
        mcp_server=False,
        theme=theme,
        css=CSS,
    )


def listening(host: str, port: int | None) -> socket.socket:
    """A socket at this port, or at a free one.

    Raises:
        UserError: the port is taken or not allowed.
    """
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port or 0))
        found.listen(128)
    except OSError as error:
        found.close()
        raise UserError(f"--port: {port} cannot be used ({error.strerror}); leave it out for a free one") from None
    return found


def serve(*, hosted: bool, host: str, port: int | None, say: Callable[[str], None]) -> None:
    """Serve the page until a signal. `say` prints its address.

    Raises:
        UserError: the port cannot be used.
    """
    import uvicorn

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            ending.close()  # First: it waits for all threads of requests, and they for their commands.
            await super().shutdown(sockets)

    limits = HOSTED if hosted else LOCAL
    with tempfile.TemporaryDirectory(prefix="lean-finetune-page-") as directory, ExitStack() as ending:
        ending.callback(end_commands)
        tempfile.tempdir = directory  # Whatever a request leaves behind goes with the page.
        uploads = Path(directory, "uploads")
        uploads.mkdir()
        app = build(limits, uploads, ending)
        connection = listening(host, port)
        port = connection.getsockname()[1]
        key = None if hosted else secrets.token_urlsafe(24)
        hosts = None if hosted else {f"{name}:{port}" for name in (LOOPBACK, "localhost")}
        guard = Guard(app, limits, hosts=hosts, key=key, kept_bytes=lambda: kept_bytes(uploads))
        say(f"http://{host}:{port}/" + ("" if key is None else f"?key={key}"))
        config = uvicorn.Config(
            guard,
            log_level="warning",
            ws="none",
            server_header=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=1,
        )
        with connection:
            Server(config).run(sockets=[connection])


def kept_bytes(directory: Path) -> int:
    """Bytes of all files in a directory."""
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.stat().st_size
        except OSError:  # Another request has just removed it.
            continue
    return total
