"""`lean-finetune run`: from rows to a trained model in one command, or one line and nothing written."""

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import termios
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lean_finetune.commands.choose import plan_project
from lean_finetune.commands.choose.plan_project import Planned, is_unplanned
from lean_finetune.commands.project.create import Choices
from lean_finetune.commands.project.params_file import change_params
from lean_finetune.commands.run import place as places
from lean_finetune.commands.run.place import OURS, changed_project, commit_first, made_project
from lean_finetune.commands.run.run import _plan_if_needed, run
from lean_finetune.commands.run.shown import Shown
from lean_finetune.config.load import PARAMS_FILE, load_params
from lean_finetune.core.errors import UserError
from tests.conftest import ROOT
from tests.json_answers import check_event
from tests.processes import TIMEOUT_SECONDS, killed_after, run_bounded, wait_for
from tests.small_model import save_small_llama
from tests.workspace import error, invoke

IDENTITY = ("-c", "user.name=test", "-c", "user.email=test@example.org")
SAMPLE = ROOT / "data/raw/sample.jsonl"
SHOWN = Shown(as_json=False)


def git(*arguments: str, cwd: Path | str = ".") -> str:
    return run_bounded(["git", *IDENTITY, *arguments], cwd=cwd, check=True).stdout


def paths(directory: Path) -> set[str]:
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*")}


# One line, and nothing written.


@pytest.mark.parametrize(
    ("arguments", "says", "code"),
    [
        (["new", "--set", "train.epoch=3"], "--set: train.epoch: unknown parameter; did you mean train.epochs?", 2),
        (["new", "--set", "learning_rate=3"], "learning_rate: unknown parameter; its name here is train.lr", 2),
        (["new", "--set", "train.epochs"], "train.epochs: must be key=value", 2),
        (["new", "--set", "train.epochs=x"], "train.epochs: must be", 2),
        (["new", "--model", "tiny", "--set", "model.name=x"], "model.name: is given by --set and by an option", 2),
        (["new", "--gpu", "RTX-9999"], "RTX-9999", 2),
        (["new", "--method", "lora2"], "'--method'", 2),
        (["new", "--data", "none.jsonl"], "--data: must be a file, a glob, a directory", 1),
        (["new", "--model", "none/at/all"], "none/at/all", 1),
        (["new", "--set", "train.grad_ckpt_policy=selective"], "train.grad_ckpt", 1),
        (["rows.jsonl", "--model", "tiny"], "rows.jsonl: is a file; name a directory", 1),
        ([], ".: has files, and is no project; name a directory for the tiny sample, or --model and --data", 1),
        (["/", "--model", "tiny"], "/: your home directory, or one around it, is no place for a project", 1),
        (["~home", "--model", "tiny"], "is no place for a project", 1),
    ],
)
def test_what_is_wrong_is_one_line_and_nothing_is_written(home: Path, arguments: list[str], says: str, code: int):
    (home / "rows.jsonl").write_text("{}\n")
    arguments = [os.environ["HOME"] if word == "~home" else word for word in arguments]
    before = paths(home.parent)
    assert says in error(invoke(run, *arguments), code)
    assert paths(home.parent) == before


def test_a_directory_of_a_project_becomes_no_project(home: Path):
    """A second project, in data/ of the first, whose stages watch it."""
    with made_project(Path("p"), Choices(), SHOWN):
        pass
    before = paths(home)
    os.chdir("p/data")
    assert "is inside of the project" in error(invoke(run, "--model", "tiny"))
    assert paths(home) == before


def test_a_new_project_in_which_planning_fails_is_undone(home: Path):
    """A half-made project: the next call would take other parameters than it is told."""
    (home / "rows.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="x"), made_project(Path(), Choices(data="rows.jsonl"), SHOWN):
        assert Path(PARAMS_FILE).is_file() and Path(".git").is_dir()
        raise UserError("x")
    assert paths(home) == {"rows.jsonl"}
    with pytest.raises(UserError, match="x"), made_project(Path("a/b"), Choices(), SHOWN):
        raise UserError("x")
    assert paths(home) == {"rows.jsonl"}


# What a second call does.


def test_options_of_a_later_call_change_params_yaml(home: Path, capsys: pytest.CaptureFixture[str]):
    with made_project(Path("p"), Choices(), SHOWN):
        pass
    before = (home / "p" / PARAMS_FILE).read_text()
    (home / "p/rows.jsonl").write_text("{}\n")
    capsys.readouterr()
    choices = Choices(data="p/rows.jsonl", gpu="T4", sets={"train": {"lora": {"rank": 8}}})
    with changed_project(Path("p"), choices, SHOWN):
        pass
    lines = ["p/params.yaml: changed", "  data.source: rows.jsonl", "  hardware.gpu: T4", "  train.lora.rank: 8"]
    assert capsys.readouterr().out.splitlines() == lines
    after = (home / "p" / PARAMS_FILE).read_text()
    assert len(set(before.splitlines()) ^ set(after.splitlines())) == 6, "comments stay"
    with changed_project(Path("p"), choices, SHOWN):
        pass
    assert capsys.readouterr().out == "", "the same command after a kill"
    with pytest.raises(UserError, match="x"), changed_project(Path("p"), Choices(gpu="H100"), SHOWN):
        raise UserError("x")
    assert (home / "p" / PARAMS_FILE).read_text() == after


def test_only_parameters_that_nobody_chose_are_planned(home: Path):
    """A plan that replaces the user's own switches; defaults that are not planned."""
    (home / "rows.jsonl").write_text("{}\n")
    model = save_small_llama(home / "model")
    for choices, unplanned in (
        (Choices(), False),
        (Choices(data="rows.jsonl"), True),
        (Choices(model=str(model), data="rows.jsonl", method="lora"), True),
        (Choices(data="rows.jsonl", sets={"train": {"epochs": 3, "lr": 0.1}}), True),
        (Choices(data="rows.jsonl", sets={"train": {"grad_ckpt": True}}), False),
    ):
        with made_project(Path("p"), choices, SHOWN):
            os.chdir("p")
            assert is_unplanned(["train.method"]) == unplanned, choices
            if choices.model is not None:
                change_params({"train": {"grad_ckpt": False}}, PARAMS_FILE, PARAMS_FILE)
                assert not is_unplanned(["train.method"])
        os.chdir("..")
        shutil.rmtree("p")
    with made_project(Path("p"), Choices(data="rows.jsonl", sets={"train": {"grad_ckpt": True}}), SHOWN):
        os.chdir("p")
        assert is_unplanned(["train.grad_ckpt"]), "that of --set stays as it is while the rest is planned"


# The first commit.


def made(directory: str) -> None:
    """A project in the working directory from here on, with what a run writes."""
    with made_project(Path(directory), Choices(data="rows/mine.jsonl"), SHOWN):
        pass
    os.chdir(directory)
    Path("metrics").mkdir(exist_ok=True)
    Path("metrics/train.json").write_text("{}\n")
    Path("dvc.lock").write_text("{}\n")
    change_params({"seed": 5}, PARAMS_FILE, PARAMS_FILE)


@pytest.fixture
def rows(home: Path) -> Path:
    (home / "rows").mkdir()
    (home / "rows/mine.jsonl").write_text("{}\n")
    return home


def test_the_first_commit_has_the_project_its_figures_and_nothing_else(rows: Path):
    """Another tool's files in the directory, or those that the user staged, in a commit of ours."""
    (rows / "secret.txt").write_text("mine\n")
    made(".")
    (rows / "staged.txt").write_text("mine\n")
    git("add", "staged.txt")
    commit_first(SHOWN)
    assert git("log", "--format=%an <%ae>").splitlines() == ["lean-finetune <lean-finetune@localhost>"]
    tracked = set(git("ls-tree", "-r", "--name-only", "HEAD").splitlines())
    assert {"params.yaml", "dvc.yaml", "dvc.lock", "metrics/train.json", "rows/mine.jsonl", ".dvc/config"} <= tracked
    assert not {"secret.txt", "staged.txt"} & tracked
    assert git("status", "--short").splitlines() == ["A  staged.txt", "?? secret.txt"]
    commit_first(SHOWN)
    assert len(git("log", "--format=%h").splitlines()) == 1, "it commits once"


def test_an_identity_of_the_users_is_used(rows: Path):
    git("config", "--global", "user.name", "Ada")
    git("config", "--global", "user.email", "ada@example.org")
    made(".")
    commit_first(SHOWN)
    assert git("log", "--format=%an <%ae>").splitlines() == ["Ada <ada@example.org>"]


@pytest.mark.parametrize("commits", [0, 1])
def test_no_commit_is_made_in_a_repository_of_the_users(rows: Path, commits: int):
    git("init", "-q")
    for _ in range(commits):
        git("commit", "-q", "--allow-empty", "-m", "mine")
    made("sub")
    commit_first(SHOWN)
    assert len(git("rev-list", "--all").splitlines()) == commits


def test_no_commit_is_added_to_the_users_first_one(rows: Path):
    """The user committed between a call that was killed and the next."""
    made(".")
    git("commit", "-q", "-m", "mine")
    commit_first(SHOWN)
    assert git("log", "--format=%s").splitlines() == ["mine"]


def test_a_refused_commit_is_a_note(rows: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    made(".")
    (rows / ".git/index.lock").touch()
    commit_first(SHOWN)
    note = capsys.readouterr().out.splitlines()[-1]
    assert note.startswith("note: `git commit` failed (") and note.endswith("experiments start from a commit")
    assert OURS[0].startswith("user.name=") and places.TO_COMMIT in os.listdir(".git"), "the next call tries again"


def test_events_have_all_their_fields(rows: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Those that no other test prints as JSON: a script waits for a field that the page for scripts promises."""
    planned = Planned(words="qlora", device="T4", peak_bytes=1, usable_bytes=2, changed={"train.grad_ckpt": True})
    monkeypatch.setattr(plan_project, "plan_project", lambda sets: planned)
    with Shown(as_json=True) as shown:
        with made_project(Path("p"), Choices(data="rows/mine.jsonl"), shown):
            os.chdir("p")
            _plan_if_needed([], [], shown)
            os.chdir("..")
        os.chdir("p")
        commit_first(shown)
        with changed_project(Path(), Choices(gpu="T4"), shown):
            pass
    events = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [event["event"] for event in events] == ["planning", "plan", "project", "commit", "parameters"]
    for event in events:
        check_event(event)


# Whole runs.

SMALL = {
    "data.max_rows": 60,
    "data.max_length": 128,
    "data.heldout_fraction": 0.1,
    "train.tokens_per_step": 256,
    "train.epochs": 2,
    "evaluate.generate_rows": 4,
    "evaluate.max_new_tokens": 8,
    "run.cpu_threads": 1,
    "run.checkpoint_seconds": 0.05,
}
SETS = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
COMMAND = [sys.executable, "-m", "lean_finetune", "run"]
LOSS = re.compile(r"held-out loss  [\d.]+ before training, [\d.]+ after")


@dataclass(frozen=True)
class User:
    """A directory with rows, and a user without git identity whose PATH lacks this environment's python."""

    place: Path
    environment: dict[str, str]

    def run(self, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = run_bounded([*COMMAND, *arguments], cwd=self.place, env=self.environment)
        assert done.returncode == code, done.stdout + done.stderr
        return done


@pytest.fixture
def user(home: Path) -> User:
    shutil.copy(SAMPLE, home / "rows.jsonl")
    names = {"HOME": os.environ["HOME"], "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "GIT_CONFIG_NOSYSTEM": "1"}
    return User(home, {**names, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})


def stages(output: str) -> list[str]:
    """The stages that ran, in order."""
    return re.findall(r"^\[\d+/10\] (\w+): ", output, flags=re.MULTILINE)


ALL = [
    "pin_code",
    "pin_data",
    "pin_model",
    "tokenize",
    "bucket",
    "estimate",
    "reference",
    "train",
    "evaluate",
    "report",
]


@pytest.mark.slow
def test_one_command_from_rows_to_a_report_also_after_a_kill(user: User, tmp_path: Path):
    """The killed command begins anew, the second call plans or commits again, or reruns what did not change."""
    command = [*COMMAND, "--model", "tiny", "--data", "rows.jsonl", *SETS]
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(
            command, cwd=user.place, env=user.environment, stdout=log, stderr=log, start_new_session=True
        )
        with killed_after(process):
            wait_for(lambda: list(user.place.glob("scratch/train/*/step-*")), process)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(TIMEOUT_SECONDS)
    first = (tmp_path / "log").read_text()
    assert "plan: " in first and stages(first) == ALL[:8]
    assert git("status", "--short", cwd=user.place), "nothing is committed yet"
    second = user.run("--model", "tiny", "--data", "rows.jsonl", *SETS)
    assert "plan: " not in second.stdout and "changed" not in second.stdout
    assert stages(second.stdout) == ["pin_code", "train", "evaluate", "report"]
    assert "train: resumed at optimizer step" in second.stderr, f"{first}\n{second.stdout}\n{second.stderr}"
    assert LOSS.search(second.stdout) and second.stdout.count("before (") + second.stdout.count("before  ") == 3
    assert "lean-finetune compare" in second.stdout and "data/report/report.html" in second.stdout
    assert not re.search(
        r"dvc push|lock file|To track|Running stage|WARNING|had been killed", second.stdout + second.stderr
    )
    assert git("status", "--short", cwd=user.place) == "", "one commit with the figures: a baseline"
    assert len(git("log", "--format=%h", cwd=user.place).splitlines()) == 1

    third = user.run("--set", "evaluate.loss_rows=3")
    assert stages(third.stdout) == ["pin_code", "evaluate", "report"]
    assert "params.yaml: changed" in third.stdout
    fourth = user.run("--json")
    events = [json.loads(line) for line in fourth.stdout.splitlines()]
    for event in events:
        check_event(event)
    assert [one["event"] for one in events] == ["stage", "stage_end", "up_to_date", "end"]
    measured = json.loads((user.place / "metrics/train.json").read_text())["peak_gib_measured"]
    assert events[-1]["peak_bytes_measured"] / 2**30 == pytest.approx(measured) and len(events[-1]["answers"]) == 3
    assert len(git("log", "--format=%h", cwd=user.place).splitlines()) == 1


@pytest.mark.slow
def test_a_terminal_sees_bars_and_ctrl_c_ends_in_one_line(user: User):
    """In a repository of the user's, which gets no commit; the tiny sample needs no option but a directory."""
    git("init", "-q", cwd=user.place)
    git("commit", "-q", "--allow-empty", "-m", "mine", cwd=user.place)
    pid, terminal = pty.fork()
    if pid == 0:  # The child, whose terminal is the other end.
        os.chdir(user.place)
        os.execve(sys.executable, [*COMMAND, "sub", *SETS], {**user.environment, "TERM": "xterm"})
    termios.tcsetwinsize(terminal, (24, 100))
    output, until = b"", time.monotonic() + TIMEOUT_SECONDS
    sent = False
    while time.monotonic() < until:
        try:
            part = os.read(terminal, 1 << 16)
        except OSError:  # The terminal's other end is closed.
            break
        if not part:
            break
        output += part
        if not sent and list(user.place.glob("sub/scratch/train/*/step-*")):
            os.write(terminal, b"\x03")
            sent = True
    _, status = os.waitpid(pid, 0)
    text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", output.decode()).replace("\r\n", "\n")
    assert sent and os.waitstatus_to_exitcode(status) == 130, text
    assert "\r" in text and "tok/s" in text and stages(text.replace("\r", "\n"))[-1] == "train", text
    assert "train: stopped by SIGINT; the checkpoint of optimizer step" in text and "Traceback" not in text
    assert not re.search(r"Committing|memory://|file/s|Running stage", text), text
    assert git("log", "--format=%s", cwd=user.place).splitlines() == ["mine"]


@pytest.mark.slow
def test_nothing_fits_is_one_line_and_leaves_nothing(user: User):
    before = paths(user.place)
    done = user.run("--model", "tiny", "--data", "rows.jsonl", "--gpu", "526MiB", code=3)
    assert done.stderr.startswith("error: hardware.gpu: nothing fits") and done.stderr.count("\n") == 1
    assert paths(user.place) == before


def test_values_are_read_as_those_of_params_yaml(home: Path, monkeypatch: pytest.MonkeyPatch):
    """--set data.columns={prompt: question} as a text, or a blank value as one."""
    with made_project(Path("p"), Choices(), SHOWN):
        pass
    from lean_finetune.commands.run.run import _values

    values: Any = _values(["data.columns={prompt: q}", "data.max_rows=", "train.lr=1e-4"], home / "p" / PARAMS_FILE)
    assert values == {"data": {"columns": {"prompt": "q"}, "max_rows": None}, "train": {"lr": 1e-4}}
    with changed_project(Path("p"), Choices(sets=values), SHOWN):
        pass
    assert load_params(home / "p" / PARAMS_FILE).train.lr == 1e-4
