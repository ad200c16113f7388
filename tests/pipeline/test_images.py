"""DVC notices every change of an image that rows name, and reruns what reads it."""

import json
import os
import shutil
from pathlib import Path

import pytest
from PIL import Image

from tests.pipeline.clone import IDENTITY, Clone, stages_run
from tests.pipeline.test_links import head
from tests.workspace import write_rows

STAGES = ("pin_data", "tokenize")


def draw(path: Path, colour: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), colour).save(path)


@pytest.mark.slow
def test_an_edited_added_or_removed_image_reruns_pin_data_and_tokenize(clone: Clone, tmp_path: Path):
    """Training would go on with the tokens of images that are gone."""
    text = [json.loads(line) for line in (clone.root / "data/raw/sample.jsonl").read_text().splitlines()[:20]]
    images = [
        {
            "messages": [{"role": "user", "content": f"<image>{k}"}, {"role": "assistant", "content": "A"}],
            "images": [name],
        }
        for k, name in enumerate(("images/a.png", "images/deep/b.png", str(tmp_path / "other/c.png")))
    ]
    rows = write_rows(tmp_path / "rows/train.jsonl", text + images)
    for name in ("rows/images/a.png", "rows/images/deep/b.png", "rows/images/unused.png", "other/c.png"):
        draw(tmp_path / name, "red")
    # The tiny model takes no images, so its rows are skipped: what matters here is what reruns.
    clone.set_params(data__source=str(rows), data__on_bad_row="skip")
    clone.dvc("repro", *STAGES)
    clone.dvc("repro", *STAGES)  # The first run changed the links, which are dependencies.
    assert stages_run(clone.dvc("repro", *STAGES)) == []
    for name in ("rows/images/a.png", "rows/images/deep/b.png", "other/c.png"):
        draw(tmp_path / name, "blue")
        assert stages_run(clone.dvc("repro", *STAGES)) == list(STAGES), name
    (tmp_path / "rows/images/deep/b.png").unlink()
    assert stages_run(clone.dvc("repro", *STAGES)) == list(STAGES)
    draw(tmp_path / "rows/images/deep/b.png", "green")
    assert stages_run(clone.dvc("repro", *STAGES)) == list(STAGES)
    draw(tmp_path / "rows/images/unused.png", "blue")
    assert stages_run(clone.dvc("repro", *STAGES)) == ["pin_data"]  # No row has it.
    assert clone.json("locks/data.json")["sources"][0]["images"]["files"] == 3
    assert os.readlink(clone.root / "locks/watched-data-1") == str(tmp_path / "other")
    assert os.readlink(clone.root / "locks/watched-data-2") == str(tmp_path / "rows/images")
    clone.run("git", "clean", "-fdq", "locks")


@pytest.mark.slow
def test_a_temporary_experiment_finds_images_that_git_ignores(clone: Clone):
    """It runs in a copy that has the rows, which git tracks, and not their images."""
    (clone.root / ".git/info/exclude").write_text("/data/mine/images/\n")
    draw(clone.root / "data/mine/images/a.png", "red")
    turns = [{"role": "user", "content": "<image>Q"}, {"role": "assistant", "content": "A"}]
    write_rows(clone.root / "data/mine/rows.jsonl", [{"messages": turns, "images": ["images/a.png"]}])
    clone.run("git", "add", "data/mine")
    clone.set_params(data__source="data/mine/rows.jsonl")
    clone.dvc("repro", "pin_data")
    here = clone.json("locks/data.json")["sources"][0]["images"]
    # An identity, as DVC stashes a file that is added to git.
    clone.dvc("exp", "run", "--temp", "-n", "images", "pin_data", env=IDENTITY)
    there = json.loads(clone.run("git", "show", "refs/exps/" + head(clone) + "/images:locks/data.json"))
    assert there["sources"][0]["images"] == here and (here["files"], here["missing"]) == (1, 0)
    assert os.readlink(clone.root / "locks/watched-data-1") == str(clone.root / "data/mine/images")
    clone.run("git", "rm", "-rqf", "data/mine")
    shutil.rmtree(clone.root / "data/mine")
    clone.run("git", "clean", "-fdq", "locks")
