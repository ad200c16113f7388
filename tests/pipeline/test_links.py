"""Weights and data never enter git: DVC watches them through links, and an experiment commits the links alone."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import ROOT
from tests.pipeline.clone import Clone, stages_run
from tests.pipeline.queue import run_queued

LINKS = ("watched-data", "watched-model")
STAGES = ("pin_data", "pin_model", "tokenize", "bucket")
MODEL_MIB = 64


def git_bytes(clone: Clone) -> int:
    """What the checkout's .git takes."""
    return sum(path.lstat().st_size for path in (clone.root / ".git").rglob("*") if path.is_file())


def check_links(clone: Clone, folder: Path, revision: str) -> None:
    """The workspace and a commit hold links to a folder's data and model, and nothing that is below them."""
    for name, target in zip(LINKS, (folder / "data", folder / "model"), strict=True):
        assert os.readlink(clone.root / "locks" / name) == str(target)
    listed = clone.run("git", "ls-tree", "-r", revision, "locks").splitlines()
    watched = [line.split() for line in listed if "watched" in line]
    assert {mode for mode, *_ in watched} == {"120000"}
    assert {f"locks/{name}" for name in LINKS} < {path for *_, path in watched}


def new_source(folder: Path, model_bytes: int) -> list[str]:
    """Make a model directory and a data directory, and the flags of an experiment with them."""
    shutil.copytree(ROOT / "lean_finetune/tiny", folder / "model")
    weights = folder / "model/model.safetensors"
    # Nothing here reads more of the weights than their header; random bytes do not compress.
    save_file({**load_file(weights), "more": torch.randint(256, (model_bytes,), dtype=torch.uint8)}, weights)
    (folder / "data").mkdir()
    lines = (ROOT / "data/raw/sample.jsonl").read_text().splitlines(keepends=True)
    for k in range(2):
        (folder / f"data/{k}.jsonl").write_text("".join(lines[40 * k : 40 * k + 40]))
    return ["-S", f"model.name={folder / 'model'}", "-S", f"data.source={folder / 'data'}"]


@pytest.mark.slow
def test_an_experiment_commits_links_alone(clone: Clone, tmp_path: Path):
    flags = new_source(tmp_path, 2**21)
    # A model's own .gitignore must not open what ours closes.
    (tmp_path / "model/.gitignore").write_text("!*\n")
    before = git_bytes(clone)
    clone.dvc("exp", "run", "-n", "links", *flags, "pin_data", "pin_model")
    reference = clone.run("git", "for-each-ref", "--format=%(refname)", "refs/exps/**/links").strip()
    check_links(clone, tmp_path, reference)
    assert git_bytes(clone) - before < 2**20
    (tmp_path / "data/2.jsonl").write_text((tmp_path / "data/0.jsonl").read_text().replace("a", "b"))
    (tmp_path / "model/special_tokens_map.json").write_text("{}")
    status = clone.dvc("status", "pin_data", "pin_model")
    assert "locks/watched-data" in status and "locks/watched-model" in status


@pytest.mark.slow
@pytest.mark.parametrize("name", ["outside", "inside"])
def test_weights_and_data_never_enter_git(clone: Clone, tmp_path: Path, name: str):
    """Through every way an experiment can go, with sources outside the checkout, and inside where git ignores them."""
    folder = (clone.root if name == "inside" else tmp_path) / name
    (clone.root / ".git/info/exclude").write_text("/inside/\n")
    flags = new_source(folder, MODEL_MIB * 2**20)
    before = git_bytes(clone)
    clone.dvc("exp", "run", "-n", f"{name}-here", *flags, *STAGES)
    check_links(clone, folder, f"refs/exps/{head(clone)}/{name}-here")
    assert "up to date" in clone.dvc("status", *STAGES)
    edited = folder / "data/1.jsonl"
    edited.write_text(edited.read_text().replace('"content": "', '"content": "Please. ', 1))
    assert stages_run(clone.dvc("repro", *STAGES)) == ["pin_data", "tokenize", "bucket"]
    clone.run("git", "reset", "-q", "--hard")
    clone.dvc("exp", "run", "--temp", "-n", f"{name}-temp", *flags, *STAGES)
    run_queued(clone, {f"{name}-queue": [*flags, "-S", "bucket.max_tokens=256", *STAGES]})
    for kind in ("temp", "queue"):
        clone.dvc("exp", "apply", f"{name}-{kind}")
        check_links(clone, folder, f"refs/exps/{head(clone)}/{name}-{kind}")
        assert "up to date" in clone.dvc("status", *STAGES)
        clone.run("git", "reset", "-q", "--hard")
    clone.dvc("exp", "branch", f"{name}-queue", f"{name}-branch")
    clone.run("git", "checkout", "-q", f"{name}-branch")
    check_links(clone, folder, "HEAD")
    clone.run("git", "checkout", "-q", "main")
    assert os.readlink(clone.root / "locks/watched-model") == "../lean_finetune/tiny"
    assert git_bytes(clone) - before < 2**20
    shutil.rmtree(folder)


def head(clone: Clone) -> str:
    """The baseline's commit as DVC names its experiments: in two parts."""
    commit = clone.run("git", "rev-parse", "HEAD").strip()
    return f"{commit[:2]}/{commit[2:]}"
