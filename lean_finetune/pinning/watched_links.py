"""Links through which DVC watches local sources and files that rows name: it follows one when it hashes a dependency.

`dvc exp run` adds the files below such a link to git unless .gitignore names the link; ours does, so weights and data
stay out of git.
"""

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lean_finetune.core.atomic_files import repo_root, write_errors
from lean_finetune.core.errors import UserError

OUTPUTS = (
    *("data/tokens", "data/batches", "data/estimate", "data/reference", "data/train", "data/tuned", "data/evaluate"),
    "data/report",
    *("locks", "metrics"),
)
"""Paths that the stages write, as in dvc.yaml."""
# Target of a link when nothing local is watched, as for a hub id.
NOTHING_LOCAL = Path("locks/README.md")
# DVC follows a link to a directory only if the link itself is a dependency: dvc.yaml lists these four.
DIRECTORY_LINKS = ("watched-data", "watched-data-1", "watched-data-2", "watched-data-3")
# In a directory that is a dependency, DVC follows any number of links to files.
FILE_LINKS = "watched-files"
MODEL_LINKS = ("watched-adapter", "watched-model")
MOST_NAMED_LINKS = 100
"""Files named by rows that are linked singly, where no link is left for their directory. Each takes git two calls."""


@dataclass(frozen=True, kw_only=True)
class Watched:
    """What DVC must watch of a local source."""

    root: Path
    """A file, or the directory of all files."""
    files: Sequence[Path]
    named: Mapping[str, Path] = field(default_factory=dict)
    """Files that its rows name, by name. A relative name lies below the directory of its row's file."""


def watch_sources(locks: Path, sources: Sequence[Watched], template: Path | None) -> tuple[list[Path], list[Path]]:
    """Link the local sources, the directories of files that rows name, and the user's chat template.

    Returns the directories for which no directory link is left, and named files without any link. The files of such a
    directory are linked one by one, so that DVC does not notice files added to them. Raises UserError if the disk
    cannot be written.
    """
    roots = list(dict.fromkeys(source.root for source in sources))
    folders = roots if len(roots) == 1 else [root for root in roots if not root.is_file()]
    directories, others = folders[: len(DIRECTORY_LINKS)], folders[len(DIRECTORY_LINKS) :]
    paths = [path for source in sources if source.root not in directories for path in source.files]
    with_named, single = _named_folders([source.named for source in sources], directories)
    directories = directories + with_named
    files = list(dict.fromkeys((*paths, *single[:MOST_NAMED_LINKS])))
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
    return others, single[MOST_NAMED_LINKS:]


def _named_folders(sources: Sequence[Mapping[str, Path]], watched: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """(directories to link, files in none of them) for the files that rows of each source name, by name.

    If there are more directories than links, one around all of a source's is linked.
    """
    room = len(DIRECTORY_LINKS) - len(watched)
    real = {path.parent: _real(path.parent) for named in sources for path in named.values()}
    inside = [_real(root) for root in watched if os.path.isdir(root)]
    folders = {folder: place for folder, place in real.items() if os.path.isdir(folder) and not _is_in(place, inside)}
    if len(_outermost(folders)) > room:
        for named in sources:
            relative = {path.parent for name, path in named.items() if not Path(name).is_absolute()}
            below = [folders[folder] for folder in relative if folder in folders]
            if below and not _holds_outputs(around := Path(os.path.commonpath(below))):
                folders[around] = around
    kept = [folder for folder in _outermost(folders) if not _holds_outputs(folder)][:room]
    inside += [folders[folder] for folder in kept]
    left = {folder for folder, place in real.items() if not _is_in(place, inside)}
    single = [path for named in sources for path in named.values() if path.parent in left]
    return kept, [path for path in single if os.path.isfile(path)]


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _is_in(place: Path, directories: Sequence[Path]) -> bool:
    """Whether a real path is one of these directories, or below one."""
    return any(place.is_relative_to(directory) for directory in directories)


def _outermost(folders: Mapping[Path, Path]) -> list[Path]:
    """Those of directories, by their real paths, that are in no other one."""
    found: dict[Path, Path] = {}
    for folder, place in sorted(folders.items(), key=lambda pair: pair[1]):
        # In this order, a directory is followed by all that it has.
        if not found or not place.is_relative_to(list(found)[-1]):
            found[place] = folder
    return list(found.values())


def _holds_outputs(folder: Path) -> bool:
    """Whether DVC cannot watch a directory, because the pipeline writes into it."""
    try:
        refuse_outputs("data.source", str(folder), folder)
    except UserError:
        return True
    return False


def refuse_outputs(parameter: str, source: str, path: Path, project: Path | None = None) -> None:
    """Refuse a source inside an output of the pipeline, or around one: each run would change it.

    `path` is the file or directory that DVC would watch. `project`: its directory, if it is not the working directory.
    """
    for root in (Path(), repo_root()) if project is None else (project,):
        for output in OUTPUTS:
            # realpath, unlike resolve, accepts loops of links.
            written, read = (Path(os.path.realpath(one)) for one in (root / output, path))
            if written == read or written in read.parents:
                raise UserError(
                    f"{parameter}: must not be in {output}, which the pipeline writes; got {source!r}; name another "
                    "path, or copy the rows there first"
                )
            if read in written.parents:
                raise UserError(
                    f"{parameter}: DVC would watch all of {read}, and the pipeline writes {output} in it; got "
                    f"{source!r}; move the rows into a directory without the project, and name that"
                )


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


def follow_checkout(locks: Path) -> None:
    """Point links whose targets this copy of the project lacks into the user's checkout.

    A temporary experiment has only what git tracks. A link that a stage wrote while git tracked its target is broken
    there once git does not, and DVC hashes the link before the stage runs.
    """
    checkout = repo_root().resolve()
    for link in (*(locks / name for name in (*DIRECTORY_LINKS, *MODEL_LINKS)), *sorted((locks / FILE_LINKS).glob("*"))):
        if link.is_symlink() and not link.exists():
            place = Path(os.path.abspath(link.parent / os.readlink(link)))
            original = checkout / os.path.relpath(place, Path.cwd())
            if original.exists():
                watch(link, original)


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
        return not git_output("ls-files", "--others", "--", str(path))
    except (OSError, subprocess.CalledProcessError):
        return True


def git_output(*arguments: str) -> bytes:
    """What a git command prints.

    Raises:
        OSError, subprocess.CalledProcessError: there is no git, or no repository.
        UserError: git cannot read its index.
    """
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        return subprocess.run(["git", *arguments], capture_output=True, check=True, env=environment).stdout
    except subprocess.CalledProcessError as error:
        reason = os.fsdecode(error.stderr).strip()
        if "index" in reason:
            text = f"git: cannot read which files it tracks ({reason}); see `git status`, and repair the index"
            raise UserError(text) from None
        raise
