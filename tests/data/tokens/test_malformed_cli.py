"""Malformed files through the stages: each row is used, or counted and listed, or one line refuses the file."""

import json
from pathlib import Path

import pytest

from lean_finetune.core.atomic_files import read_json
from tests.data.read.malformed import MALFORMED
from tests.workspace import error, write_rows

TEXTS = [{"text": f"Row {n} of the good ones."} for n in range(40)]
USED = ("train_rows", "heldout_rows")


@pytest.fixture
def run_text(run):
    """A function that tokenizes good rows and a file of text rows."""

    def write_and_run(path: Path, policy: str):
        sources = [{"source": str(write_rows(Path("good.jsonl"), TEXTS))}, {"source": str(path)}]
        return run(sources, data__format="text", data__on_bad_row=policy, run__data_pool="threads")

    return write_and_run


def counted() -> dict[str, int]:
    return read_json(Path("data/tokens/figures.json"))


def rejects() -> list[dict]:
    return [json.loads(line) for line in Path("data/tokens/rejects.jsonl").read_text().splitlines()]


def lost(metrics: dict[str, int]) -> int:
    """Rows that were read and not used."""
    return sum(metrics[name] for name in ("bad_rows", "empty_answer_rows", "no_answer_rows", "dropped_long_rows"))


@pytest.mark.parametrize(
    "name",
    ["cut row", "bad row in an array", "too many cells", "broken UTF-8 in Parquet", "cut gzip", "open array"],
)
def test_malformed_file_gives_counted_rows_or_one_line(run_text, tmp_path, name):
    case = MALFORMED[name]
    path = tmp_path / case.file
    path.write_bytes(case.bytes())
    result = run_text(path, "skip")
    if case.error:
        assert error(result).startswith(f"{path}{case.error}")
        return
    if not case.good:
        place = f"{path}:{min(case.faults)}: " if case.faults else f"data.source: {path} "
        assert error(result).startswith(place)
        return
    assert result.exit_code == 0, result.output
    metrics = counted()
    assert sum(metrics[name] for name in USED) + lost(metrics) == len(TEXTS) + case.good + len(case.faults)
    listed = {one["line"]: one["reason"] for one in rejects() if one["file"] == str(path)}
    for line, fault in case.faults.items():
        assert listed[line].startswith(fault)
    ended = run_text(path, "fail")
    if metrics["bad_rows"]:
        first = min(listed)
        assert error(ended).startswith(f"{path}:{first}: {listed[first]}")
    else:
        assert ended.exit_code == 0, ended.output
