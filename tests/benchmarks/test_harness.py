"""The benchmarks' harness: bars, results files, interleaved rounds, and the environment of processes."""

import json
import os
import platform
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import harness
from benchmarks.harness import Measured, at_most, benchmark, format_table, interleaved_seconds, median_ratio
from benchmarks.processes import clean_environment

KEYS = {"name", "date", "commit", "machine", "versions", "rows", "bars"}
RESULTS = Path("benchmarks/results/sample.json")


def measure(quick: bool) -> Measured:
    """Rows and a bar as a benchmark returns them. The bar holds only in a full run."""
    rows = [
        {"what": "ours", "wall_s": 1.5, "peak_rss_bytes": 3 << 20},
        {"what": "theirs", "wall_s": 3.0, "peak_rss_bytes": None},
    ]
    return Measured(rows=rows, bars=[at_most("ours / theirs", 0.9 if quick else 0.5, 0.6)])


@pytest.fixture(autouse=True)
def empty_directory(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*arguments: str):
    return CliRunner().invoke(benchmark("sample", measure), list(arguments), catch_exceptions=False)


def test_a_full_run_prints_its_table_and_writes_its_results_file():
    result = run()
    assert result.exit_code == 0
    written = json.loads(RESULTS.read_text())
    assert set(written) == KEYS and written["rows"] == measure(False).rows
    assert written["bars"] == [{"name": "ours / theirs", "value": 0.5, "bar": "<= 0.6", "holds": True}]
    assert written["commit"] is None, "no repository here"
    assert written["versions"]["python"] == platform.python_version()
    assert set(written["machine"]) == {"cpu", "cores", "memory_bytes", "system", "gpus"}, "never the host's name"
    assert "theirs" in result.stdout and "peak_rss MiB" in result.stdout


def test_a_failed_bar_exits_with_1_and_a_quick_run_replaces_no_published_figures():
    result = run("--quick")
    assert result.exit_code == 1 and "NO" in result.stdout
    assert not list(Path().iterdir())
    run("--quick", "--out", "mine.json")
    assert set(json.loads(Path("mine.json").read_text())) == KEYS


def test_published_figures_need_a_checkout_without_changes_but_for_other_results():
    """Otherwise no checkout could reproduce the figures."""
    Path("code.py").write_text("1")
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    for arguments in (["init", "--quiet"], ["add", "code.py"], ["commit", "--quiet", "-m", "start"]):
        assert harness._git(*identity, *arguments) is not None
    head = harness.commit()
    assert head is not None and len(head) == 12
    RESULTS.parent.mkdir(parents=True)
    RESULTS.write_text("{}")
    assert harness.commit() == head
    Path("code.py").write_text("2")
    refused = run()
    assert refused.exit_code == 1 and f"{RESULTS}: " in refused.stderr and "--out" in refused.stderr
    assert RESULTS.read_text() == "{}"
    assert run("--out", "mine.json").exit_code == 0
    assert json.loads(Path("mine.json").read_text())["commit"] == f"{head}-dirty"


def test_figures_of_a_checkout_that_changed_meanwhile_are_not_published():
    """Eight results files named a commit with `-dirty`: the checkout was edited while they were measured."""
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    for arguments in (["init", "--quiet"], ["commit", "--quiet", "--allow-empty", "-m", "start"]):
        assert harness._git(*identity, *arguments) is not None
    head = harness.commit()

    def measure_and_edit(quick: bool) -> Measured:
        Path("code.py").write_text("1")
        return measure(quick)

    result = CliRunner().invoke(benchmark("sample", measure_and_edit), [], catch_exceptions=False)
    assert result.exit_code == 0 and "not published" in result.stderr and not RESULTS.exists()
    assert json.loads(Path("scratch/sample.json").read_text())["commit"] == head


def test_each_case_is_first_in_a_round_in_turn():
    """The order within a round must favour no case."""
    order: list[str] = []
    cases = {name: (lambda name=name: order.append(name)) for name in "abc"}
    seconds = interleaved_seconds(cases, rounds=3)
    assert {name: len(values) for name, values in seconds.items()} == {"a": 3, "b": 3, "c": 3}
    rounds = ["".join(order[start : start + 3]) for start in range(0, 12, 3)]
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds)
    assert {one[0] for one in rounds[1:]} == {"a", "b", "c"}


def test_a_ratio_is_computed_within_each_round():
    """A slow round doubles both cases and must not change the ratio."""
    assert median_ratio([1.0, 20.0, 3.0], [2.0, 40.0, 6.0]) == 0.5


def test_a_table_is_aligned_and_shows_missing_values():
    table = format_table([{"what": "a", "n": 5}, {"what": "longer", "wall_s": 1.23456}])
    assert table == "what    n  wall_s\na       5       -\nlonger  -   1.235\n"


def test_a_child_does_not_inherit_the_variables_of_a_dvc_run(monkeypatch):
    """With DVC_ROOT and DVC_STAGE a clone would read the parameters of the outer checkout."""
    monkeypatch.setenv("DVC_STAGE", "train")
    monkeypatch.setenv("DVC_ROOT", "/elsewhere")
    environment = clean_environment()
    assert not {"DVC_STAGE", "DVC_ROOT"} & set(environment)
    assert environment["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
