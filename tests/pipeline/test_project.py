"""A project of `lean-finetune init`, whose library is installed outside of it, does all that a clone does."""

import json
import re
import shutil
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lean_finetune.pinning.code import code_hashes
from lean_finetune.stages.code import entries
from tests.conftest import ROOT
from tests.kit.write_params import write_params
from tests.pipeline.clone import SMALL_RUN, Clone, commit_all, environment, is_up_to_date, stages_run
from tests.pipeline.queue import run_queued
from tests.pipeline.test_interrupted import checkpoints, interrupted, trainers
from tests.pipeline.test_many_gpus import CHANGED, check, shared
from tests.processes import kill_group
from tests.wheel import build_wheel

pytestmark = pytest.mark.slow

ALL = [
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


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Clone, str]]:
    """A project, and what its first `dvc repro` printed. It is in a subdirectory of a git repository."""
    base = tmp_path_factory.mktemp("project")
    installed = base / "installed"  # As `pip install --no-deps --target` does.
    with zipfile.ZipFile(build_wheel(base / "wheel")) as archive:
        archive.extractall(installed)
    user = Clone(base, {**environment(base / "home"), "PYTHONPATH": str(installed)})
    (base / "work").mkdir()
    user = Clone(base / "work", user.environment)
    user.run("git", "init", "-q", "-b", "main")
    user.run(sys.executable, "-m", "lean_finetune.cli", "init", "my-run")
    project = Clone(base / "work/my-run", user.environment)
    write_params(project.root, SMALL_RUN, project.root / "params.yaml")
    commit_all(project)
    where = project.run(sys.executable, "-c", "import stages.train, lean_finetune; print(lean_finetune.__file__)")
    assert Path(where.strip()).is_relative_to(installed) and not (project.root / "lean_finetune").exists()
    output = project.dvc("repro")
    commit_all(project)
    yield project, output
    project.end_processes()


@pytest.fixture
def project(made: tuple[Clone, str]) -> Iterator[Clone]:
    """The project, restored after the test."""
    shared_project = made[0]
    yield shared_project
    shared_project.end_processes()
    shared_project.back_to_baseline()
    shutil.rmtree(shared_project.root / "scratch/train", ignore_errors=True)


def library(project: Clone) -> Path:
    return Path(project.environment["PYTHONPATH"])


def test_the_installed_library_trains(made: tuple[Clone, str]):
    project, output = made
    assert stages_run(output) == ALL
    assert project.run("git", "status", "--porcelain") == ""
    assert (project.root / "data/tuned/adapter_model.safetensors").is_file()
    assert "Predicted" in (project.root / "data/report/report.md").read_text()
    assert stages_run(project.dvc("repro")) == []
    assert is_up_to_date(project)
    for name in entries(project.root):
        pinned = project.json(f"locks/code/{name}.json")
        assert code_hashes(f"stages.{name}").items() <= pinned.items(), "other hashes than in a clone of this code"
    tracked = project.run("git", "grep", "-l", "-e", str(library(project)), "-e", str(ROOT), ok=False)
    assert tracked == "", "a path of this machine in a file that a colleague clones"


def test_an_upgrade_reruns_exactly_the_stages_whose_code_changed(project: Clone):
    """An upgrade that retrains for a comment, or that leaves a stale report."""
    package = library(project) / "lean_finetune"
    loop, report = package / "train/loop.py", package / "report/pages.py"
    before = {path: path.read_text() for path in (loop, report)}
    try:
        loop.write_text(f"# Another comment.\n{before[loop]}")
        assert stages_run(project.dvc("repro")) == []
        report.write_text(before[report] + "\nADDED = 1\n")
        assert stages_run(project.dvc("repro")) == ["report"]
    finally:
        for path, text in before.items():
            path.write_text(text)


def test_a_dry_run_before_the_first_run_lists_the_stages(project: Clone, tmp_path: Path):
    """docs/quickstart.md names the command: without --force, DVC hashes files that no stage has written yet."""
    copy = Clone(tmp_path / "copy", project.environment)
    project.run("git", "clone", "-q", str(project.root.parent), str(copy.root))
    copy = Clone(copy.root / "my-run", project.environment)
    assert "ERROR" not in copy.dvc("status")
    assert stages_run(copy.dvc("repro", "--dry", "--force")) == ALL


def test_experiments_in_the_workspace_a_copy_and_the_queue(project: Clone):
    switched = ["estimate", "train", "report"]
    weights = project.sha256("data/tuned/adapter_model.safetensors")
    output = project.dvc("exp", "run", "-n", "here", "-S", "train.grad_ckpt=true")
    assert stages_run(output) == switched
    assert project.sha256("data/tuned/adapter_model.safetensors") == weights
    project.back_to_baseline()
    output = project.dvc("exp", "run", "--temp", "-n", "copy", "-S", "bucket.max_tokens=256", "estimate")
    assert stages_run(output) == ["bucket", "estimate"]
    run_queued(project, {"queued": ["-S", "bucket.max_tokens=1024", "estimate"]})
    shown = json.loads(project.dvc("exp", "show", "--json", "--no-pager"))
    revisions = [experiment["revs"][0] for row in shown for experiment in row.get("experiments") or []]
    peaks = {
        each["name"]: each["data"]["metrics"]["metrics/estimate.json"]["data"]["peak_gib_predicted"]
        for each in revisions
    }
    assert {"here", "copy", "queued"} <= set(peaks) and peaks["copy"] < peaks["queued"]
    table = project.run("sh", "-c", "dvc exp show --json | python -m lean_finetune.report.compare_experiments")
    assert "copy" in table and "queued" in table


def test_outputs_go_to_a_remote_and_come_back_in_a_colleagues_clone(project: Clone, tmp_path: Path):
    project.dvc("remote", "add", "--default", "--local", "store", str(tmp_path / "store"))
    project.dvc("push")
    project.run("git", "clone", "-q", str(project.root.parent), str(tmp_path / "clone"))
    theirs = Clone(tmp_path / "clone/my-run", project.environment)
    theirs.dvc("remote", "add", "--default", "--local", "store", str(tmp_path / "store"))
    theirs.dvc("pull")
    assert theirs.sha256("data/tuned/adapter_model.safetensors") == project.sha256(
        "data/tuned/adapter_model.safetensors"
    )
    assert stages_run(theirs.dvc("repro")) == [], "a colleague trains again"
    project.dvc("remote", "remove", "--local", "store")


def test_a_killed_training_resumes(project: Clone, tmp_path: Path):
    weights = project.sha256("data/tuned/adapter_model.safetensors")
    project.set_params(run__checkpoint_seconds=0.05)
    command = ("repro", "--force", "--single-item", "train")
    interrupted(project, tmp_path / "log", command, kill_group)
    assert checkpoints(project) and not trainers(project)
    output = project.dvc(*command)
    assert re.search(r"train: resumed at optimizer step \d+ of", output), output
    assert project.sha256("data/tuned/adapter_model.safetensors") == weights


@pytest.mark.multiprocess
def test_two_processes_share_a_run(project: Clone):
    alone = project.json("data/train/figures.json")
    output = project.dvc("exp", "run", *shared("zero3"))
    assert stages_run(output) == CHANGED
    check((project.root / "data/train/figures.json").read_text(), alone)


def test_the_other_commands_work_in_a_project(project: Clone, tmp_path: Path):
    def ours(*arguments: str) -> str:
        return project.run(sys.executable, "-m", "lean_finetune.cli", *arguments)

    (tmp_path / "prompts.jsonl").write_text('{"messages": [{"role": "user", "content": "Add 2 and 3."}]}\n')
    ours("generate", str(tmp_path / "prompts.jsonl"), str(tmp_path / "answers.jsonl"), "--max-new-tokens", "4")
    assert (tmp_path / "answers.jsonl").read_text().count("\n") == 1
    ours("export", str(tmp_path / "merged"))
    assert (tmp_path / "merged/model.safetensors").is_file()
    assert "dvc.yaml, .dvc and the command dvc" in project.run(
        "sh", "-c", f"{sys.executable} -m lean_finetune.cli doctor || true"
    )
    assert "verdict" in ours("fit")
    (project.root / "axolotl.yml").write_text("base_model: org/model\nadapter: lora\nlora_r: 8\n")
    assert "dvc repro estimate" in ours("import", "axolotl.yml")
    assert "is of another version" not in ours("init", "--check")
    (project.root / "axolotl.yml").unlink()
