"""The same bytes from any number and kind of workers, either engine, several machines, and after any interruption."""

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
from tests.data.tokens.common import chat_row, contents, read_tokens
from tests.data.tokens.small_blocks import BLOCK_BYTES, BLOCKS_PER_SHARD, make_blocks_small
from tests.processes import run_bounded
from tests.workspace import error, invoke, lay_out, run_module, write_rows

SMALL = "tests.data.tokens.small_blocks"
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


def test_parts_merge_to_the_bytes_of_one_run(prepared):
    directory, expected = prepared
    lay_out_here(directory, data_workers=1, tokenizer_engine="tokenizers")
    for part in range(3):
        notes = tokenize("--part", f"{part}/3", "--out", f"parts/machine{part % 2}")
        assert f"parts/machine{part % 2}/part-{part}-of-3 has " in notes
    shutil.rmtree(OUT)
    tokenize("--merge", "parts/machine1", "parts/machine0")
    assert contents(OUT, FIGURES) == expected
    assert error(invoke(stage, "--merge", "parts/machine1")).startswith("--merge: ")
    assert contents(OUT, FIGURES) == expected
    lay_out(directory, data__source="rows.jsonl", data__max_length=100)
    assert "made with other parameters than here" in error(invoke(stage, "--merge", "parts/machine1", "parts/machine0"))


@pytest.mark.slow
def test_the_documented_slurm_job_makes_its_part(prepared):
    """As SLURM starts task 1 of 3, but for the shared directory and the size of the blocks."""
    directory, _ = prepared
    lay_out_here(directory, data_workers=1, tokenizer_engine="tokenizers")
    [command] = [line for line in (ROOT / "docs/data.md").read_text().splitlines() if "$SLURM_ARRAY_TASK_ID" in line]
    command = command.replace("python -m stages.tokenize", f"{sys.executable} -m {SMALL}")
    command = command.replace("/shared/parts", "slurm")
    environment = {
        **os.environ,
        **{"PYTHONPATH": str(ROOT), "SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_TASK_COUNT": "3"},
    }
    run_bounded(["sh", "-c", command], check=True, env=environment)
    manifest = read_json(directory / "slurm/part-1-of-3/manifest.json")
    assert manifest["shards"] == list(range(1, manifest["all_shards"], 3)) != []


@pytest.mark.slow
def test_the_tokens_open_with_datasets(prepared):
    """In the line that the documentation gives."""
    from datasets import load_dataset

    directory, _ = prepared
    rows = load_dataset(
        "arrow", data_files="data/tokens/train/*.arrow", split="train", cache_dir=str(directory / "cache")
    )
    expected = read_tokens(OUT / "train")
    assert len(rows) == len(expected)
    assert [rows[place] for place in (0, 700, -1)] == [expected[place] for place in (0, 700, -1)]


USAGE = [("--part", "1"), ("--part", "2/2"), ("--merge",), ("somewhere",), ("--merge", "--part", "0/2", "somewhere")]


@pytest.mark.parametrize("arguments", USAGE, ids=" ".join)
def test_options_that_exclude_each_other_are_refused(prepared, arguments):
    assert error(invoke(stage, *arguments), 2).startswith(("--part: must be", "--merge: needs directories"))
