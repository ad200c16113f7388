"""Links that let DVC watch a local source wherever it lies: DVC follows a link when it hashes a dependency."""

import os
import subprocess
from pathlib import Path

from stages.files import told_in_one_line

# What a link points to when nothing local is watched (a hub id): a file that always exists and rarely changes.
NOTHING_LOCAL = Path("stages/pin/hub.py")


def watch(link: Path, target: Path) -> None:
    """Point `link` at `target`: relatively when it travels with the repository, else absolutely.

    The link is replaced in one step, and left alone when it is right already.

    Raises:
        UserError: the disk refused.
    """
    resolved = target.resolve()
    text = os.path.relpath(resolved, link.parent.resolve()) if _travels(resolved) else str(resolved)
    if link.is_symlink() and os.readlink(link) == text:
        return
    with told_in_one_line(link):
        link.parent.mkdir(parents=True, exist_ok=True)
        aside = link.with_name(f".{link.name}.partial")
        aside.unlink(missing_ok=True)
        os.symlink(text, aside)
        os.replace(aside, link)


def _travels(path: Path) -> bool:
    """Whether a clone or a temporary experiment has the path too: it is in the working directory and tracked by git.

    A relative link to any other file, one under `dvc add` too, would dangle in the copy of the repository that
    `dvc exp run --temp` and `--queue` run in.
    """
    if not path.is_relative_to(Path.cwd().resolve()):
        return False
    try:
        untracked = subprocess.run(["git", "ls-files", "--others", "--", path], capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return True  # Without git there are no copies.
    return not untracked
