"""`lean-finetune fit --verdict` for scripts, and `--apply`, which writes an offer into params.yaml."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lean_finetune.commands import fit_text
from lean_finetune.commands.fit import fit
from lean_finetune.config.load import load_params
from lean_finetune.memory.advice.search import Remedy
from tests.conftest import ROOT
from tests.memory.common import card_for
from tests.workspace import error, invoke


@pytest.fixture
def workspace(tmp_path: Path, small_llama: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the shipped params.yaml and a config.json, in which a run fits that is given 2 GiB."""
    shutil.copy(ROOT / "params.yaml", tmp_path)
    (tmp_path / "model").mkdir()
    shutil.copy(small_llama / "config.json", tmp_path / "model" / "config.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path


SMALL = ["--set", "model.name=model", "--set", "data.max_length=64", "--set", "bucket.max_tokens=64"]
TOO_SMALL = [*SMALL, "--gpu", card_for(2**20)]


@pytest.fixture
def offers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Two offers, as a search would find them; and the runs for which offers were asked."""
    remedies = [
        Remedy(flags=flags, peak_bytes=2**20, slowdown=1.0, effect="same training result")
        for flags in [
            ("train.grad_ckpt=true", "train.lora.rank=4"),
            ("train.method=full", "train.max_grad_norm=null", "train.lora.rslora=false"),
        ]
    ]
    asked: list[Any] = []
    monkeypatch.setattr(fit_text, "offers_of", lambda run, *_: asked.append(run) or remedies)  # type: ignore[func-returns-value]
    yield asked


def test_verdict_is_one_line_and_searches_nothing(workspace: Path, offers: list[Any], monkeypatch: pytest.MonkeyPatch):
    """A script that waits for limits and advice, or that parses a page."""
    monkeypatch.delattr(fit_text, "find_limits")
    for options, code, state in [([*SMALL, "--gpu", "2GiB"], 0, "fits"), (TOO_SMALL, 3, "does not fit")]:
        shown = invoke(fit, *options, "--verdict")
        assert shown.exit_code == code, shown.output
        (line,) = shown.stdout.splitlines()
        assert line.startswith(f"verdict {state}: ")
        found = invoke(fit, *options, "--verdict", "--json")
        answer = json.loads(found.stdout)
        assert found.exit_code == code and answer["verdict"] == state
        assert {"peak_bytes", "usable_bytes", "deciding_tier", "tiers"} < answer.keys()
        assert not {"would_fit", "longest_row_tokens"} & answer.keys()
    assert not offers
    assert error(invoke(fit, "--verdict", "--gpu", "no-such"), 2).startswith("hardware.gpu: ")


def test_apply_writes_an_offer_with_the_command_line_and_keeps_comments(workspace: Path, offers: list[Any]):
    """A params.yaml without comments, or one that describes another run than the one that was predicted."""
    before = (workspace / "params.yaml").read_text()
    done = invoke(fit, *TOO_SMALL, "--apply")
    assert done.exit_code == 0, done.output
    params = load_params(workspace / "params.yaml")
    assert (params.train.lora.rank, params.data.max_length, params.model.name) == (4, 64, "model")
    assert params.hardware.gpu == TOO_SMALL[-1]
    first, *changed = done.stdout.splitlines()
    assert first == f"params.yaml: offer 1 of 2, {len(changed)} parameters changed"
    assert {"train.lora.rank: 4", "data.max_length: 64", "model.name: model"} <= {*changed}
    after = (workspace / "params.yaml").read_text()
    comments = [line.partition("#")[2] for line in before.splitlines() if "#" in line]
    assert [line.partition("#")[2] for line in after.splitlines() if "#" in line] == comments
    lines = zip(before.splitlines(), after.splitlines(), strict=True)
    assert sum(old != new for old, new in lines) == len(changed)


def test_apply_takes_a_number_and_a_file(workspace: Path, offers: list[Any]):
    """The first offer whatever number is given, or params.yaml whatever file."""
    (workspace / "params.yaml").rename(workspace / "mine.yaml")
    done = invoke(fit, "--params", "mine.yaml", *TOO_SMALL, "--apply", "2")
    assert done.exit_code == 0 and done.stdout.startswith("mine.yaml: offer 2 of 2, "), done.output
    assert "train.max_grad_norm: " in done.stdout.splitlines()
    params = load_params(workspace / "mine.yaml")
    assert params.train.method == "full" and params.train.max_grad_norm is None


def test_apply_that_cannot_be_is_one_line_and_changes_nothing(workspace: Path, offers: list[Any]):
    """A file that is written half, or a settled run that is changed."""
    before = (workspace / "params.yaml").read_bytes()
    fits = error(invoke(fit, *SMALL, "--gpu", "2GiB", "--apply"), 1)
    assert fits.startswith("--apply: nothing to apply: the run fits: ")
    assert error(invoke(fit, *TOO_SMALL, "--apply", "3"), 2) == (
        "--apply: must be at most 2, the number of offers for this run; got 3"
    )
    usual = error(invoke(fit, "--model", "model", "--gpu", "2GiB", "--apply"), 2)
    assert "add --params params.yaml" in usual
    assert error(invoke(fit, *TOO_SMALL, "--apply", "--json"), 2).startswith("--apply: prints what it changes")
    assert (workspace / "params.yaml").read_bytes() == before
    (workspace / "params.yaml").unlink()
    missing = error(invoke(fit, *TOO_SMALL, "--apply"), 2)
    assert missing == "--apply: writes into params.yaml, which does not exist; name a file by --params"
    assert sorted(path.name for path in workspace.iterdir()) == ["model"]
