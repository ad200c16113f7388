"""Parts made as tasks of a Ray cluster give the bytes of one run."""

import importlib.util
from pathlib import Path

import pytest

from stages.pin import main as pin
from tests.data.tokens.common import chat_row, contents
from tests.workspace import invoke, lay_out, run_module, write_rows

WITHOUT_RAY = importlib.util.find_spec("ray") is None
ROWS = [chat_row(f"What is {n}?", f"It is {n}.") for n in range(200)]


@pytest.fixture
def pinned(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("DVC_STAGE", "DVC_ROOT"):
        monkeypatch.delenv(name, raising=False)
    write_rows(Path("rows.jsonl"), ROWS)
    lay_out(tmp_path, data__source="rows.jsonl", run__data_workers=1)
    for what in ("data", "model"):
        assert invoke(pin, what).exit_code == 0
    return tmp_path


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.skipif(WITHOUT_RAY, reason="ray is not installed: pip install 'lean-finetune[ray]'")
def test_ray_tasks_give_the_bytes_of_one_run(pinned):
    assert run_module("stages.tokenize", cwd=pinned).returncode == 0
    expected = contents(Path("data/tokens"))
    process = run_module("lean_finetune.data.shards.ray_parts", "--parts", "2", "--out", "parts", cwd=pinned)
    assert process.returncode == 0, process.stderr
    assert contents(Path("data/tokens")) == expected
    (pinned / "rows.jsonl").write_text("")
    process = run_module("lean_finetune.data.shards.ray_parts", "--parts", "2", "--out", "parts", cwd=pinned)
    assert process.returncode == 1 and "error: --part 0/2: rows.jsonl" in process.stderr


@pytest.mark.skipif(not WITHOUT_RAY, reason="ray is installed")
def test_without_ray_its_absence_is_told(pinned):
    process = run_module("lean_finetune.data.shards.ray_parts", "--parts", "2", "--out", "parts", cwd=pinned)
    assert process.returncode == 1
    assert process.stderr.strip().splitlines()[-1] == "error: ray is not installed; pip install 'lean-finetune[ray]'"
