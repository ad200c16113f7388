"""The page of `compare --html`: curves of experiments side by side, from the workspace and DVC's cache."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from lean_finetune.commands.run import experiments
from lean_finetune.commands.run.compare_page import COLORS, comparison_page
from lean_finetune.commands.run.experiments import compare
from lean_finetune.commands.run.place import PIPELINE
from lean_finetune.report.compare_experiments import NAME, REVISION, WORKSPACE, curve_files
from tests.commands.run.test_run import git
from tests.workspace import error, invoke

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Of DVC's libraries.

HOSTILE = "</svg><img src=x onerror=run()><script>run()</script>'\"&"
HEADER = "step,loss,heldout_loss,allocated_bytes\n"


def row(name: str, **figures: Any) -> dict[str, Any]:
    return {"experiment": name, "state": "finished", "changed": {}, "peak_gib_predicted": 0.5, **figures}


def curves(path: Path, *lines: str) -> Path:
    path.write_text(HEADER + "".join(f"{line}\n" for line in lines))
    return path


def test_loss_and_memory_of_each_are_drawn_and_names_are_escaped(tmp_path: Path):
    """Names of experiments and values of parameters are others'."""
    first = curves(tmp_path / "a", "0,2.0,1.9,1024", "1,1.0,1.5,")
    second = curves(tmp_path / "b", "0,3.0,,", "1,2.0,2.5,2048")
    changed = {"peak_gib_measured": 0.25, "tuned_loss": None, "changed": {HOSTILE: HOSTILE}}
    found = comparison_page([row("workspace"), row("baseline"), row(HOSTILE, **changed)], [second, first, second])
    assert "<img" not in found and "<script" not in found and "&lt;img src=x" in found
    for part in ("Training loss", "Held-out loss", "0.5 GiB, measured 0.25 GiB", "baseline: memory over optimizer"):
        assert part in found, part
    assert found.count("workspace") == 1, "the workspace has the curves of an experiment, and is drawn twice"
    assert "Held-out loss" not in comparison_page([row("baseline")], [second]), "a curve of one point"
    assert found.count("<figure>") == 5 and COLORS[0] in found and COLORS[2] not in found


@pytest.mark.parametrize(
    "text", ["", "step\n", HEADER, f"{HEADER}x,1.0,,\n", f"{HEADER}0,nan,,\n", f"{HEADER}0\n", "\0"]
)
def test_damaged_curves_are_not_drawn(tmp_path: Path, text: str):
    (tmp_path / "a").write_text(text)
    found = comparison_page([row("baseline"), row("other")], [tmp_path / "a", tmp_path / "gone"])
    assert "<figure>" not in found and "No curves" in found and "baseline" in found


def test_many_experiments_are_said_to_be_more_than_the_colors(tmp_path: Path):
    rows = [row(f"e{number}") for number in range(12)]
    found = comparison_page(rows, [curves(tmp_path / f"{number}", f"0,{number}.5,,") for number in range(12)])
    assert "The first 8 of 12 with curves" in found


LOCK = """schema: '2.0'
stages:
  train:
    cmd: python -m stages.train
    outs:
    - {{path: data/train, hash: md5, md5: {md5}, nfiles: 1}}
"""


def test_curves_of_a_commit_come_from_the_cache_also_below_a_git_root(home: Path):
    """Curves of the workspace that pass for those of an experiment."""
    from dvc.repo import Repo

    git("init", "-q")
    (home / "p").mkdir()
    os.chdir("p")
    with Repo.init(subdir=True) as repo:
        Path("data/train").mkdir(parents=True)
        curves(Path("data/train/curves.csv"), "0,7.0,,")
        [stage] = repo.add("data/train")
        md5 = stage.outs[0].hash_info.value
    Path("dvc.lock").write_text(LOCK.format(md5=md5))
    git("add", "dvc.lock")
    git("commit", "-q", "-m", "x")
    Path("dvc.lock").unlink()
    shutil.rmtree("data")
    rows = [
        {NAME: "a", REVISION: "HEAD"},
        {NAME: "b"},
        {NAME: "c", REVISION: WORKSPACE},
        {NAME: "d", REVISION: "HEAD~9"},
    ]
    cached, *others = curve_files(rows)
    assert cached is not None and cached.read_text() == f"{HEADER}0,7.0,,\n"
    assert others == [None, Path("data/train/curves.csv"), None]


def test_the_page_is_written_beside_the_table_or_refused_before(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(experiments, "_need_project", lambda: None)
    monkeypatch.setattr(experiments, "_need_commit", lambda: None)
    monkeypatch.setattr(experiments, "_commits", lambda: [])
    baseline = {NAME: "baseline", "peak_gib_predicted": 0.5}
    monkeypatch.setattr(experiments, "own_rows", lambda commits: [baseline])
    from dvc.repo import Repo

    git("init", "-q")
    Repo.init().close()
    done = invoke(compare, "--html", "page.html")
    assert "baseline" in done.output and "<h1" not in done.output and "baseline" in Path("page.html").read_text()
    for wrong in (".", "none/page.html"):
        assert "--html: must be a file in a directory that exists" in error(invoke(compare, "--html", wrong), 2)
    assert not PIPELINE.exists()
