"""The command `lean-finetune page`."""

import importlib.util
import os

import click

from cuda_memory.terminal import echo
from lean_finetune.core.errors import UserError
from lean_finetune.core.stage_command import StageCommand
from lean_finetune.core.versions import install_extra

HOSTED = "LEAN_FINETUNE_PAGE_HOSTED"


@click.command(cls=StageCommand)
@click.option("--port", type=click.IntRange(1, 65535), help="Default: a free one.")
@click.option("--hosted", is_flag=True, help=f"Fit and Snapshot for anybody, with limits. Also: {HOSTED}=1.")
@click.option("--host", help="With --hosted: the address to listen at, such as 0.0.0.0. Default: 127.0.0.1.")
@click.option("--open", "opens", is_flag=True, help="Open the page in the browser.")
def page(port: int | None, hosted: bool, host: str | None, opens: bool) -> None:
    """Show a page in the browser: does a run fit, what fills the memory; run, chat and compare in the project here.

    It prints an address with a key. The page listens on this machine only, uses no account and no other server, and
    ends with Ctrl-C. Needs the extra `page`.
    """
    hosted = hosted or os.environ.get(HOSTED, "") not in ("", "0")
    if host is not None and not hosted:
        raise UserError("--host: has an effect only with --hosted; the page of your own machine is on 127.0.0.1 alone")
    if importlib.util.find_spec("gradio") is None:
        raise UserError(f"lean-finetune page: needs gradio, which is not installed; run {install_extra('page')}")
    from lean_finetune.page.server import LOOPBACK, serve

    def say(address: str) -> None:
        echo(f"page  {address}  (Ctrl-C ends it)")
        if opens:
            click.launch(address)

    serve(hosted=hosted, host=host or LOOPBACK, port=port, say=say)
