"""The data benchmark: its file is the same everywhere and has hard rows, its figures are real, a broken bar shows."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from benchmarks import chat_file as chat
from benchmarks import data
from benchmarks.chat_file import ChatFile, generate
from benchmarks.data_cases import Rival, Run, Stage, _run, without_start
from benchmarks.watch import WHOLE, watch
from lean_finetune.core.errors import UserError


@pytest.fixture
def scratch(tmp_path, monkeypatch) -> Path:
    """An empty working directory, and a tokenizer that is trained in a second."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(chat, "TRAINING_ROWS", 100)
    monkeypatch.setattr(data, "QUICK_TRAINING_ROWS", 100)
    monkeypatch.setattr(chat, "VOCABULARY_SIZE", 1000)
    return tmp_path / chat.SCRATCH


def text_of(row: dict) -> str:
    return "".join(message["content"] for message in row["messages"])


def test_a_longer_file_begins_with_the_rows_of_a_shorter_one_and_another_seed_gives_others():
    rows = list(generate(1100, 1))
    assert rows[:1000] == list(generate(1000, 1))
    assert rows[:30] != list(generate(30, 2))


def test_the_file_has_what_makes_chat_data_hard_and_no_control_token():
    rows = list(generate(2000, chat.SEED))
    texts = [text_of(row) for row in rows]
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


def test_lengths_are_those_of_the_rendered_rows_and_are_kept(scratch):
    source = chat.chat_file(20)
    tokenizer = AutoTokenizer.from_pretrained(source.model)
    expected = [
        len(tokenizer.apply_chat_template(row["messages"], return_dict=False)) for row in generate(20, chat.SEED)
    ]
    assert chat.lengths(20).tolist() == expected
    kept = source.path.with_suffix(".lengths.npy")
    np.save(kept, np.zeros(3, np.int32))
    assert chat.lengths(20).tolist() == [0, 0, 0], "a second call must read, not encode again"


def test_other_rows_or_another_seed_never_meet_a_file_made_for_these(scratch):
    one = chat.chat_file(10)
    assert one.path != chat.chat_file(11).path
    assert (other := chat.chat_file(10, seed=3)).path != one.path and other.model != one.model
    assert len(one.path.read_bytes().splitlines()) == 10


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="only Linux tells anonymous memory")
def test_anonymous_memory_counts_what_is_allocated_in_all_processes_but_no_mapped_file(tmp_path):
    (tmp_path / "file").write_bytes(bytes(80 << 20))
    child = "import time; own = b'1' * (50 << 20); time.sleep(1)"
    parent = (
        "import mmap, subprocess, sys; file = open('file', 'rb'); "
        "mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ); "
        f"sum(mapped[::4096]); subprocess.run([sys.executable, '-c', {child!r}])"
    )
    usages, _ = watch([sys.executable, "-c", parent], tmp_path, dict(os.environ), anonymous=True)
    whole = usages[WHOLE]
    assert 50 << 20 < whole.peak_anonymous_bytes < 150 << 20
    assert whole.peak_rss_bytes > whole.peak_anonymous_bytes + (70 << 20)


def test_the_start_is_taken_off_round_by_round():
    def run(wall_s: float) -> Run:
        return Run(wall_s=wall_s, work_s=wall_s, rows=1, tokens=1, written_bytes=0)

    runs = without_start([run(5.0), run(7.0)], [run(1.0), run(2.0)])
    assert [(one.wall_s, one.work_s) for one in runs] == [(5.0, 4.0), (7.0, 5.0)]


def test_a_contestant_that_fails_is_told_with_its_own_last_line(tmp_path):
    with pytest.raises(UserError, match="failed: ValueError: no such row"):
        _run([sys.executable, "-c", "raise ValueError('no such row')"], tmp_path, dict(os.environ))


@pytest.mark.slow
def test_a_rival_that_cannot_be_installed_is_skipped_with_pips_reason(scratch, monkeypatch, capsys):
    rival = Rival(name="Rival", script="none.py", requirements=("./not-here",))
    monkeypatch.setattr(data, "RIVALS", (rival,))
    ready, skipped = data._rivals(quick=False)
    assert not ready
    assert "ERROR" in skipped["Rival"] and "not-here" in skipped["Rival"]
    assert "note: Rival is skipped" in capsys.readouterr().err


def test_one_different_byte_between_the_engines_breaks_the_bar(scratch):
    source = ChatFile(path=Path("chat.jsonl"), rows=1, model=Path("model"))
    stages = {name: Stage(source=source, engine=engine) for name, engine in data.ENGINES.items()}
    for stage in stages.values():
        (stage.tokens / "train").mkdir(parents=True)
        (stage.tokens / "train/00000.arrow").write_bytes(b"same")
        (stage.tokens / "meta.json").write_bytes(b"{}")
    assert data._same_bytes(stages).holds
    (stage.tokens / "train/00000.arrow").write_bytes(b"some")
    bar = data._same_bytes(stages)
    assert (bar.value, bar.holds) == (1, False)
    (stage.tokens / "meta.json").unlink()
    assert data._same_bytes(stages).value == 2


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
        # The line end behind the last answer is not kept: one token of each row.
        assert rows[name]["tokens"] == tokens - 150
        assert 0 < rows[name]["work_s"] < rows[name]["wall_s"]
        assert rows[name]["written_bytes"] > 2 * rows[name]["tokens"]
        assert rows[f"{name}, input doubled"]["rows"] == 300
        assert rows[name]["peak_rss_bytes"] > rows[name]["anonymous_bytes"] > 10 << 20
    assert [bar.name for bar in measured.bars if "engines" in bar.name and bar.holds]
    assert not list((scratch / "runs").glob("*raw*")), "a contestant's output must not stay on disk"
