"""The command `lean-finetune`, which works in any directory without a pipeline."""

import click

from lean_finetune.commands.chat import chat
from lean_finetune.commands.doctor import doctor
from lean_finetune.commands.explain import explain
from lean_finetune.commands.export import export
from lean_finetune.commands.fit import fit
from lean_finetune.commands.generate import generate
from lean_finetune.commands.import_config import import_config
from lean_finetune.commands.preset import preset


@click.group()
@click.version_option(package_name="lean-finetune")
def main() -> None:
    """Fine-tune language models inside the GPU memory you have: predict it, check this machine, use the result."""


for command in (fit, import_config, preset, doctor, chat, generate, export, explain):
    main.add_command(command)

if __name__ == "__main__":
    main()
