"""Links that let DVC watch a local source wherever it lies: DVC follows a link when it hashes a dependency."""

import os
import subprocess
from pathlib import Path

from stages.files import told_in_one_line

# What a link points to when nothing local is watched (a hub id): a file that always exists and rarely changes.
NOTHING_LOCAL = Path("stages/pin/hub.py")


def watch(link: Path, target: Path) -> None:
    """Point `link` at `target`: relatively when it travels with the repository, else absolutely.

    Links in `target` are not followed: repointing one must be noticed as an edit is. The link is replaced in one step,
    and left alone when it is right already.

    Raises:
        UserError: the disk refused.
    """
    absolute = Path(os.path.abspath(target))
    text = os.path.relpath(absolute, link.parent.resolve()) if _travels(absolute) else str(absolute)
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
    `dvc exp run --temp` and `--queue` run in. Of a path through links, git tracks the first one, which must lead to a
    file that is tracked as well, or out of the repository.
    """
    here, resolved = Path.cwd().resolve(), path.resolve()
    if not path.is_relative_to(here):
        return False
    first_link = next((part for part in (*reversed(path.parents), path) if part.is_symlink()), path)
    return _tracked(first_link) and (not resolved.is_relative_to(here) or _tracked(resolved))


def _tracked(path: Path) -> bool:
    """Whether git keeps the path, or there is no git."""
    try:
        untracked = subprocess.run(["git", "ls-files", "--others", "--", path], capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return True  # Without git there are no copies.
    return not untracked
