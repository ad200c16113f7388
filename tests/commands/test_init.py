"""`lean-finetune init`: a project in one's own directory, or one line and nothing written."""

import errno
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from dvc.repo import Repo

from lean_finetune.commands.init import init
from lean_finetune.commands.project import create, repository, write_all
from lean_finetune.commands.project.template import STAMP, installed_version, template_files, template_links
from lean_finetune.config.load import COMMON_PARAMS, load_params
from lean_finetune.core.signals import Interrupted
from stages.pin import main as pin
from tests.conftest import ROOT
from tests.processes import run_bounded
from tests.workspace import error, invoke

IDENTITY = ("-c", "user.name=test", "-c", "user.email=test@example.org")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory and a git without configuration."""
    place = tmp_path / "place"
    (tmp_path / "home").mkdir()
    place.mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    monkeypatch.setenv("EMAIL", "")
    monkeypatch.chdir(place)
    return place


@pytest.fixture
def no_dvc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip `dvc init`, for tests of other things: it takes most of the time."""
    monkeypatch.setattr(create, "start_dvc", lambda here, *_: (here / ".dvc").mkdir())


def tree(directory: Path) -> dict[str, str | None]:
    """Every path below a directory, with the content of files and the target of links; git's own are left out."""
    found: dict[str, str | None] = {}
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if ".git" not in path.relative_to(directory).parts and not name.startswith(".dvc/tmp"):
            text = path.read_text() if path.is_file() else None
            found[name] = os.readlink(path) if path.is_symlink() else text
    return found


def git(*arguments: str, cwd: str | Path = ".") -> str:
    return run_bounded(["git", *IDENTITY, *arguments], cwd=cwd, check=True).stdout


def test_a_new_directory_becomes_a_git_and_dvc_repository(home: Path, monkeypatch: pytest.MonkeyPatch):
    """A user of the installed package had to clone our repository to train."""
    monkeypatch.setenv("PATH", os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]))
    done = invoke(init, "my run")
    assert done.exit_code == 0 and done.stderr == ""
    lines = done.output.splitlines()
    assert lines[0] == f"my run: a new project of lean-finetune {installed_version()} (git init, dvc init)"
    assert lines[1:4] == [
        "next:",
        "  cd 'my run'",
        '  git config user.name "Your Name" && git config user.email you@example.org',
    ]
    assert lines[4] == '  git add . && git commit -m "Start a lean-finetune project"'
    assert lines[5].startswith("  dvc repro ") and len(lines) == 6
    made = tree(home / "my run")
    assert {name: made[name] for name in template_files()} == template_files()
    watched = {"locks/watched-data": "../data/raw/sample.jsonl"}
    assert {name: made[name] for name in template_links()} == {**template_links(), **watched}
    assert json.loads(str(made[STAMP]))["version"] == installed_version()
    assert "data/raw/sample.jsonl" in made and not [name for name in made if "partial" in name]
    with Repo(str(home / "my run")) as ours, Repo(str(ROOT)) as root:
        assert ours.config.load_one("repo") == root.config.load_one("repo")
    # `dvc repro` at once: rows that git neither tracks nor ignores are refused.
    assert {*template_files(), *template_links()} <= {*git("ls-files", cwd="my run").splitlines()}
    assert git("diff", "--name-only", cwd="my run") == "", "staged, then modified"
    git("add", ".", cwd="my run")
    git("commit", "-q", "-m", "Start", cwd="my run")
    assert git("status", "--short", cwd="my run") == ""
    with pytest.raises(AssertionError, match="unknown revision"):
        git("rev-parse", "HEAD~1", cwd="my run")  # The only commit is ours.
    assert "is a project already" in error(invoke(init, "my run"))


def test_an_existing_repository_keeps_its_files_and_gets_no_commit(home: Path):
    """Files that were overwritten, or work of the user's in a commit of ours."""
    git("init", "-q")
    (home / "README.md").write_text("Mine.\n")
    (home / ".gitignore").write_text("*.log\n.venv/")
    git("add", ".")
    git("commit", "-q", "-m", "mine")
    head = git("rev-parse", "HEAD")
    done = invoke(init, "sub/run")
    assert "(dvc init)" in done.output.splitlines()[0]
    assert (home / "sub/run/.dvc").is_dir() and not (home / "sub/run/.git").exists()
    done = invoke(init, ".")
    assert done.output.splitlines()[1:3] == [".gitignore: lines added", "README.md: yours is kept"]
    assert (home / "README.md").read_text() == "Mine.\n"
    ignored = (home / ".gitignore").read_text().splitlines()
    assert ignored[:2] == ["*.log", ".venv/"] and ignored.count(".venv/") == 1 and "/scratch/" in ignored
    assert git("rev-parse", "HEAD") == head
    [add] = [line for line in done.output.splitlines() if "git add" in line]
    assert "git add .dvc .dvcignore .gitignore data dvc.yaml locks params.yaml stages &&" in add
    assert "cd" not in done.output


def test_a_second_try_goes_on_where_a_killed_one_ended(home: Path, no_dvc):
    """A process that was killed between two renames left a directory that no command accepted."""
    invoke(init, "run")
    before = tree(home / "run")
    (home / "run" / STAMP).unlink()
    (home / "run/stages/train.py").unlink()
    assert invoke(init, "run").exit_code == 0
    assert tree(home / "run") == before


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("dvc.yaml", "run: has another project's dvc.yaml; name another directory"),
        ("params.yaml", "run: params.yaml would be overwritten; name another directory, or move them away"),
        ("stages/train.py", "run: stages/train.py would be overwritten"),
        ("locks/watched-data", "run: locks/watched-data would be overwritten"),
    ],
)
def test_nothing_of_the_users_is_overwritten(home: Path, no_dvc, name: str, says: str):
    (home / "run" / name).parent.mkdir(parents=True)
    (home / "run" / name).write_text("mine: true\n")
    before = tree(home)
    assert error(invoke(init, "run")).startswith(says)
    assert tree(home) == before and not (home / "run/.git").exists()


LINKS = (".gitignore", ".dvcignore", "data/.gitignore", "data", "stages", "locks")


@pytest.mark.parametrize(
    ("link", "to_nothing"), [*((link, False) for link in LINKS), (".dvcignore", True), ("README.md", True)]
)
def test_nothing_is_written_through_a_link_out_of_the_project(home: Path, no_dvc, link: str, to_nothing: bool):
    """Lines were added to the target of .gitignore, outside."""
    (home / "run" / link).parent.mkdir(parents=True)
    outside = home / "outside"
    if not to_nothing:
        outside.write_text("*.log\n") if "." in link else outside.mkdir()
    (home / "run" / link).symlink_to(outside)
    before = tree(home)
    line = error(invoke(init, "run"))
    assert f"run/{link}" in line and f": a link leads to {outside}" in line and "replace the link" in line
    assert tree(home) == before and not (home / "run/.git").exists()


def test_an_ignore_file_in_another_encoding_keeps_its_bytes(home: Path, no_dvc):
    """It was overwritten, and the user was told that lines were added."""
    (home / "run").mkdir()
    (home / "run/.gitignore").write_bytes(b"caf\xe9\n")
    assert ".gitignore: lines added" in invoke(init, "run").output
    assert (home / "run/.gitignore").read_bytes() == b"caf\xe9\n" + template_files()[".gitignore"].encode()


@pytest.mark.parametrize("existed", [True, False])
@pytest.mark.parametrize("fault", ["disk", "dvc", "git", "no git", "interrupt"])
def test_after_a_fault_all_is_as_before(home: Path, monkeypatch: pytest.MonkeyPatch, existed: bool, fault: str):
    """A half-written project, in which the next try is refused."""
    if existed:
        (home / "run/stages").mkdir(parents=True)
        (home / "run/.gitignore").write_text("*.log\n")
    before = tree(home)
    replace, calls = os.replace, iter(range(100))

    def fail(source: Any, target: Any) -> None:
        if next(calls) == 6:
            if fault == "interrupt":
                raise Interrupted(signal.SIGTERM)
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    if fault in ("disk", "interrupt"):
        monkeypatch.setattr(write_all.os, "replace", fail)
        monkeypatch.setattr(create, "start_dvc", lambda *_: None)
    elif fault == "dvc":
        (home / "exclude").write_text(".dvc\n")
        git("config", "--global", "core.excludesFile", str(home / "exclude"))
        before["exclude"] = ".dvc\n"
    else:
        program = 'echo "fatal: $1" >&2; test "$1" = rev-parse && echo "not a git repository" >&2; exit 128'
        (home.parent / "bin").mkdir()
        (home.parent / "bin/git").write_text(f"#!/bin/sh\n{program}\n")
        (home.parent / "bin/git").chmod(0o755)
        monkeypatch.setenv("PATH", str(home.parent / ("bin" if fault == "git" else "none")))
    says = {
        "disk": "run: cannot be written (No space left on device)",
        "dvc": "`dvc init` failed",
        "git": "`git init` failed (fatal: init)",
        "no git": "git: not found; install git",
    }
    if fault == "interrupt":
        assert invoke(init, "run").exit_code == 128 + signal.SIGTERM
    else:
        assert says[fault] in error(invoke(init, "run"))
    assert tree(home) == before and not (home / "run/.git").exists()


def test_paths_are_right_from_the_project(home: Path, no_dvc):
    """A path relative to another directory: the first stage does not find the rows."""
    for name in ("rows.jsonl", "in/mine/rows.jsonl"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text('{"text": "a"}\n')
    shutil.copytree(ROOT / "lean_finetune/tiny", home / "in/base")

    def written(directory: str, *options: str) -> tuple[str, str]:
        done = invoke(init, directory, *options)
        assert done.exit_code == 0, done.output
        params = load_params(home / directory / "params.yaml")
        return params.model.name, str(params.data.source)

    (home / "in/.git").mkdir()
    os.rename(home / "in/.git", home / "git")  # `in` is not empty, and no repository.
    assert written("in", "--data", "in/mine/*.jsonl", "--model", "in/base") == ("base", "mine/*.jsonl")
    assert not (home / "in/data/raw").exists()
    assert written("out", "--data", "rows.jsonl", "--model", "in/base") == (
        str(home / "in/base"),
        str(home / "rows.jsonl"),
    )
    assert written("hub", "--data", "hf://org/rows", "--model", "org/model") == ("org/model", "hf://org/rows")


@pytest.mark.parametrize("rows", ["../outside.jsonl", "run/own.jsonl", "run/parts/*.jsonl", None])
def test_a_first_run_changes_no_tracked_link(home: Path, no_dvc, monkeypatch: pytest.MonkeyPatch, rows: str | None):
    """Git shows `locks/watched-data` as modified after the run, and an experiment starts from a dirty tree."""
    (home / "run/parts").mkdir(parents=True)
    for path in (home.parent / "outside.jsonl", home / "run/own.jsonl", home / "run/parts/1.jsonl"):
        path.write_text('{"prompt": "a", "completion": "b"}\n')
    assert invoke(init, "run", *([] if rows is None else ["--data", rows])).exit_code == 0
    monkeypatch.chdir(home / "run")
    git("add", ".")
    git("commit", "-qm", "start")
    assert invoke(pin, "data").exit_code == 0 and invoke(pin, "model").exit_code == 0
    assert git("status", "--porcelain", "--untracked-files=no") == ""
    assert os.readlink("locks/watched-data") != "README.md"


@pytest.mark.parametrize(
    ("row", "note"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "a preference pair (["),
        ({"prompt": "a", "completion": "b", "label": False}, "'label' is false: the answer is one to avoid; set"),
        ({"prompt": "a", "completion": "b"}, None),
        ({"what": 1}, None),
    ],
)
def test_rows_of_another_objective_are_named(home: Path, no_dvc, row: dict[str, Any], note):
    """The first run said so, after all was committed."""
    (home / "rows.jsonl").write_text(json.dumps(row) + "\n")
    done = invoke(init, "run", "--data", "rows.jsonl")
    found = [line for line in done.output.splitlines() if line.startswith("note: ") and "gated" not in line]
    assert done.exit_code == 0 and len(found) == (note is not None), done.output
    assert note is None or (f"rows.jsonl:1: {note}" in found[0] and "set train.objective=" in found[0])


def test_options_set_their_parameters_alone(home: Path, no_dvc):
    """An option that is not in the file, or a comment that is lost."""
    lines = template_files()["params.yaml"].splitlines()
    assert invoke(init, "a", "--gpu", "T4", "--method", "lora").exit_code == 0
    mine = (home / "a/params.yaml").read_text().splitlines()
    assert [line.strip() for line, old in zip(mine, lines, strict=True) if line != old] == ["gpu: T4", "method: lora"]
    done = invoke(init, "b", "--model", "meta-llama/Llama-3.1-8B", "--gpu", "L4")
    gated = (
        "note: meta-llama/Llama-3.1-8B is gated on the hub: accept its licence at https://huggingface.co/meta-llama/"
    )
    assert gated in done.output and "`hf auth login`; or name a local directory" in done.output
    done = invoke(init, "c", "--model", "Qwen/Qwen3-8B", "--gpu", "RTX-4090")
    assert "gated" not in done.output and done.output.index("  lean-finetune plan ") < done.output.index("  git add")
    usual, ours = load_params(COMMON_PARAMS), load_params(home / "c/params.yaml")
    assert ours.train == usual.train and ours.bucket == usual.bucket, "another run than the one that `fit` predicts"


@pytest.mark.parametrize(
    ("options", "says", "code"),
    [
        ([], "DIRECTORY: is missing; name one, or . for this one", 2),
        (["file"], "file: is a file; name a directory", 1),
        (["run", "--preset", "8b-qlora-24gb"], "No such option", 2),
        (
            ["run", "--data", "none.jsonl"],
            "--data: must be a file, a glob, a directory or hf:",
            1,
        ),
        (["run", "--model", "no model"], "model.name: must be a hub id", 1),
        (["run", "--model", "llama-3.1-8b"], "--model: llama-3.1-8b is a configuration without weights", 1),
        (["run", "--gpu", "RTX-9999"], "hardware.gpu: ", 2),
        (["run", "--gpu", "8MiB"], "hardware.gpu: ", 2),
        (["run", "--data", "hf://rows"], "--data: a hub data set is hf://org/name; got 'hf://rows'", 2),
        (["run", "--data", "*"], "--data: DVC would watch all of ", 1),
        ([""], "DIRECTORY: is missing; name one, or . for this one", 2),
        (["run", "--method", "dora"], "--method", 2),
        (["hidden/run"], "hidden/run: the git repository", 1),
    ],
)
def test_a_wrong_call_writes_nothing(home: Path, no_dvc, options: list[str], says: str, code: int):
    (home / "file").write_text("")
    git("init", "-q")
    (home / ".gitignore").write_text("hidden/\n")
    before = tree(home)
    assert says in error(invoke(init, *options), code)
    assert tree(home) == before


def test_a_directory_without_rights_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(write_all.Path, "mkdir", refuse)
    assert error(invoke(init, "run")) == (
        "run: cannot be written (Permission denied); change permissions or write elsewhere, then rerun"
    )
    assert repository.enclosing_repository(home) is None


def test_a_project_for_ones_own_model_has_defaults_that_the_rows_decide(home: Path):
    """Steps of 2,048 tokens and answers of 64, as the toy has them; the toy keeps its numbers."""
    own, toy = (home / "params.yaml", home / "toy.yaml")
    own.write_text(create.params_text(home, create.Choices(model="org/model")))
    toy.write_text(create.params_text(home, create.Choices()))
    p, tiny = load_params(own), load_params(toy)
    assert (p.train.tokens_per_step, p.train.heldout_every_steps, p.evaluate.max_new_tokens) == ("auto", "auto", None)
    assert (tiny.train.tokens_per_step, tiny.train.heldout_every_steps, tiny.evaluate.max_new_tokens) == (2048, 50, 64)
    (home / "rows.jsonl").write_text("{}\n")
    own.write_text(create.params_text(home, create.Choices(model="tiny", data="rows.jsonl")))
    p = load_params(own)
    assert (p.train.tokens_per_step, p.train.heldout_every_steps, p.evaluate.max_new_tokens) == ("auto", "auto", None)
    assert {p.evaluate.loss_rows, tiny.evaluate.loss_rows} == {2000}
