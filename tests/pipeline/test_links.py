"""Weights and data never enter git: DVC watches them through links, and an experiment commits only the links."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import ROOT
from tests.pipeline.clone import IDENTITY, Clone, stages_run
from tests.pipeline.queue import run_queued
from tests.workspace import write_rows

LINKS = ("watched-data", "watched-model")
STAGES = ("pin_data", "pin_model", "tokenize", "bucket")
MODEL_MIB = 64


def git_bytes(clone: Clone) -> int:
    """Size of the checkout's .git."""
    return sum(path.lstat().st_size for path in (clone.root / ".git").rglob("*") if path.is_file())


def check_links(clone: Clone, folder: Path, revision: str) -> None:
    """The workspace and a commit have links to a folder's data and model, and nothing below them."""
    for name, target in zip(LINKS, (folder / "data", folder / "model"), strict=True):
        assert os.readlink(clone.root / "locks" / name) == str(target)
    listed = clone.run("git", "ls-tree", "-r", revision, "locks").splitlines()
    watched = [line.split() for line in listed if "watched" in line]
    assert {mode for mode, *_ in watched} == {"120000"}
    assert {f"locks/{name}" for name in LINKS} < {path for *_, path in watched}


def new_source(folder: Path) -> list[str]:
    """Make a model directory and a data directory; return the flags of an experiment with them."""
    shutil.copytree(ROOT / "lean_finetune/tiny", folder / "model")
    weights = folder / "model/model.safetensors"
    # A .gitignore of the model must not undo ours. Random bytes do not compress, and nothing here reads them.
    (folder / "model/.gitignore").write_text("!*\n")
    save_file({**load_file(weights), "more": torch.randint(256, (MODEL_MIB * 2**20,), dtype=torch.uint8)}, weights)
    (folder / "data").mkdir()
    lines = (ROOT / "data/raw/sample.jsonl").read_text().splitlines(keepends=True)
    for k in range(2):
        (folder / f"data/{k}.jsonl").write_text("".join(lines[40 * k : 40 * k + 40]))
    return ["-S", f"model.name={folder / 'model'}", "-S", f"data.source={folder / 'data'}"]


@pytest.mark.slow
def test_dvc_notices_every_change_of_several_sources(clone: Clone, tmp_path: Path):
    """DVC does not follow a link to a directory inside a dependency: such a source would go stale."""
    paths = [tmp_path / name for name in ("one/deep/rows.jsonl", "a.jsonl", "two/rows.jsonl", "b.jsonl")]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}\n")
    sources = [tmp_path / "one", paths[1], tmp_path / "two", paths[3]]
    clone.set_params(data__source=[{"source": str(source)} for source in sources])
    clone.dvc("repro", "pin_data")
    clone.dvc("repro", "pin_data")  # The first run changed the links, which are dependencies.
    for path in (*paths, tmp_path / "two/new.jsonl"):
        path.write_text("{}\n{}\n")
        assert stages_run(clone.dvc("repro", "pin_data")) == ["pin_data"], path
    paths[0].unlink()
    (tmp_path / "one/other.jsonl").write_text("{}\n")
    assert stages_run(clone.dvc("repro", "pin_data")) == ["pin_data"]
    assert stages_run(clone.dvc("repro", "pin_data")) == []
    clone.run("git", "clean", "-fdq", "locks")


@pytest.mark.slow
def test_an_experiment_commits_only_links(clone: Clone, tmp_path: Path):
    flags = new_source(tmp_path)
    before = git_bytes(clone)
    clone.dvc("exp", "run", "-n", "links", *flags, "pin_data", "pin_model")
    reference = clone.run("git", "for-each-ref", "--format=%(refname)", "refs/exps/**/links").strip()
    check_links(clone, tmp_path, reference)
    assert git_bytes(clone) - before < 2**20


@pytest.mark.slow
@pytest.mark.parametrize("name", ["outside", "inside"])
def test_weights_and_data_never_enter_git(clone: Clone, tmp_path: Path, name: str):
    """In the workspace, a copy and the queue, with sources outside the checkout or inside where git ignores them."""
    folder = (clone.root if name == "inside" else tmp_path) / name
    (clone.root / ".git/info/exclude").write_text("/inside/\n")
    flags = new_source(folder)
    before = git_bytes(clone)
    clone.dvc("exp", "run", "-n", f"{name}-here", *flags, *STAGES)
    check_links(clone, folder, f"refs/exps/{head(clone)}/{name}-here")
    assert "up to date" in clone.dvc("status", *STAGES)
    edited = folder / "data/1.jsonl"
    edited.write_text(edited.read_text().replace('"content": "', '"content": "Please. ', 1))
    assert stages_run(clone.dvc("repro", *STAGES)) == ["pin_data", "tokenize", "bucket"]
    (folder / "model/special_tokens_map.json").write_text("{}")
    assert "locks/watched-model" in clone.dvc("status", "pin_model")
    (folder / "model/special_tokens_map.json").unlink()
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
    assert os.readlink(clone.root / "locks/watched-model") == "README.md"
    assert git_bytes(clone) - before < 2**20
    shutil.rmtree(folder)


@pytest.mark.slow
def test_a_temporary_experiment_finds_rows_and_models_that_git_no_longer_tracks(clone: Clone):
    """The links to them were written while git tracked them: DVC ended with "Errno 2" and a path in its copy."""
    rows = [{"prompt": f"{k} and 1?", "completion": f"{k + 1}"} for k in range(20)]
    write_rows(clone.root / "rows/mine.jsonl", rows)
    shutil.copytree(ROOT / "lean_finetune/tiny", clone.root / "model")
    clone.run("git", "add", "--force", "rows", "model")
    clone.set_params(data__source="rows/mine.jsonl", model__name="model")
    clone.dvc("repro", "pin_data", "pin_model")
    here = clone.json("locks/data.json")["sources"], clone.json("locks/model.json")["files"]
    clone.run("git", "rm", "-rq", "--cached", "rows", "model")
    clone.dvc("exp", "run", "--temp", "-n", "untracked", "pin_data", "pin_model", env=IDENTITY)
    rows, model = (
        json.loads(clone.run("git", "show", f"refs/exps/{head(clone)}/untracked:locks/{name}.json"))
        for name in ("data", "model")
    )
    assert (rows["sources"], model["files"]) == here
    for name in ("rows", "model"):
        shutil.rmtree(clone.root / name)
    clone.run("git", "clean", "-fdq", "locks")


def head(clone: Clone) -> str:
    """The baseline's commit as in DVC's names of experiments: in two parts."""
    commit = clone.run("git", "rev-parse", "HEAD").strip()
    return f"{commit[:2]}/{commit[2:]}"
