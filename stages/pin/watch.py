"""Links that let DVC watch a local source wherever it lies: DVC follows a link when it hashes a dependency."""

import os
from pathlib import Path

from stages.files import told_in_one_line

# What a link points to when nothing local is watched (a hub id): a file that always exists and rarely changes.
NOTHING_LOCAL = Path("stages/pin/hub.py")


def watch(link: Path, target: Path) -> None:
    """Point `link` at `target`: relatively inside the working directory (so a clone can follow it), else absolutely.

    The link is replaced in one step, and left alone when it is right already.

    Raises:
        UserError: the disk refused.
    """
    resolved = target.resolve()
    inside = resolved.is_relative_to(Path.cwd().resolve())
    text = os.path.relpath(resolved, link.parent.resolve()) if inside else str(resolved)
    if link.is_symlink() and os.readlink(link) == text:
        return
    with told_in_one_line(link):
        link.parent.mkdir(parents=True, exist_ok=True)
        aside = link.with_name(f".{link.name}.partial")
        aside.unlink(missing_ok=True)
        os.symlink(text, aside)
        os.replace(aside, link)
