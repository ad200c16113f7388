"""Where `run` makes a project, and the first commit of a repository that it made."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cuda_memory.user_paths import shell_line
from lean_finetune.commands.project.create import Choices, chosen_values, new_project
from lean_finetune.commands.project.params_file import change_params
from lean_finetune.commands.project.repository import enclosing_repository, git, has_identity
from lean_finetune.commands.project.template import template_files, template_links
from lean_finetune.commands.run.shown import Shown
from lean_finetune.config.load import PARAMS_FILE
from lean_finetune.core.atomic_files import rewrite_text
from lean_finetune.core.errors import UserError
from lean_finetune.core.file_names import refuse_link_out
from lean_finetune.core.read_yaml import parse_yaml

PIPELINE = Path("dvc.yaml")
OURS = ("user.name=lean-finetune", "user.email=lean-finetune@localhost")
"""Who commits if git does not know the user."""
TO_COMMIT = "lean-finetune"
"""File in .git of a repository that `run` made, until its first commit: the paths for that."""
RESULTS = ("dvc.lock", "locks", "metrics", PARAMS_FILE.name)
"""What planning and the stages write of what git tracks."""


def is_project(directory: Path) -> bool:
    """Whether the pipeline can run in a directory. The links are the last that a new project gets."""
    files = (directory / PIPELINE).is_file() and (directory / PARAMS_FILE).is_file()
    return files and all(os.path.lexists(directory / name) for name in template_links())


def refuse_place(directory: Path, *, named: bool) -> None:
    """Raise UserError for a directory in which nobody wants a project; `named`: the user asks for one there."""
    here = Path(os.path.realpath(directory))
    home = Path(os.path.realpath(Path.home()))
    if here == home or here in home.parents:
        raise UserError(f"{directory}: your home directory, or one around it, is no place for a project; name another")
    if outer := next((parent for parent in here.parents if is_project(parent)), None):
        raise UserError(f"{directory}: is inside of the project {outer}; run there, or name another directory")
    if not named and here.is_dir() and any(here.iterdir()):
        raise UserError(
            f"{directory}: has files, and is no project; name a directory for the tiny sample, or --model and --data"
        )


@contextmanager
def made_project(directory: Path, choices: Choices, shown: Shown) -> Iterator[None]:
    """Make a project. If the block raises an exception, all is undone."""
    makes_git = enclosing_repository(Path(os.path.abspath(directory))) is None
    with new_project(directory, choices) as (lines, _):
        if makes_git:
            _prepare_commit(directory)
        yield
        shown.event("project", *lines, directory=str(directory), lines=lines)


def _prepare_commit(directory: Path) -> None:
    """Track rows in the directory, keep a model there out of git, and note what the first commit has."""
    values = parse_yaml((directory / PARAMS_FILE).read_text(encoding="utf-8"))
    source, model = values["data"]["source"], values["model"]["name"]
    paths = sorted({*(name.partition("/")[0] for name in template_files()), *RESULTS})
    if (
        isinstance(source, str)
        and not Path(source).is_absolute()
        and git(directory, "add", "--", source).returncode == 0
    ):
        paths.append(source)
    if not Path(model).is_absolute() and os.path.isdir(directory / model):
        exclude = directory / ".git/info/exclude"
        exclude.parent.mkdir(exist_ok=True)
        with exclude.open("a", encoding="utf-8") as file:
            file.write(f"/{model}/\n")
    (directory / ".git" / TO_COMMIT).write_text("\n".join(paths), encoding="utf-8")


def commit_first(shown: Shown) -> None:
    """Commit the project in the working directory if `run` made its repository and nobody has committed there."""
    listed = Path(".git") / TO_COMMIT
    if not listed.is_file():
        return
    here = Path()
    if git(here, "rev-parse", "--verify", "--quiet", "HEAD").returncode:
        git(here, "add", "--", *RESULTS)
        paths = listed.read_text(encoding="utf-8").split("\n")
        paths = [path for path in paths if git(here, "ls-files", "--", path).stdout]
        identity = [] if has_identity(here) else [word for value in OURS for word in ("-c", value)]
        # No key may be asked for, and no hook of other projects run.
        options = [*identity, "-c", "commit.gpgsign=false", "-c", "core.hooksPath=/dev/null"]
        done = git(here, *options, "commit", "--quiet", "-m", "Start a lean-finetune project", "--", *paths)
        if done.returncode:
            reason = (done.stderr.strip() or done.stdout.strip() or "no reason given").splitlines()[-1]
            shown.event("note", f"note: `git commit` failed ({reason}); experiments start from a commit", text=reason)
            return
        commit = git(here, "rev-parse", "HEAD").stdout.strip()
        shown.event("commit", f"git: the first commit, {commit[:7]}, has the project and its figures", commit=commit)
    listed.unlink()


def commit_command(here: Path) -> str | None:
    """The command that commits a project of which the last commit has no pipeline; None if it has one."""
    if git(here, "cat-file", "-e", f"HEAD:./{PIPELINE}").returncode == 0:
        return None
    names = sorted({*(name.partition("/")[0] for name in template_files()), *RESULTS, ".dvc"})
    words = ["git", "add", *(name for name in names if os.path.lexists(here / name))]
    return f'{shell_line(words)} && git commit -m "Start a lean-finetune project"'


@contextmanager
def changed_project(directory: Path, choices: Choices, shown: Shown) -> Iterator[None]:
    """Write what the user chose into params.yaml. If the block raises an exception, the file is put back."""
    params = directory / PARAMS_FILE
    refuse_link_out(directory, params)
    before = params.read_text(encoding="utf-8")
    changed = change_params(chosen_values(Path(os.path.abspath(directory)), choices), params, params)
    if changed:
        lines = (f"  {key}: {'' if value is None else value}" for key, value in changed.items())
        shown.event("parameters", f"{params}: changed", *lines, changed=changed)
    try:
        yield
    except BaseException:
        if changed:
            rewrite_text(params, before)
        raise
