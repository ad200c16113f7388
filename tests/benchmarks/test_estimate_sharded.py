"""The table in docs/many-gpus.md has the figures of the results file, and the results file those of today's code."""

import json
import re

import pytest

from benchmarks.estimate_sharded import Case, cases, predicted
from cuda_memory.units import GIB
from tests.conftest import ROOT

ROWS = json.loads((ROOT / "benchmarks/results/estimate_sharded.json").read_text())["rows"]
HEAD = "| GPUs | run | peak | weights | gradients | state | sharding | |"


def published(case: Case) -> dict[str, object]:
    """The row of the results file for a case."""
    wanted = {
        "sharding": case.mode,
        **vars(case.layout),
        **{k: getattr(case, k) for k in ("method", "offload", "card")},
    }
    (row,) = [row for row in ROWS if wanted.items() <= row.items()]
    return row


def test_every_figure_of_the_table_is_in_the_results_file():
    parts = ("peak", "weights", "gradients", "optimizer", "sharding")
    known = {tuple(f"{row[f'{part}_bytes'] / GIB:.2f}" for part in parts) for row in ROWS}
    text = re.sub(r"<!--=.*?-->", "", (ROOT / "docs/many-gpus.md").read_text())
    table = text.split(HEAD)[1].strip().split("\n\n")[0].splitlines()[1:]
    assert len(table) > 10
    for line in table:
        figures = tuple({"-": "0.00", "host": "0.00"}.get(cell, cell) for cell in line.split(" | ")[2:7])
        assert figures in known, line


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in cases() if case.method == "full" and case.gpus == 64])
def test_todays_code_gives_the_published_figures(case):
    """Other versions of PyTorch change them slightly."""
    found = predicted(case)
    assert found["peak_bytes"] == pytest.approx(published(case)["peak_bytes"], rel=0.003)
    assert str(found["layers_traced"]).startswith("models of 3, 4, 5 layers")
