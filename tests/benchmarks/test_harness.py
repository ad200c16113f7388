"""The benchmarks' harness: broken bars, results files, interleaved rounds, measured processes."""

import json
import os
import platform
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import harness
from benchmarks.harness import Bar, Measured, benchmark, format_table, interleaved_seconds, median_ratio
from benchmarks.processes import clean_environment

KEYS = {"name", "date", "commit", "machine", "versions", "rows", "bars"}


def measure(quick: bool) -> Measured:
    """Rows and bars as a benchmark returns them: one bar holds in a full run, none in a quick one."""
    rows = [
        {"what": "ours", "wall_s": 1.5, "peak_rss_bytes": 3 << 20},
        {"what": "theirs", "wall_s": 3.0, "peak_rss_bytes": None},
    ]
    return Measured(rows=rows, bars=[Bar(name="ours / theirs", value=0.9 if quick else 0.5, rule="<=", limit=0.6)])


@pytest.fixture
def elsewhere(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str):
    return CliRunner().invoke(benchmark("sample", measure), list(arguments), catch_exceptions=False)


def test_a_full_run_prints_its_table_and_writes_its_results_file(elsewhere):
    result = run()
    assert result.exit_code == 0
    written = json.loads((elsewhere / "benchmarks/results/sample.json").read_text())
    assert set(written) == KEYS
    assert written["rows"] == measure(False).rows
    assert written["bars"] == [{"name": "ours / theirs", "value": 0.5, "bar": "<= 0.6", "holds": True}]
    assert written["commit"] is None, "no repository here, so no commit may be claimed"
    assert written["versions"]["python"] == platform.python_version()
    assert set(written["machine"]) == {"cpu", "cores", "memory_bytes", "system", "gpus"}, "never the host's name"
    assert "theirs" in result.stdout and "peak_rss MiB" in result.stdout


def test_a_bar_that_does_not_hold_ends_with_an_error_code(elsewhere):
    result = run("--quick")
    assert result.exit_code == 1
    assert "NO" in result.stdout


def test_a_quick_run_never_replaces_the_published_figures(elsewhere):
    run("--quick")
    assert not list(elsewhere.iterdir())
    run("--quick", "--out", "mine.json")
    assert set(json.loads(Path("mine.json").read_text())) == KEYS


@pytest.fixture
def repository(elsewhere) -> Path:
    """A repository with one commit and nothing beside it."""
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    Path("code.py").write_text("1")
    for arguments in (["init", "--quiet"], ["add", "code.py"], ["commit", "--quiet", "-m", "start"]):
        assert harness._git(*identity, *arguments) is not None
    return elsewhere


def test_the_commit_says_when_code_differs_from_it_but_not_when_only_results_do(repository):
    head = harness.commit()
    assert head is not None and len(head) == 12
    Path("benchmarks/results").mkdir(parents=True)
    Path("benchmarks/results/sample.json").write_text("{}")
    assert harness.commit() == head
    Path("code.py").write_text("2")
    assert harness.commit() == f"{head}-dirty"


def test_published_figures_come_from_a_commit(repository):
    """A results file whose figures no checkout can give again."""
    Path("code.py").write_text("2")
    refused = run()
    assert refused.exit_code == 1
    assert "benchmarks/results/sample.json: " in refused.stderr and "--out" in refused.stderr
    assert not Path("benchmarks").exists()
    assert run("--out", "mine.json").exit_code == 0
    assert json.loads(Path("mine.json").read_text())["commit"].endswith("-dirty")


def test_each_case_starts_a_round_in_turn_so_that_order_favours_none():
    order: list[str] = []
    cases = {name: (lambda name=name: order.append(name)) for name in "abc"}
    seconds = interleaved_seconds(cases, rounds=3)
    assert {name: len(values) for name, values in seconds.items()} == {"a": 3, "b": 3, "c": 3}
    rounds = ["".join(order[start : start + 3]) for start in range(0, 12, 3)]
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds)
    assert {one[0] for one in rounds[1:]} == {"a", "b", "c"}


def test_a_ratio_is_taken_within_each_round():
    """A slow round doubles both cases; the ratio of medians over other rounds would show a gain that is none."""
    assert median_ratio([1.0, 20.0, 3.0], [2.0, 40.0, 6.0]) == 0.5


def test_a_table_lines_up_and_shows_what_is_unknown():
    table = format_table([{"what": "a", "n": 5}, {"what": "longer", "wall_s": 1.23456}])
    assert table == "what    n  wall_s\na       5       -\nlonger  -   1.235\n"


def test_a_child_does_not_inherit_the_variables_of_a_dvc_run(monkeypatch):
    """With DVC_ROOT and DVC_STAGE a clone would read the outer checkout's parameters."""
    monkeypatch.setenv("DVC_STAGE", "train")
    monkeypatch.setenv("DVC_ROOT", "/elsewhere")
    environment = clean_environment()
    assert not {"DVC_STAGE", "DVC_ROOT"} & set(environment)
    assert environment["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
