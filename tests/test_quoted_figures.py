"""Figures that README and docs quote from results files are those of the files.

A comment behind a figure says where it is from, and pages do not show it:

    1.06<!--= distributed: bar DDP step / HF Trainer's, two processes -->
    48.38 MiB<!--= metrics/train.json: peak_gib_measured * 1024 -->
    4.85<!--= batching: padding_percent of what=ours, bucketed, 8 GPUs, 32 per step -->

CONTRIBUTING.md, "Quote a figure", explains the form.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

RESULTS = ROOT / "benchmarks/results"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
WRITTEN_BY_BENCHMARKS = {"depth", "families", "planned", "published_images", "published_models"}
"""Their tables are in docs/models.md, which `python -m benchmarks.models` writes."""
FIGURE = re.compile(
    r"(?P<text>[-+]?\d[\d,]*(?:\.\d+)?(?:e-\d+)?)(?P<unit>[^\n<|\d*,]{0,12}?)<!--= (?P<source>[^>]*?) -->"
)
MARKER = "<!--="
SOURCE = re.compile(
    r"(?P<file>[\w./-]+): (?:bar (?P<bar>.+?)|(?P<column>[\w%/' .-]+?)(?: of (?P<row>.+?))?)"
    r"(?: \* (?P<factor>[\d.e-]+))?"
)


class Wrong(Exception):
    """A marker that cannot be read, or a figure that its file does not have."""


def sourced(file: str, bar: str | None, column: str | None, row: str | None) -> Any:
    """The value that a marker names."""
    path = ROOT / file if "/" in file else RESULTS / f"{file}.json"
    if not path.is_file():
        raise Wrong(f"{path} does not exist")
    content = json.loads(path.read_text())
    if bar is not None:
        found = [one["value"] for one in content["bars"] if one["name"] == bar]
    elif row is None:
        found = [content[column]] if column in content else []
    else:
        wanted = dict(part.split("=", 1) for part in row.split("; "))
        rows = [one for one in content["rows"] if all(str(one.get(key)) == value for key, value in wanted.items())]
        found = [one[column] for one in rows if column in one]
    if len(found) != 1:
        raise Wrong(f"{len(found)} values of {path.name} match; a marker must name one")
    return found[0]


def check(text: str, source: str) -> None:
    """Raise Wrong unless a quoted figure is its source's, rounded as it is quoted."""
    parts = SOURCE.fullmatch(source)
    if parts is None:
        raise Wrong(f"the marker {source!r} has another form")
    value = sourced(*parts.group("file", "bar", "column", "row"))
    mantissa, e, _ = text.partition("e")
    shown = abs(value * float(parts["factor"] or 1))
    expected = f"{shown:.{len(mantissa.partition('.')[2])}{e or 'f'}}"
    if float(text.replace(",", "").lstrip("+-")) != float(expected):
        raise Wrong(f"{text} is quoted, and {source} has {expected}")


def quoted(page: Path) -> Iterator[tuple[str, str]]:
    """The quoted figures of a page with their sources."""
    content = page.read_text()
    found = list(FIGURE.finditer(content))
    assert len(found) == content.count(MARKER), f"{page.name}: a marker must stand right behind a figure and its unit"
    for match in found:
        yield match["text"], match["source"]


@pytest.mark.parametrize("page", [page for page in PAGES if MARKER in page.read_text()], ids=lambda page: page.name)
def test_quoted_figures_are_those_of_their_files(page: Path):
    """README said "within 0.03 %" where the file had 0.0367, and a ratio of 1.00 where it had 1.06."""
    faults = []
    for text, source in quoted(page):
        try:
            check(text, source)
        except Wrong as error:
            faults.append(str(error))
    assert faults == []


def test_every_results_file_is_quoted():
    """A table without a marker drifts from its file without notice."""
    files = {source.partition(":")[0] for page in PAGES for _, source in quoted(page)}
    assert {path.stem for path in RESULTS.glob("*.json")} - WRITTEN_BY_BENCHMARKS - files == set()


def test_results_belong_to_commits():
    """Nobody can reproduce figures of uncommitted code."""
    commits = {path.stem: str(json.loads(path.read_text())["commit"]) for path in RESULTS.glob("*.json")}
    assert {name: commit for name, commit in commits.items() if not re.fullmatch("[0-9a-f]{7,40}", commit)} == {}


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("1.00", "distributed: bar DDP step / HF Trainer's, two processes"),
        ("1.06", "distributed: bar of no such name"),
        ("1.06", "no_such_file: bar DDP step / HF Trainer's, two processes"),
        ("1", "distributed: step_s of method=full"),
        ("1.06", "distributed"),
    ],
)
def test_a_wrong_marker_is_found(text: str, source: str):
    with pytest.raises(Wrong):
        check(text, source)
