"""The same bytes from any number and kind of workers, either engine, and after any interruption."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lean_finetune.core.atomic_files import read_json
from stages.pin import main as pin
from stages.tokenize import main as stage
from tests.conftest import ROOT
from tests.data.common import chat_row, contents
from tests.data.small_blocks import BLOCK_BYTES, BLOCKS_PER_SHARD, make_blocks_small
from tests.workspace import invoke, lay_out, run_module, write_rows

SMALL = "tests.data.small_blocks"
OUT, FIGURES = Path("data/tokens"), Path("data/tokens/figures.json")
ROWS = [
    chat_row(f"What is {n} and 你好 {n * n}? " + "Say more. " * (n % 9), f"It is {n}. " + "Well, " * (n % 17))
    for n in range(2500)
]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, request):
    """A directory with pinned rows of several shards, and the tokens that one worker makes of them."""
    directory = tmp_path_factory.mktemp("workers")
    patch = pytest.MonkeyPatch()
    request.addfinalizer(patch.undo)
    patch.chdir(directory)
    make_blocks_small(patch.setattr)
    rows = [*ROWS, {"messages": "bad"}, *ROWS[:300]]
    lay_out_here(directory, data_workers=1, tokenizer_engine="tokenizers")
    write_rows(directory / "rows.jsonl", rows)
    for what in ("data", "model"):
        assert invoke(pin, what).exit_code == 0
    tokenize()
    return directory, contents(OUT, FIGURES)


def lay_out_here(directory: Path, **run: object) -> None:
    values = {f"run__{key}": value for key, value in run.items()}
    values |= {"data__source": "rows.jsonl", "data__on_bad_row": "skip", "data__drop_duplicates": True}
    lay_out(directory, **values)


def tokenize(*arguments: str) -> str:
    """Run the stage in this process; its notes."""
    result = invoke(stage, *arguments)
    assert result.exit_code == 0, result.stderr
    return result.stderr


def test_there_are_several_shards(prepared):
    """Otherwise the tests below would test nothing."""
    directory, made = prepared
    size = (directory / "rows.jsonl").stat().st_size
    shards = -(-size // (BLOCK_BYTES * BLOCKS_PER_SHARD))
    assert shards >= 4 and sum(name.startswith("data/tokens/train/") for name in made) in (shards, shards + 1)
    figures = read_json(FIGURES)
    assert (figures["bad_rows"], figures["duplicate_rows"]) == (1, 300)


@pytest.mark.multiprocess
def test_threads_change_no_byte(prepared):
    directory, expected = prepared
    lay_out_here(directory, data_workers=3, data_pool="threads", tokenizer_engine="tokenizers")
    tokenize()
    assert contents(OUT, FIGURES) == expected


@pytest.mark.multiprocess
def test_processes_and_engine_change_no_byte(prepared):
    directory, expected = prepared
    lay_out_here(directory, data_workers=2, tokenizer_engine="tiktoken")
    process = run_module(SMALL, cwd=directory)
    assert process.returncode == 0, process.stderr
    assert contents(OUT, FIGURES) == expected
    assert list(Path("scratch/tokenize").iterdir()) == []


def finished() -> list[Path]:
    return sorted(Path("scratch/tokenize").glob("*/done/*.json"))


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_killed_run_is_resumed(prepared):
    """SIGKILL leaves no half shard; finished ones are reused."""
    directory, expected = prepared
    shards = 3
    lay_out_here(directory, data_workers=2, tokenizer_engine="tokenizers")
    shutil.rmtree(OUT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, "-m", SMALL], env=environment, stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            if len(finished()) >= shards and any(Path("scratch/tokenize").glob("*/train/*.arrow")):
                break
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert process.returncode == -signal.SIGKILL, "it ended before it could be killed"
    assert not OUT.exists()
    done = {path.stem: path.parents[1] / "train" / f"{path.stem}.arrow" for path in finished()}
    inodes = {name: path.stat().st_ino for name, path in done.items()}
    assert len(inodes) >= shards
    tokenize()
    assert contents(OUT, FIGURES) == expected
    assert {name: (OUT / "train" / f"{name}.arrow").stat().st_ino for name in inodes} == inodes
    assert list(Path("scratch/tokenize").iterdir()) == []
