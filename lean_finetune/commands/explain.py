"""The command `lean-finetune explain`: why memory grows in a recorded curve."""

from pathlib import Path

import click

from cuda_memory.terminal import echo_json, echo_text
from cuda_memory.user_paths import PATH
from lean_finetune.core.stage_command import StageCommand


@click.command(cls=StageCommand)
@click.argument("curve", type=PATH)
@click.option("--left-gib", type=click.FloatRange(min=0), help="Free memory in GiB at the end of the curve.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON with sizes in bytes.")
def explain(curve: Path, left_gib: float | None, as_json: bool) -> None:
    """Explain why memory grows in a recorded CURVE.

    A CSV file with one line per training step. It needs the column `step` and one of `allocated_gib`,
    `reserved_gib` and `rss_gib`. A column `tokens` helps. Of another program's curve it names usual causes.
    """
    from lean_finetune.train.monitor.growth_advice import explained, findings_of

    if as_json:
        echo_json({"findings": [finding.as_json() for finding in findings_of(curve, left_gib)]})
        return
    echo_text("\n".join(explained(curve, left_gib)))
