"""The command `lean-finetune doctor`: what this machine can do, and why not."""

import json
import sys
from dataclasses import asdict

import click

from cuda_memory.units import labelled
from lean_finetune.core.stage_command import StageCommand

LABEL_WIDTH = 19


@click.command(cls=StageCommand)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor(as_json: bool) -> None:
    """Check this machine. Exits with 1 if something fails.

    Checks GPUs, kernels, memory, disk, versions, DVC and git. Each line starts with ok, note (it works, with less
    than possible) or fail. The line below says what to do.
    """
    from lean_finetune.commands.machine_checks import CHECKS

    findings = []
    for check in CHECKS:
        for finding in check():
            findings.append(finding)
            if as_json:
                continue
            first = f"{finding.level:<5} {finding.what:<13}"
            click.echo(labelled(first, finding.text, LABEL_WIDTH))
            if finding.remedy:
                click.echo(labelled(" " * LABEL_WIDTH + "→", finding.remedy, LABEL_WIDTH + 2))
    fails = sum(finding.level == "fail" for finding in findings)
    if as_json:
        click.echo(json.dumps({"ok": not fails, "findings": list(map(asdict, findings))}, indent=2))
    elif fails:
        click.echo(f"{fails} of {len(findings)} checks failed")
    else:
        click.echo("this machine can do it; `lean-finetune fit` says which runs fit")
    sys.exit(1 if fails else 0)
