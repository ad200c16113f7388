"""A pool of workers that tokenize blocks, with results in order and a bounded number of blocks in memory."""

import gc
import multiprocessing
import os
import signal
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from itertools import islice
from multiprocessing.connection import wait
from pathlib import Path

from lean_finetune.core.errors import UserError
from lean_finetune.core.signals import ENDINGS, PARENT_ENDED, PARENT_WATCH
from lean_finetune.core.systems import usable_cores
from lean_finetune.data.read.row_block import RowBlock
from lean_finetune.data.read.worker_memory import prepare_fork, return_freed_memory
from lean_finetune.data.shards.shard_files import BlockTokens

Tokenize = Callable[[RowBlock], BlockTokens]
Result = tuple[RowBlock, BlockTokens]
TokenizeBlocks = Callable[[Iterable[RowBlock]], Iterator[Result]]
"""Each block with its tokens, in the order of the blocks."""
CHECK_SECONDS = 2.0
"""How often the pool is checked while a block is waited for."""
# More than one, so that no worker waits for a block while the oldest one is slow.
BLOCKS_IN_FLIGHT_PER_WORKER = 2
# Threads that do not make a fork unsafe: jemalloc's, which pyarrow starts and which handles forks, and the one that
# watches the parent process, which takes no lock.
FORK_SAFE_THREADS = {"jemalloc_bg_thd", PARENT_WATCH}

_worker = threading.local()


@contextmanager
def open_pool(tokenize: Tokenize, make: Callable[[], Tokenize], workers: int, kind: str) -> Iterator[TokenizeBlocks]:
    """A pool of `workers` processes or threads, as `kind` says. A single worker is this process itself.

    Forked processes share the memory of `tokenize`, and so start at once. They need a process without other threads.
    Threads and spawned processes call `make`, which must be picklable.
    """
    if workers == 1:
        yield lambda blocks: ((block, tokenize(block)) for block in blocks)
        return
    was_frozen = gc.get_freeze_count() > 0
    if kind == "processes":
        executor, task = _processes(tokenize, make, workers), _work_in_process
    else:
        executor, task = ThreadPoolExecutor(workers, "", _start, (make,)), _work
    with _without_manager_traceback(executor):
        try:
            with warnings.catch_warnings():
                # Python 3.12 warns of any thread, also of those that a fork is safe with.
                warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
                # The first task starts the workers, before other threads start. Signals are blocked until the workers
                # have their own handlers.
                blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ENDINGS)
                try:
                    executor.submit(os.getpid)
                finally:
                    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            yield partial(
                _map,
                lambda block: executor.submit(task, block),
                lambda: _is_managed(executor),
                BLOCKS_IN_FLIGHT_PER_WORKER * workers,
            )
        finally:
            if not _is_managed(executor):  # Nobody else ends them, and Python waits for them when it exits.
                for process in (getattr(executor, "_processes", None) or {}).values():
                    process.kill()
            executor.shutdown(wait=True, cancel_futures=True)
            if not was_frozen:
                gc.unfreeze()


def _map(
    submit: Callable[[RowBlock], "Future[BlockTokens]"],
    is_managed: Callable[[], bool],
    bound: int,
    blocks: Iterable[RowBlock],
) -> Iterator[Result]:
    """See `TokenizeBlocks`; at most `bound` blocks are in memory. `is_managed` is whether results can still come."""
    waiting: deque[tuple[RowBlock, Future[BlockTokens]]] = deque()
    unread = iter(blocks)
    try:
        while True:
            waiting.extend((block, submit(block)) for block in islice(unread, bound - len(waiting)))
            if not waiting:
                return
            first, future = waiting.popleft()
            while not future.done():
                wait_for_futures([future], timeout=CHECK_SECONDS)
                if not future.done() and not is_managed():
                    raise BrokenProcessPool
            yield first, future.result()
    except BrokenProcessPool:
        raise UserError(
            "run.data_workers: a worker of tokenize was killed, most often because memory ran out; set fewer "
            "workers or run.data_pool=threads, then run again: finished shards are reused"
        ) from None


@contextmanager
def _without_manager_traceback(executor: Executor) -> Iterator[None]:
    """Let no traceback be printed if the executor's manager thread fails: `_map` then raises the error of the user."""
    before = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        if args.thread is not getattr(executor, "_executor_manager_thread", None):
            before(args)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = before


def _is_managed(executor: Executor) -> bool:
    """Whether the thread that hands out blocks and collects results runs.

    Without memory for one more thread it ends, and Python's pool would wait forever.
    """
    manager = getattr(executor, "_executor_manager_thread", None)
    return manager is None or manager.is_alive()


def _processes(tokenize: Tokenize, make: Callable[[], Tokenize], workers: int) -> Executor:
    """Worker processes: forks where that is safe, else new interpreters."""
    if is_safe_to_fork():
        prepare_fork()
        context = multiprocessing.get_context("fork")
        return ProcessPoolExecutor(workers, context, _start_process, (lambda: tokenize,))
    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_process, (make,))


def is_safe_to_fork() -> bool:
    """Whether no other thread can have a lock, which would stay locked forever in a fork."""
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():
        return False
    others = [task for task in tasks.iterdir() if task.name != str(os.getpid())]
    return all((task / "comm").read_text().strip() in FORK_SAFE_THREADS for task in others)


def available_workers() -> int:
    """Cores that this process may use: its CPU affinity, limited by a container's quota."""
    cores = usable_cores()
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.is_file():
        allowed, period = quota.read_text().split()
        if allowed != "max":
            cores = min(cores, -(-int(allowed) // int(period)))
    return max(cores, 1)


def _start_process(make: Callable[[], Tokenize]) -> None:
    """Initialize a worker process: it ignores Ctrl-C, which its parent handles, and ends with the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(PARENT_ENDED, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDINGS)
    return_freed_memory()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _start(make)


def _start(make: Callable[[], Tokenize]) -> None:
    """Make this worker's tokenizer, which has counters and so cannot be shared by threads."""
    _worker.tokenize = make()


def _end_with_parent() -> None:
    """End this process when its parent has ended, even by SIGKILL."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "only a worker process watches its parent"
    wait([parent.sentinel])
    os._exit(1)


def _work(block: RowBlock) -> BlockTokens:
    """Tokenize one block in a worker thread."""
    tokens: BlockTokens = _worker.tokenize(block)
    return tokens


def _work_in_process(block: RowBlock) -> BlockTokens:
    """Tokenize one block in a worker process, with one garbage collection at the end, when few objects are left."""
    gc.disable()
    try:
        return _work(block)
    finally:
        gc.collect()
