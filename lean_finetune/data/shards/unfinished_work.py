"""Where unfinished work is kept: below the user's checkout, since DVC deletes a stage's outputs before it runs.

One directory for each key of all that decides the bytes, locked by the process that works in it.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lean_finetune.core.atomic_files import repo_root, told_in_one_line
from lean_finetune.core.file_locks import clear, hold, leave


def scratch_root() -> Path:
    """The directory of all unfinished work of tokenize; runs in temporary copies share the checkout's."""
    return repo_root() / "scratch" / "tokenize"


@contextmanager
def workplace(root: Path, key: str, told: Callable[[str], None]) -> Iterator[Path]:
    """The directory `root/key`, held by this process alone; it is removed when the block ends well.

    After a fault it stays if it holds a finished shard. Directories of other keys that no living process holds are
    removed: what was begun with other data, parameters or code is of no use. `told` gets a note when another process
    has to be waited for.

    Raises:
        UserError: the disk refused.
    """
    directory = root / key
    with told_in_one_line(directory):
        held = _hold(directory, told)
        try:
            _remove_stale(root, key)
            yield directory
            clear(directory)
        except BaseException:
            if not any((directory / "done").glob("*.json")):
                clear(directory)
            raise
        finally:
            leave(directory, held)


@contextmanager
def held_alone(directory: Path, told: Callable[[str], None]) -> Iterator[None]:
    """Let no other process of tokenize work in a directory during the block.

    Raises:
        UserError: the disk refused.
    """
    with told_in_one_line(directory):
        held = _hold(directory, told)
        try:
            yield
        finally:
            os.close(held)


def _hold(directory: Path, told: Callable[[str], None]) -> int:
    """Hold a directory, once its holder has ended."""
    held = hold(directory, lambda: told(f"another tokenize works in {directory}; waiting for it to end"))
    assert held is not None, "it was waited for"
    return held


def _remove_stale(root: Path, key: str) -> None:
    """Remove the unfinished work of other keys, but for that of living processes."""
    for other in sorted(root.iterdir()):
        if other.name != key and other.is_dir():
            held = hold(other)
            if held is not None:
                clear(other)
                leave(other, held)
