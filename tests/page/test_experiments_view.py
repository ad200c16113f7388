"""Experiments on the page: the rows of `compare --json`, and the report of the last run."""

from typing import Any

import pytest

pytest.importorskip("gradio", reason="needs the extra [page]")

from lean_finetune.core.errors import UserError
from lean_finetune.page.experiments_view import experiments_document, last_report

SCRIPT = "<script>run()</script>"


def test_rows_are_escaped_and_columns_without_a_value_left_out():
    rows: list[dict[str, Any]] = [
        {
            "experiment": "baseline",
            "state": "finished",
            "tuned_loss": 1.23456,
            "tokens_per_second": None,
            "changed": {},
        },
        {"experiment": SCRIPT, "state": SCRIPT, "tuned_loss": None, "changed": {"train.lr": SCRIPT}},
    ]
    found = experiments_document(rows)
    assert "1.235" in found and "tokens/s" not in found
    assert "<script" not in found and found.count("&lt;script") == 3


def test_a_missing_report_is_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="report.html: cannot be read .*lean-finetune run"):
        last_report()
    (tmp_path / "data/report").mkdir(parents=True)
    (tmp_path / "data/report/report.html").write_text("<p>report</p>")
    assert last_report() == "<p>report</p>"
