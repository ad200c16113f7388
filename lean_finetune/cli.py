"""The command `lean-finetune`, which works in any directory without a pipeline."""

from collections import UserDict
from difflib import get_close_matches
from importlib import import_module
from typing import Any

import click

from cuda_memory.errors import guarded_output, one_line_usage_errors
from lean_finetune.core.stage_command import one_line_after_signals

COMMANDS = {
    "run": "lean_finetune.commands.run.run:run",
    "init": "lean_finetune.commands.init:init",
    "fit": "lean_finetune.commands.fit:fit",
    "plan": "lean_finetune.commands.choose.plan:plan",
    "exp": "lean_finetune.commands.run.experiments:exp",
    "compare": "lean_finetune.commands.run.experiments:compare",
    "import": "lean_finetune.commands.import_config:import_config",
    "doctor": "lean_finetune.commands.doctor:doctor",
    "chat": "lean_finetune.commands.chat:chat",
    "generate": "lean_finetune.commands.generate:generate",
    "export": "lean_finetune.commands.export:export",
    "explain": "lean_finetune.commands.explain:explain",
    "snapshot": "cuda_memory.snapshot:snapshot",
    "page": "lean_finetune.page.command:page",
}
"""Where each command is: the module, and its name there."""
OTHER_NAMES = {**dict.fromkeys(("train", "finetune", "sft", "repro"), "run"), "show": "compare"}
"""Commands of other tools, with ours."""
REMOVED = {"preset": "`lean-finetune plan --model MODEL --gpu GPU` chooses the parameters"}
"""Commands of earlier versions, each with what to do instead."""


class LazyCommands(UserDict[str, Any]):
    """Commands by name. Each is imported when it is asked for, so that a run reads only its own command."""

    def __getitem__(self, name: str) -> click.Command:
        """The command of a name."""
        module, _, attribute = self.data[name].partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command


class CommandGroup(click.Group):
    """A group that answers an unknown command or option in one line and exits with code 2."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run a command and exit. A terminal obeys nothing that it prints."""
        with guarded_output():
            return super().main(*args, **kwargs)

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
            name = args[0]
            if name in REMOVED:
                raise click.UsageError(f"{name!r} is no command any more; {REMOVED[name]}")
            if self.get_command(ctx, name) is None and not name.startswith("-"):
                likely = [OTHER_NAMES[name]] if name in OTHER_NAMES else get_close_matches(name, COMMANDS, n=1)
                meant = "".join(f"; did you mean `{ctx.command_path} {one}`?" for one in likely)
                raise click.UsageError(f"No such command {name!r}{meant}")
            return super().resolve_command(ctx, args)


@click.group(cls=CommandGroup, commands=LazyCommands(COMMANDS))
@click.version_option(package_name="lean-finetune", prog_name="lean-finetune")
def main() -> None:
    """Fine-tune language models inside the GPU memory you have: predict it, check this machine, use the result.

    `fit` asks whether a model fits. `run` makes a project, chooses its memory switches and trains; `init`, `plan` and
    `dvc repro` do the same step by step. Then `chat` talks to the result, `exp run` tries another setting, and
    `compare` shows all side by side. Each command has its own --help. All documentation is in docs/ of the repository
    and of the source distribution.

    Exit codes: 0 done, 1 an error, 2 a wrong command line, 3 the run does not fit, 128 + n signal n.
    """


if __name__ == "__main__":
    main()
