"""`lean-finetune exp`, which checks -S before DVC does, and `compare`, a table that fits a terminal."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lean_finetune.cli import main
from lean_finetune.commands.project.create import Choices
from lean_finetune.commands.run import experiments
from lean_finetune.commands.run.experiments import compare, exp
from lean_finetune.commands.run.place import made_project
from lean_finetune.commands.run.shown import Shown
from lean_finetune.report.compare_experiments import own_rows
from tests.commands.run.test_run import IDENTITY, git
from tests.json_answers import check_answer
from tests.processes import run_bounded
from tests.report.test_compare_experiments import experiment, revision
from tests.workspace import error, invoke

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Of DVC's libraries.


@pytest.fixture
def project(home: Path) -> Path:
    """A new project with a commit, in which the test runs."""
    with made_project(Path("p"), Choices(), Shown(as_json=False)):
        pass
    os.chdir("p")
    git("commit", "-q", "-m", "start")
    return home / "p"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "-S", "train.epoch=3"], "-S: train.epoch: unknown parameter; did you mean train.epochs?"),
        (["run", "--queue", "--set-param=trian.lr=1"], "trian: unknown parameter; did you mean train?"),
        (["run", "-Slearning_rate=3"], "its name here is train.lr"),
        (["run", "-S", "seed=3", "--set-param", "params.yaml:train.lora.rnk=1"], "train.lora.rank?"),
        (["run", "-S", "+train.epoch=3"], "did you mean train.epochs?"),
        (["run", "-S", "~train.epoch"], "did you mean train.epochs?"),
    ],
)
def test_an_unknown_parameter_of_an_experiment_is_one_line(project: Path, arguments: list[str], says: str):
    """DVC's answer is "use +train.epoch=3", which adds a parameter that no stage knows."""
    before = (project / "params.yaml").read_text()
    assert says in error(invoke(exp, *arguments), 2)
    assert (project / "params.yaml").read_text() == before


def test_all_else_is_dvcs(project: Path, monkeypatch: pytest.MonkeyPatch):
    called: list[Any] = []
    monkeypatch.setattr(os, "execv", lambda program, words: called.append(words[1:]))
    words = [
        "run",
        "--queue",
        "-S",
        "train.lora.rank=4,8",
        "-S",
        "other.yaml:any=1",
        "-S",
        "data.columns.prompt=q",
        "-n",
        "x",
    ]
    assert invoke(exp, *words).exit_code == 0
    assert called == [["-m", "dvc", "exp", *words]]


def test_outside_of_a_project_both_are_one_line(home: Path):
    for command in (exp, compare):
        assert "here is no project; run in a project's directory" in error(invoke(command))


def test_names_of_other_tools_name_ours():
    """`lean-finetune train`, the first command of every other tool."""
    for wrong, right in (
        ("train", "run"),
        ("finetune", "run"),
        ("repro", "run"),
        ("cmpare", "compare"),
        ("fitt", "fit"),
    ):
        answer = CliRunner().invoke(main, [wrong, "--model", "x"], prog_name="lean-finetune")
        assert answer.exit_code == 2 and answer.stderr.count("\n") == 1
        assert f"No such command '{wrong}'; did you mean `lean-finetune {right}`?" in answer.stderr
    assert "did you mean" not in CliRunner().invoke(main, ["xyzzy"]).stderr


COMMITS = [
    revision("workspace"),
    {
        **revision("c0ffee"),
        "experiments": [
            experiment("tidal-mint", loss=0.25, train={"lora": {"rank": 8}}, seed=18),
            experiment("a-name-of-many-many-characters", train={"lora": {"rank": 4096}}, data={"max_rows": "x" * 90}),
            experiment("gone", "failed", seed=19),
            *(experiment(f"queue-{number}", "queued", seed=number) for number in range(200)),
        ],
    },
]


@pytest.mark.parametrize("columns", ["80", "100", "200"])
def test_the_table_fits_the_terminal(project: Path, monkeypatch: pytest.MonkeyPatch, columns: str):
    """`dvc exp show --only-changed` has 53 columns, many of them hashes."""
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(experiments, "_commits", lambda: COMMITS)
    monkeypatch.setattr(experiments, "own_rows", lambda commits: own_rows_of_all(commits))
    done = invoke(compare)
    lines = done.output.splitlines()
    assert max(map(len, lines[:-2])) <= int(columns), done.output
    titles = ["experiment", "state", "predicted", "measured", "tok/s", "loss", "change", "exact", "%", "changed"]
    assert (lines[0] if columns == "200" else f"{lines[0]} {lines[1]}").split() == titles
    rows = {line.split()[0]: line.split() for line in lines[1:] if not line.startswith(" ")}
    assert rows["baseline"] == ["baseline", "0.05074", "0.05", "4000", "0.5", "+0", "43.12"]
    assert rows["tidal-mint"][1:7] == ["0.05074", "0.05", "4000", "0.25", "-0.25", "43.12"]
    assert "train.lora.rank=8" in done.output and "seed=18" in done.output
    assert rows["gone"][:2] == ["gone", "failed"] and rows["queue-199"][:2] == ["queue-199", "queued"]
    assert "a-name-of-many-..." in rows and "seed=199" in done.output


def own_rows_of_all(commits: Any) -> Any:
    """Rows whose stages have all run."""
    from lean_finetune.report.compare_experiments import rows_of
    from tests.report.test_compare_experiments import ALL

    return list(rows_of(commits, lambda *_: ALL))


def test_json_has_numbers(project: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(experiments, "_commits", lambda: COMMITS)
    monkeypatch.setattr(experiments, "own_rows", own_rows_of_all)
    answer = json.loads(invoke(compare, "--json").output)
    check_answer("compare", answer)
    rows = {row["experiment"]: row for row in answer}
    assert rows["tidal-mint"]["changed"] == {"seed": 18, "train.lora.rank": 8}
    assert rows["tidal-mint"]["loss_change"] == -0.25 and rows["tidal-mint"]["state"] == "finished"
    assert rows["gone"]["state"] == "failed" and rows["gone"]["tuned_loss"] is None


def test_a_project_below_a_git_root_and_one_without_commits(home: Path):
    """DVC's paths are relative to the project, git's to the root."""
    git("init", "-q")
    with made_project(Path("p"), Choices(), Shown(as_json=False)):
        pass
    os.chdir("p")
    says = "no commit has this project yet, and experiments start from one; `git add .dvc .dvcignore "
    assert says in error(invoke(compare))
    os.chdir("..")
    git("commit", "-q", "--allow-empty", "-m", "mine", "--", ":!p")
    os.chdir("p")
    for command, words in ((compare, []), (exp, ["run", "-S", "seed=3"])):
        message = error(invoke(command, *words))
        assert says in message, "the user's own commit"
    commit = message.split("`")[1].replace("git commit", f"git {' '.join(IDENTITY)} commit")
    run_bounded(["sh", "-c", commit], check=True)
    done = invoke(compare)
    assert [line.split()[0] for line in done.output.splitlines()[:3]] == ["experiment", "workspace", "baseline"]
    assert own_rows([]) == []
