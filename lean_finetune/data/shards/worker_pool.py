"""Blocks turned into tokens by several workers, handed back in order, with a bounded number of them in memory."""

import gc
import multiprocessing
import os
import signal
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path

from lean_finetune.core import parent_death
from lean_finetune.core.errors import UserError
from lean_finetune.core.signals import ENDINGS
from lean_finetune.data.format.token_settings import BlockTokens
from lean_finetune.data.read.row_block import Block
from lean_finetune.data.read.worker_memory import give_back_free_memory, keep_memory_small

Tokenize = Callable[[Block], BlockTokens]
# Enough that no worker waits for the next block while the oldest one is slow.
BLOCKS_IN_FLIGHT_PER_WORKER = 2
# Threads with which a fork is safe: pyarrow starts jemalloc's at import, and jemalloc prepares itself for forks; the
# one that watches the parent holds no lock.
FORK_SAFE_THREADS = {"jemalloc_bg_thd", parent_death.THREAD}

_own = threading.local()


class Pool:
    """Maps blocks to tokens in order."""

    def __init__(self, submit: Callable[[Block], "Future[BlockTokens]"], bound: int):
        """Hold at most `bound` blocks."""
        self._submit, self._bound = submit, bound

    def map(self, blocks: Iterable[Block]) -> Iterator[tuple[Block, BlockTokens]]:
        """Each block with its tokens, in the blocks' order; the bytes do not depend on how many workers there are.

        Raises:
            UserError: a worker was killed.
        """
        waiting: deque[tuple[Block, Future[BlockTokens]]] = deque()
        try:
            for block in blocks:
                waiting.append((block, self._submit(block)))
                if len(waiting) >= self._bound:
                    first, future = waiting.popleft()
                    yield first, future.result()
            while waiting:
                first, future = waiting.popleft()
                yield first, future.result()
        except BrokenProcessPool:
            raise UserError(
                "run.data_workers: a worker of tokenize was killed, most often because memory ran out; set fewer "
                "workers or run.data_pool=threads, then run again: finished shards are kept"
            ) from None


@contextmanager
def open_pool(own: Tokenize, make: Callable[[], Tokenize], workers: int, kind: str) -> Iterator[Pool]:
    """A pool of `workers` `processes` or `threads`; one worker is this process itself, with its `own`.

    Others `make()` one each, which has to be picklable, but for forks, which share memory with `own` and start at
    once: enter the pool before this process has threads that forbid to fork it.
    """
    if workers == 1:
        yield Pool(_Serial(own).submit, 1)
        return
    if kind == "processes":
        executor, task = _processes(own, make, workers), _work_alone
    else:
        executor, task = ThreadPoolExecutor(workers, "", _start, (make,)), _work
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns of any thread, also of those that a fork is safe with.
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            # The first task starts the workers: now, before a progress bar's thread exists. A signal waits until they
            # handle signals as workers do.
            with _endings_wait():
                executor.submit(os.getpid)
        yield Pool(lambda block: executor.submit(task, block), BLOCKS_IN_FLIGHT_PER_WORKER * workers)
    finally:
        executor.shutdown(wait=True, cancel_futures=True)
        gc.unfreeze()


@contextmanager
def _endings_wait() -> Iterator[None]:
    """Inside, signals that end a stage wait; so they do in processes forked inside, until these let them in."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ENDINGS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


class _Serial:
    """Work done in this process when it is asked for."""

    def __init__(self, tokenize: Tokenize):
        self._tokenize = tokenize

    def submit(self, block: Block) -> "Future[BlockTokens]":
        done: Future[BlockTokens] = Future()
        done.set_result(self._tokenize(block))
        return done


def _processes(own: Tokenize, make: Callable[[], Tokenize], workers: int) -> Executor:
    """Worker processes: forks of this one where that is safe, else new interpreters."""
    if is_safe_to_fork():
        give_back_free_memory()
        context = multiprocessing.get_context("fork")
        return ProcessPoolExecutor(workers, context, _start_process, (lambda: own,))
    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_process, (make,))


def is_safe_to_fork() -> bool:
    """Whether this process has no thread that might hold a lock which a fork would inherit forever locked."""
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():
        return False
    others = [task for task in tasks.iterdir() if task.name != str(os.getpid())]
    return all((task / "comm").read_text().strip() in FORK_SAFE_THREADS for task in others)


def available_workers() -> int:
    """Cores that this process may use: those it is bound to, less what a container's quota takes away."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.is_file():
        allowed, period = quota.read_text().split()
        if allowed != "max":
            cores = min(cores, -(-int(allowed) // int(period)))
    return max(cores, 1)


def _start_process(make: Callable[[], Tokenize]) -> None:
    """Make a worker process ready: Ctrl-C is its parent's business, and it never outlives the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(parent_death.PARENT_ENDED, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDINGS)
    keep_memory_small()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _start(make)


def _start(make: Callable[[], Tokenize]) -> None:
    """Make this worker's own tokenizer: it counts as it goes, so threads must not share one."""
    _own.tokenize = make()


def _end_with_parent() -> None:
    """End this process when its parent is gone, however that came about (SIGKILL runs no cleanup)."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "only a worker process watches its parent"
    wait([parent.sentinel])
    os._exit(1)


def _work(block: Block) -> BlockTokens:
    """One block, in a worker."""
    tokens: BlockTokens = _own.tokenize(block)
    return tokens


def _work_alone(block: Block) -> BlockTokens:
    """One block, in a worker process: the collector looks once, at the end, when hardly anything is left to look at."""
    gc.disable()
    try:
        return _work(block)
    finally:
        gc.collect()
