"""Links that let DVC watch local sources anywhere: DVC follows a link when it hashes a dependency.

`dvc exp run` adds the files below such a link to git unless .gitignore names the link; ours does, so weights and data
stay out of git.
"""

import os
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from lean_finetune.core.atomic_files import repo_root, write_errors
from lean_finetune.core.errors import UserError
from lean_finetune.pinning.local_source import LocalSource

# Target of a link when nothing local is watched, as for a hub id.
NOTHING_LOCAL = Path("locks/README.md")
# DVC follows a link to a directory only if the link itself is a dependency: dvc.yaml lists these four.
DIRECTORY_LINKS = ("watched-data", "watched-data-1", "watched-data-2", "watched-data-3")
# In a directory that is a dependency, DVC follows any number of links to files.
FILE_LINKS = "watched-files"


def watch_sources(locks: Path, sources: Sequence[LocalSource], template: Path | None) -> list[Path]:
    """Link the local sources and the user's chat template.

    Returns the directories for which no directory link is left. Their files are linked one by one, so that DVC does not
    notice files added to them. Raises UserError if the disk cannot be written.
    """
    roots = list(dict.fromkeys(source.root for source in sources))
    folders = roots if len(roots) == 1 else [root for root in roots if not root.is_file()]
    directories, others = folders[: len(DIRECTORY_LINKS)], folders[len(DIRECTORY_LINKS) :]
    paths = (path for source in sources if source.root not in directories for path in source.paths)
    files = list(dict.fromkeys(paths))
    for link, target in zip(DIRECTORY_LINKS, directories + [NOTHING_LOCAL] * len(DIRECTORY_LINKS), strict=False):
        watch(locks / link, target)
    links = {f"{k}": path for k, path in enumerate(files or [NOTHING_LOCAL])}
    if template is not None:
        links["template"] = template
    for name, path in links.items():
        watch(locks / FILE_LINKS / name, path)
    with write_errors(locks / FILE_LINKS):
        for old in (locks / FILE_LINKS).iterdir():
            if old.name not in links:
                old.unlink()
    return others


def watch(link: Path, target: Path) -> None:
    """Point `link` at `target`: by a relative path if copies of the repository have the target too, else absolute.

    Links in `target` are not resolved, so that DVC notices when they change. The link is replaced atomically, and not
    touched if it is right already. Raises UserError if the disk cannot be written.
    """
    absolute = Path(os.path.abspath(target))
    text = os.path.relpath(absolute, link.parent.resolve()) if _is_in_copies(absolute) else str(absolute)
    if link.is_symlink() and os.readlink(link) == text:
        return
    with write_errors(link):
        link.parent.mkdir(parents=True, exist_ok=True)
        aside = link.with_name(f".{link.name}.partial")
        aside.unlink(missing_ok=True)
        os.symlink(text, aside)
        os.replace(aside, link)


def refuse_unignored(parameter: str, source: str, paths: Iterable[Path]) -> None:
    """Refuse files in the user's checkout that git neither tracks nor ignores.

    `dvc exp apply` stashes untracked files: it copies them into .git, and deletes ignored files that lie in the same
    untracked directory (libgit2 removes the directory with everything in it). Raises UserError, naming the line for
    .git/info/exclude that keeps git away from them.
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


def _is_in_copies(path: Path) -> bool:
    """Whether a clone or a temporary experiment has the path: it is in the working directory and tracked by git.

    On a path through links, git tracks the first link; its target must be tracked too, or be outside the repository.
    """
    here, resolved = Path.cwd().resolve(), path.resolve()
    if not path.is_relative_to(here):
        return False
    first_link = next((part for part in (*reversed(path.parents), path) if part.is_symlink()), path)
    return _tracked(first_link) and (not resolved.is_relative_to(here) or _tracked(resolved))


def _tracked(path: Path) -> bool:
    """Whether git tracks the path; True without git, where there are no copies."""
    try:
        untracked = subprocess.run(["git", "ls-files", "--others", "--", path], capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return True
    return not untracked
