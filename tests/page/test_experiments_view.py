"""Experiments on the page: the report of the last run."""

import pytest

pytest.importorskip("gradio", reason="needs the extra [page]")

from lean_finetune.core.errors import UserError
from lean_finetune.page.experiments_view import last_report


def test_a_missing_report_is_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="report.html: cannot be read .*lean-finetune run"):
        last_report()
    (tmp_path / "data/report").mkdir(parents=True)
    (tmp_path / "data/report/report.html").write_text("<p>report</p>")
    assert last_report() == "<p>report</p>"
