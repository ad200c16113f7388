"""Git and DVC in the directory of a project."""

import logging
import os
import subprocess
from contextlib import ExitStack
from pathlib import Path

from lean_finetune.commands.project.write_all import remove_tree
from lean_finetune.core.errors import UserError

AS_NAME = "surrogateescape"
"""How git's output is read: names of files may be in any encoding."""
SETTINGS = {
    "core": {"analytics": "false", "check_update": "false", "autostage": "true"},
    "cache": {"type": "reflink,hardlink,symlink,copy"},
}
"""Of .dvc/config: nothing is sent, and outputs and cache share their bytes where the file system can."""


def git(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run git in a directory. Raises UserError if there is no git."""
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        return subprocess.run(
            ["git", *arguments], cwd=directory, env=environment, capture_output=True, encoding="utf-8", errors=AS_NAME
        )
    except FileNotFoundError:
        raise UserError("git: not found; install git, whose commits DVC's experiments are") from None


def _reason(output: str) -> str:
    """The line of git's or DVC's output that says why it failed."""
    lines = output.strip().splitlines()
    return next((line for line in lines if line.startswith(("fatal: ", "error: "))), lines[0] if lines else "")


def enclosing_repository(directory: Path) -> Path | None:
    """The root of the git repository that a directory is in, or would be in; None if there is none.

    Raises UserError if there is no git, it refuses the repository, or the repository ignores the directory.
    """
    inside = next(path for path in (directory, *directory.parents) if path.is_dir())
    found = git(inside, "rev-parse", "--show-toplevel")
    if found.returncode:
        if "not a git repository" in found.stderr:
            return None
        raise UserError(f"{directory}: git refuses it ({_reason(found.stderr)}); correct that")
    root = Path(found.stdout.rstrip("\n"))
    if directory != root and git(root, "check-ignore", "-q", str(directory)).returncode == 0:
        raise UserError(
            f"{directory}: the git repository {root} ignores it; name another directory, or change .gitignore"
        )
    return root


def has_identity(directory: Path) -> bool:
    """Whether git knows who commits."""
    return git(directory, "var", "GIT_COMMITTER_IDENT").returncode == 0


def start_git(directory: Path, undo: ExitStack) -> None:
    """Make a directory a git repository. Raises UserError with git's reason."""
    undo.callback(remove_tree, directory / ".git")
    done = git(directory, "init", "--quiet")
    if done.returncode:
        raise UserError(f"{directory}: `git init` failed ({_reason(done.stderr)}); correct that")


def start_dvc(directory: Path, repository: Path, undo: ExitStack) -> None:
    """Make a directory of a git repository a DVC repository, with our settings. DVC stages its files in git."""
    from dvc.repo import Repo

    staged = [".dvc"] if (directory / ".dvcignore").exists() else [".dvc", ".dvcignore"]
    undo.callback(git, directory, "rm", "-r", "--cached", "--quiet", "--ignore-unmatch", *staged)
    undo.callback(remove_tree, directory / ".dvc")
    if ".dvcignore" in staged:
        undo.callback((directory / ".dvcignore").unlink, missing_ok=True)
    logging.getLogger("dvc").setLevel(logging.WARNING)  # Its own lines would come between ours.
    try:
        with Repo.init(str(directory), subdir=directory != repository) as repo, repo.config.edit("repo") as config:
            for section, values in SETTINGS.items():
                config.setdefault(section, {}).update(values)
        git(directory, "add", "--", ".dvc/config")  # As it is now: DVC has staged it without the settings.
    except Exception as error:  # Of DVC, or of the libraries by which it reads git: a broken or locked index.
        raise UserError(
            f"{directory}: `dvc init` failed ({type(error).__name__}: {_reason(str(error))}); correct that, and try "
            "`git status`"
        ) from error


def stage_files(directory: Path, names: list[str], undo: ExitStack) -> None:
    """Add new files to git's index; nothing is committed. Raises UserError with git's reason."""
    undo.callback(git, directory, "rm", "--cached", "--quiet", "--ignore-unmatch", "--", *names)
    done = git(directory, "add", "--", *names)
    if done.returncode:
        raise UserError(f"{directory}: `git add` failed ({_reason(done.stderr)}); correct that")
