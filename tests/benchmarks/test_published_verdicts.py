"""The bars of benchmarks.published over verdicts: as the tool runs a row, and as it would run here."""

from collections.abc import Sequence

from benchmarks.harness import Row
from benchmarks.published import bars

ROW: Row = {
    "source": "LitGPT",
    "error": 0.01,
    "reserved_error": None,
    "settings_known": True,
    "verdict": "fits",
    "here_verdict": None,
    "ran": True,
}


def share(rows: Sequence[Row], of: str) -> float:
    return next(bar.value for bar in bars(rows) if of in bar.name)


def test_a_run_that_failed_and_was_said_to_fit_here_fails_the_bar():
    """The 70B of two A100: right as its tool runs it, and wrong as it would run here."""
    failed: Row = {
        **ROW,
        "error": None,
        "settings_known": True,
        "verdict": "tight",
        "here_verdict": "fits",
        "ran": False,
    }
    rows: list[Row] = [ROW, {**ROW, "here_verdict": "fits"}, failed]
    assert share(rows, "'fits' that were right") == 100.0
    assert share(rows, "here on several GPUs") == 50.0
    assert not all(bar.holds for bar in bars(rows))


def test_rows_of_an_unknown_version_are_listed_apart():
    """Their error says as much about the version that ran as about the prediction."""
    unknown: Row = {**ROW, "error": -0.3, "settings_known": False}
    assert all(bar.holds for bar in bars([ROW, unknown])) and share([ROW, unknown], "known settings") == 1
    assert not all(bar.holds for bar in bars([ROW, {**unknown, "settings_known": True}]))


def test_rows_without_a_trace_count_nowhere():
    untraced: Row = {**ROW, "error": None, "settings_known": True, "verdict": None, "here_verdict": None, "ran": False}
    assert all(bar.holds for bar in bars([ROW, untraced]))


def test_the_source_of_most_rows_does_not_decide_about_the_others():
    """200 exact rows of one source, and one of another that is 15 % too low."""
    main: list[Row] = [{**ROW, "source": "fms-acceleration a.csv", "error": 0.0}] * 200
    low: Row = {**ROW, "error": None, "reserved_error": -0.15}
    assert all(bar.holds for bar in bars([*main, ROW]))
    failing = {bar.name for bar in bars([*main, low]) if not bar.holds}
    assert "rows of other sources too low by more than 10 %" in failing
