"""The tiny model learns a preference from generated rows, and orders answers that it has not seen."""

import csv
import json
from pathlib import Path

import pytest

from data.synth.preferences import make_preferences
from data.synth.rows import UNSEEN
from lean_finetune.core.atomic_files import read_json
from tests.workspace import lay_out, run_module, write_rows

STAGES = ("pin data", "pin model", "tokenize", "bucket", "estimate", "reference", "train", "evaluate")


def test_preferences_are_the_same_for_a_seed_and_prefer_what_was_asked_for():
    pairs, labelled = (make_preferences(kind, 3, 60) for kind in ("pairs", "labelled"))
    assert pairs == make_preferences("pairs", 3, 60)
    assert len({json.dumps(row["prompt"]) for row in pairs}) == 60 and {row["family"] for row in pairs} <= set(UNSEEN)
    assert all(row["chosen"] != row["rejected"] for row in pairs)
    assert 15 < sum(row["label"] for row in labelled) < 45
    for pair, row in zip(pairs, labelled, strict=True):
        assert row["completion"] == pair["chosen" if row["label"] else "rejected"]


CASES = [("dpo", "pairs", 0.95), ("reward", "pairs", 0.85), ("kto", "labelled", 0.7)]
"""Objective, rows, and the least share of held-out answers that are right after training; 0.5 before."""


@pytest.mark.slow
@pytest.mark.parametrize(("objective", "kind", "accuracy"), CASES)
def test_the_tiny_model_learns_a_preference(tmp_path: Path, objective, kind, accuracy):
    """The figures of docs/preference.md, from stages as a user runs them."""
    source = write_rows(tmp_path / f"{kind}.jsonl", make_preferences(kind, 1, 800))
    settings = {
        "data__source": str(source),
        "data__heldout_fraction": 0.2,
        "train__objective": objective,
        "train__method": "lora",
        "train__lr": 0.001,
        "train__epochs": 1,
        "train__heldout_every_steps": 100,
        "train__heldout_rows": 400,
        "evaluate__generate_rows": 0,
    }
    if objective == "reward":
        settings["train__loss_chunk"] = None
    lay_out(tmp_path, **settings)
    (tmp_path / "locks").mkdir()
    for stage in STAGES:
        name, *arguments = stage.split()
        result = run_module(f"stages.{name}", *arguments, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
    last = list(csv.DictReader((tmp_path / "data/train/curves.csv").read_text().splitlines()))[-1]
    assert float(last["heldout_reward_accuracy"]) >= accuracy and float(last["heldout_reward_margin"]) > 0.8
    if kind == "pairs":
        figures = read_json(tmp_path / "metrics/evaluate.json")
        assert 0.4 < figures["base_reward_accuracy"] < 0.6 and figures["tuned_reward_accuracy"] >= accuracy
