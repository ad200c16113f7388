"""The pool: order, bounds, and workers that die or outlive their parent."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.queues import Queue
from pathlib import Path

import pytest

from lean_finetune.core.errors import UserError
from lean_finetune.data.shards import worker_pool
from lean_finetune.data.shards.worker_pool import is_safe_to_fork, open_pool
from tests.conftest import ROOT
from tests.data.standin import make_byte_tokenizer, text_blocks, tokenize_bytes
from tests.processes import killed_after, run_bounded


def test_few_blocks_are_in_memory_at_a_time():
    """Otherwise a source larger than memory would be read completely while workers are busy."""
    read = []

    def blocks():
        for block in text_blocks(50):
            read.append(block.number)
            yield block

    with open_pool(tokenize_bytes, make_byte_tokenizer, 2, "threads") as tokenize:
        for done, _ in enumerate(tokenize(blocks())):
            assert len(read) <= done + 4


@pytest.mark.multiprocess
def test_a_killed_worker_is_reported_in_one_line():
    """As the system does to the largest process when memory runs out."""
    blocks = list(text_blocks(6))
    deadly = replace(blocks[3], payload=b"die")
    with (
        pytest.raises(UserError, match=r"^run\.data_workers: a worker of tokenize was killed"),
        open_pool(tokenize_bytes, make_byte_tokenizer, 2, "processes") as tokenize,
    ):
        list(tokenize([*blocks[:3], deadly, *blocks[4:]]))


@pytest.mark.filterwarnings("error")
def test_a_pool_without_memory_for_a_thread_ends_with_one_error(monkeypatch, capfd):
    """Python printed the traceback of its pool's thread above the error."""

    def start_thread(_: Queue) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Queue, "_start_thread", start_thread)
    monkeypatch.setattr(worker_pool, "CHECK_SECONDS", 0.05)
    before = threading.excepthook
    with (
        pytest.raises(UserError, match="run.data_workers: a worker of tokenize was killed"),
        open_pool(tokenize_bytes, make_byte_tokenizer, 2, "processes") as tokenize_blocks,
    ):
        list(tokenize_blocks(text_blocks(4)))
    assert capfd.readouterr() == ("", "") and threading.excepthook is before


def test_a_process_with_another_thread_is_not_forked():
    """The child would inherit a lock that is never released."""
    with ThreadPoolExecutor(1) as executor:
        executor.submit(int)
        assert not is_safe_to_fork()


def test_a_fresh_process_with_the_workers_libraries_can_be_forked():
    """Otherwise each worker would import them anew, and share no memory."""
    code = (
        "import stages.tokenize, lean_finetune.data.encode.row_tokenizer\n"
        "from lean_finetune.data.shards.worker_pool import is_safe_to_fork\n"
        "print(is_safe_to_fork())"
    )
    environment = {key: value for key, value in os.environ.items() if not key.endswith("_NUM_THREADS")}
    done = run_bounded([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True)
    assert done.stdout.strip() == str(sys.platform == "linux")


PARENT = """
import sys
from lean_finetune.data.shards.worker_pool import open_pool
from tests.data.standin import make_byte_tokenizer, text_blocks, tokenize_bytes
from dataclasses import replace
if __name__ == "__main__":
    if sys.argv[1] == "spawn":
        import threading, time
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    with open_pool(tokenize_bytes, make_byte_tokenizer, 2, "processes") as tokenize:
        for block, _ in tokenize(replace(block, payload=b"slow") for block in text_blocks(10_000)):
            import multiprocessing
            if block.number == 4:
                print(*(child.pid for child in multiprocessing.active_children()), flush=True)
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.multiprocess
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks at processes in /proc")
@pytest.mark.parametrize("start, end", [("fork", signal.SIGKILL), ("spawn", signal.SIGINT), ("fork", signal.SIGTERM)])
def test_no_worker_outlives_its_parent(tmp_path, start, end):
    """However the parent ends. Workers get Ctrl-C too, and print nothing."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    with (
        subprocess.Popen(
            [sys.executable, script, start],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as parent,
        killed_after(parent),
    ):
        assert parent.stdout is not None and parent.stderr is not None
        workers = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(workers) == 2 and all(map(is_running, workers))
        if end == signal.SIGINT:
            os.killpg(parent.pid, end)
        else:
            parent.send_signal(end)
        deadline = time.monotonic() + 20
        while any(map(is_running, workers)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not any(map(is_running, workers))
        stderr = parent.stderr.read()
        assert stderr.count("Traceback") == (1 if end == signal.SIGINT else 0), stderr
