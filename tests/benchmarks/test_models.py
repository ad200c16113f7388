"""docs/models.md shows what the results say."""

from benchmarks.harness import RESULTS
from benchmarks.models.page import PAGE, page_text
from benchmarks.models.published import published_models
from lean_finetune.core.atomic_files import read_json
from tests.conftest import ROOT


def test_the_page_shows_the_results(monkeypatch):
    """Tables edited by hand, or older than the results."""
    monkeypatch.chdir(ROOT)
    text = PAGE.read_text(encoding="utf-8")
    assert page_text(text) == text, "run `python -m benchmarks.models`"
    rows = read_json(RESULTS / "published_models.json")["rows"]
    assert {row["model"] for row in rows} == {*published_models()}
    assert len({row["family"] for row in rows if row["qlora"].get("gpu")}) >= 45
