"""What works with every family, peaks of published models, what `plan` writes, and docs/models.md from these.

Rows that benchmarks/results has already are not computed again, except those of `--again`.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import click
import torch

from benchmarks.harness import RESULTS, Measured, Row, publishable_commit, report
from benchmarks.models.depth import compared, depth_cases
from benchmarks.models.families import outcome
from benchmarks.models.page import write_page
from benchmarks.models.planned import planned, planned_cases
from benchmarks.models.published import predicted, predicted_with_image, published_models
from lean_finetune.core.atomic_files import read_json, write_json
from tests.kit.image_models import image_models
from tests.kit.tiny_config import family_names

TABLES: Mapping[str, tuple[str, Callable[[], Iterable[str]], Callable[[str], Row]]] = {
    "families": ("family", family_names, outcome),
    "published_models": ("model", published_models, predicted),
    "published_images": ("model", image_models, predicted_with_image),
    "depth": ("case", depth_cases, compared),
    "planned": ("options", planned_cases, planned),
}
"""Results file → the column that names its rows, their names, and what makes one."""


@click.command(help=__doc__)
@click.argument("tables", nargs=-1, type=click.Choice([*TABLES]))
@click.option("--again", multiple=True, metavar="NAME", help="A family, model or case; or `all`.")
def main(tables: tuple[str, ...], again: tuple[str, ...]) -> None:
    """Compute the missing rows of the tables (default: all), then write the page."""
    torch.set_num_threads(1)
    for name in tables or TABLES:
        update(name, again)
    write_page()


def update(name: str, again: Iterable[str]) -> None:
    """Compute the missing rows of a results file, which is written after each."""
    column, names, row_of = TABLES[name]
    path = RESULTS / f"{name}.json"
    measured_at = publishable_commit(path)
    before: Mapping[str, Any] = {row[column]: row for row in read_json(path)["rows"]} if path.exists() else {}
    rows = {one: before[one] for one in names() if one in before and not {one, "all"} & {*again}}
    for one in names():
        if one not in rows:
            click.echo(f"{name}: {one}")
            rows[one] = row_of(one)
            ordered = [rows[other] for other in names() if other in rows]
            write_json(path, report(name, Measured(rows=ordered, bars=[]), measured_at))


if __name__ == "__main__":
    main()
