"""Links that let DVC watch a local source wherever it lies: DVC follows a link when it hashes a dependency.

`dvc exp run` adds the files below such a link to git unless .gitignore names the link; ours does, so weights and data
stay out of git.
"""

import os
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from lean_finetune.core.atomic_files import repo_root, told_in_one_line
from lean_finetune.core.errors import UserError
from lean_finetune.pinning.local_source import LocalSource

# Where a link leads when nothing local is watched (a hub id): a page that says so.
NOTHING_LOCAL = Path("locks/README.md")
# DVC follows a link to a directory only where the link is itself a dependency: dvc.yaml lists these four.
DIRECTORY_LINKS = ("watched-data", "watched-data-1", "watched-data-2", "watched-data-3")
# It follows links to files in a directory that is a dependency, any number of them.
FILE_LINKS = "watched-files"


def watch_sources(locks: Path, sources: Sequence[LocalSource], template: Path | None) -> list[Path]:
    """Point the links of pin_data at the local sources: `watched-data` at the only one, else each where it fits.

    A chat template of the user's is watched as one more file.

    Returns:
        The directories beyond the links for them: their files are watched one by one, files added there are not.

    Raises:
        UserError: the disk refused.
    """
    roots = list(dict.fromkeys(source.root for source in sources))
    folders = roots if len(roots) == 1 else [root for root in roots if not root.is_file()]
    directories, others = folders[: len(DIRECTORY_LINKS)], folders[len(DIRECTORY_LINKS) :]
    paths = (path for source in sources if source.root not in directories for path in source.paths)
    files = list(dict.fromkeys(paths))
    for link, target in zip(DIRECTORY_LINKS, directories + [NOTHING_LOCAL] * len(DIRECTORY_LINKS), strict=False):
        watch(locks / link, target)
    kept = {f"{k}": path for k, path in enumerate(files or [NOTHING_LOCAL])}
    if template is not None:
        kept["template"] = template
    for name, path in kept.items():
        watch(locks / FILE_LINKS / name, path)
    with told_in_one_line(locks / FILE_LINKS):
        for old in (locks / FILE_LINKS).iterdir():
            if old.name not in kept:
                old.unlink()
    return others


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


def refuse_unignored(parameter: str, source: str, paths: Iterable[Path]) -> None:
    """Refuse files in the user's checkout that git neither tracks nor ignores.

    `dvc exp apply` stashes untracked files: it copies them into .git, and deletes ignored files that lie in the same
    untracked directory (libgit2 removes the directory with everything in it).

    Raises:
        UserError: naming the line for .git/info/exclude that keeps git away from them.
    """
    root = repo_root().resolve()
    command = ["git", "-C", str(root), "ls-files", "-z", "--others", "--exclude-standard", "--directory"]
    try:
        listed = subprocess.run([*command, "--no-empty-directory"], capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return  # Without git nothing is stashed.
    untracked = {root / os.fsdecode(name): os.fsdecode(name) for name in listed.split(b"\0") if name}
    for path in map(Path.resolve, paths):
        if found := next((untracked[one] for one in (path, *path.parents) if one in untracked), None):
            raise UserError(
                f"{parameter}: git neither tracks nor ignores {found} in this checkout, so `dvc exp apply` would copy "
                f"it into .git and could delete files in it; got {source!r}; move it out of the checkout, or add the "
                f"line /{found} to .git/info/exclude"
            )


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
