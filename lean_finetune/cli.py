"""The command `lean-finetune`, which works in any directory without a pipeline."""

from typing import Any

import click

from cuda_memory.errors import one_line_usage_errors
from cuda_memory.snapshot import snapshot
from lean_finetune.commands.chat import chat
from lean_finetune.commands.choose.plan import plan
from lean_finetune.commands.doctor import doctor
from lean_finetune.commands.explain import explain
from lean_finetune.commands.export import export
from lean_finetune.commands.fit import fit
from lean_finetune.commands.generate import generate
from lean_finetune.commands.init import init
from lean_finetune.commands.preset import import_config, preset
from lean_finetune.core.stage_command import one_line_after_signals


class CommandGroup(click.Group):
    """A group that answers an unknown command or option in one line and exits with code 2."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the options before the command. Without any argument, print the help."""
        if not args:
            return super().parse_args(ctx, args)
        with one_line_usage_errors(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command. After a signal, print one line and exit with 128 + its number."""
        with one_line_after_signals():
            return super().invoke(ctx)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that `args` name, and its own arguments."""
        with one_line_usage_errors(ctx):
            return super().resolve_command(ctx, args)


@click.group(cls=CommandGroup)
@click.version_option(package_name="lean-finetune", prog_name="lean-finetune")
def main() -> None:
    """Fine-tune language models inside the GPU memory you have: predict it, check this machine, use the result.

    In this order: `fit` asks whether a model fits, `init` makes a project, `plan` chooses its memory switches,
    `dvc repro` there trains, and `chat` talks to the result. Each command has its own --help. All documentation is
    in docs/ of the repository and of the source distribution.

    Exit codes: 0 done, 1 an error, 2 a wrong command line, 3 the run does not fit, 128 + n signal n.
    """


for command in (init, fit, plan, import_config, preset, doctor, chat, generate, export, explain, snapshot):
    main.add_command(command)

if __name__ == "__main__":
    main()
