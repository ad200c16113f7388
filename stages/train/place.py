"""Where unfinished trainings are kept, and who holds such a place."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from stages.errors import UserError
from stages.files import repo_root, told_in_one_line
from stages.locks import clear, hold, leave
from stages.units import readable_size


def scratch_root() -> Path:
    """The directory of all unfinished trainings; runs in temporary copies share the checkout's."""
    return repo_root() / "scratch" / "train"


@contextmanager
def held_alone(directory: Path, told: Callable[[str], None]) -> Iterator[None]:
    """A training's directory, held for the length of the block and emptied where that ends well.

    Raises:
        UserError: another process holds it, or the disk refused.
    """
    with told_in_one_line(directory):
        held = hold(directory)
    if held is None:
        raise UserError(
            f"{directory}: one process at a time may train the same run, and another one does; wait for its end, or "
            "end it: the same command then goes on from its checkpoint"
        )
    try:
        _tell_of_others(directory, told)
        yield
        clear(directory)
    finally:
        leave(directory, held)


def _tell_of_others(directory: Path, told: Callable[[str], None]) -> None:
    """Say what else lies beside a run's directory: nobody else removes the checkpoints of runs that were given up."""
    others = [path for path in directory.parent.iterdir() if path != directory and list(path.glob("step-*"))]
    if others:
        size = sum(file.stat().st_size for path in others for file in path.glob("step-*/*"))
        told(
            f"note: {directory.parent} holds checkpoints of {len(others)} other unfinished trainings "
            f"({readable_size(size)}); remove those that you will not go on with"
        )
