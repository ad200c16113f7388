"""The data benchmark: its generated file, its figures, and a bar that a different byte breaks."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import chat_file as chat
from benchmarks import data
from benchmarks.chat_file import ChatFile, generate
from benchmarks.data import Run, Stage, without_start
from benchmarks.processes import WHOLE_RUN, run, watch
from lean_finetune.core.errors import UserError


@pytest.fixture
def scratch(tmp_path, monkeypatch) -> Path:
    """An empty working directory, and a tokenizer that is trained in a second."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(chat, "TRAINING_ROWS", 100)
    monkeypatch.setattr(data, "QUICK_TRAINING_ROWS", 100)
    monkeypatch.setattr(chat, "VOCABULARY_SIZE", 1000)
    return tmp_path / chat.SCRATCH


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    return list(generate(1100, chat.SEED))


def test_a_longer_file_begins_with_the_rows_of_a_shorter_one(rows):
    assert rows[:30] == list(generate(30, chat.SEED))
    assert rows[1000:1010] == list(generate(1010, chat.SEED))[1000:]


def test_the_file_has_code_tools_two_languages_a_long_tail_and_no_control_token(rows):
    texts = ["".join(message["content"] for message in row["messages"]) for row in rows]
    chinese = [sum("\u4e00" <= letter <= "\u9fff" for letter in text) > len(text) / 3 for text in texts]
    assert 0.25 < np.mean(chinese) < 0.35
    roles = [[message["role"] for message in row["messages"]] for row in rows]
    assert {turns.count("user") for turns in roles} == {1, 2, 3, 4}
    assert {"system", "tool"} < {role for turns in roles for role in turns}
    assert any("tool_calls" in message for row in rows for message in row["messages"])
    assert any("```python" in text for text in texts)
    sizes = np.array([len(text) for text in texts])
    assert sizes.max() > 15 * np.median(sizes), "no long tail"
    assert not any("<|" in text for text in texts)


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="anonymous memory is measured on Linux only")
def test_anonymous_memory_counts_allocations_of_all_processes_and_no_mapped_file(tmp_path):
    (tmp_path / "file").write_bytes(bytes(80 << 20))
    child = "import time; own = b'1' * (50 << 20); time.sleep(1)"
    parent = (
        "import mmap, subprocess, sys; file = open('file', 'rb'); "
        "mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ); "
        f"sum(mapped[::4096]); subprocess.run([sys.executable, '-c', {child!r}])"
    )
    usages, _ = watch([sys.executable, "-c", parent], tmp_path, dict(os.environ), anonymous=True)
    total = usages[WHOLE_RUN]
    assert 50 << 20 < total.peak_anonymous_bytes < 150 << 20
    assert total.peak_rss_bytes > total.peak_anonymous_bytes + (70 << 20)


def test_the_start_is_subtracted_round_by_round():
    def timed(wall_s: float) -> Run:
        return Run(wall_s=wall_s, work_s=wall_s, rows=1, tokens=1, written_bytes=0)

    runs = without_start([timed(5.0), timed(7.0)], [timed(1.0), timed(2.0)])
    assert [(one.wall_s, one.work_s) for one in runs] == [(5.0, 4.0), (7.0, 5.0)]


def test_a_failed_process_is_reported_with_its_error_line(tmp_path):
    with pytest.raises(UserError, match="failed: ValueError: no such row"):
        run([sys.executable, "-c", "raise ValueError('no such row')"], tmp_path)


def test_one_different_byte_between_the_engines_breaks_the_bar(scratch):
    source = ChatFile(path=Path("chat.jsonl"), rows=1, model=Path("model"))
    stages = {name: Stage(source=source, engine=engine) for name, engine in data.ENGINES.items()}
    for stage in stages.values():
        (stage.tokens / "train").mkdir(parents=True)
        (stage.tokens / "train/00000.arrow").write_bytes(b"same")
        (stage.tokens / "meta.json").write_bytes(b"{}")
    assert data.same_bytes(stages).holds
    (stage.tokens / "train/00000.arrow").write_bytes(b"some")
    (stage.tokens / "meta.json").unlink()
    assert data.same_bytes(stages).value == 2 and not data.same_bytes(stages).holds


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_quick_run_measures_the_real_stage_with_both_engines(scratch, monkeypatch):
    monkeypatch.setattr(data, "QUICK_ROWS", 150)
    measured = data.measure(quick=True)
    rows = {row["what"]: row for row in measured.rows}
    tokens = int(chat.lengths(150).sum())
    assert rows[data.RAW]["tokens"] == tokens and rows[data.RAW]["of raw limit"] == 1.0
    for name in (data.HF, data.FAST):
        assert rows[name]["rows"] == 150
        # Ours omits the line end after the last answer: one token of each row.
        assert rows[name]["tokens"] == tokens - 150
        assert 0 < rows[name]["work_s"] < rows[name]["wall_s"]
        assert rows[name]["written_bytes"] > 2 * rows[name]["tokens"]
        assert rows[f"{name}, input doubled"]["rows"] == 300
        assert rows[name]["peak_rss_bytes"] > rows[name]["anonymous_bytes"] > 10 << 20
    assert [bar.name for bar in measured.bars if "engines" in bar.name and bar.holds]
    assert not list((scratch / "runs").glob("*raw*")), "a contestant's output must not stay on disk"
