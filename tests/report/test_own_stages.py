"""Which stages of a dvc.lock ran with an experiment's parameters: metrics of the others are of an earlier run."""

from pathlib import PurePosixPath

import pytest

from lean_finetune.report.compare_experiments import own_files, own_stages


def entry(params: dict, deps: dict[str, str], outs: dict[str, str]) -> dict:
    """A stage as dvc.lock has it."""
    return {
        "params": {"params.yaml": params},
        "deps": [{"path": path, "md5": md5} for path, md5 in deps.items()],
        "outs": [{"path": path, "md5": md5} for path, md5 in outs.items()],
    }


PARAMS = {"seed": 17, "hardware": {"gpu": "T4"}, "train": {"lr": 0.001, "lora": {"rank": 16}}, "evaluate": {"rows": 2}}
LOCK = {
    "estimate": entry(
        {"hardware.gpu": "T4", "train.lora": {"rank": 16}},
        {"locks/watched": "outside"},
        {"data/estimate": "e.dir", "metrics/estimate.json": "me"},
    ),
    "train": entry(
        {"seed": 17, "train": {"lr": 0.001, "lora": {"rank": 16}}},
        {"data/estimate/verdict.json": "v"},
        {"data/tuned": "t.dir", "metrics/train.json": "mt"},
    ),
    "evaluate": entry({"evaluate": {"rows": 2}}, {"data/tuned": "t.dir"}, {"metrics/evaluate.json": "mv"}),
}


def hash_inside(md5: str, path: PurePosixPath) -> str | None:
    """DVC's cache: two verdicts."""
    return {"e.dir": "v", "other.dir": "w"}.get(md5) if str(path) == "verdict.json" else None


@pytest.mark.parametrize(
    ("changes", "own"),
    [
        ({}, {"estimate", "train", "evaluate"}),
        ({"train": {"lr": 0.001, "lora": {"rank": 8}}}, set()),
        ({"train": {"lr": 0.01, "lora": {"rank": 16}}}, {"estimate"}),
        ({"train": {"lr": 0.001, "lora": {"rank": 16}, "new": 1}}, {"estimate"}),
        ({"evaluate": {"rows": 3}}, {"estimate", "train"}),
        ({"hardware": {}}, set()),
    ],
)
def test_a_stage_is_own_if_it_and_all_before_it_ran_with_the_parameters(changes, own):
    """Evaluate with its old parameters, of weights that were trained with others."""
    assert own_stages(LOCK, PARAMS | changes, hash_inside) == own


def test_what_an_earlier_stage_wrote_since_makes_a_stage_outdated():
    """`-S hardware.gpu=24GiB estimate`: train ran with the verdict of another GPU."""
    other = LOCK | {"estimate": entry({"hardware.gpu": "T4"}, {}, {"data/estimate": "other.dir"})}
    assert own_stages(other, PARAMS, hash_inside) == {"estimate"}
    assert own_stages(other, PARAMS, lambda *_: None) == set(LOCK), "a fresh clone has no cache to compare with"
    other = LOCK | {"train": entry({}, {}, {"data/tuned": "new.dir"})}
    assert own_stages(other, PARAMS, hash_inside) == {"estimate", "train"}


def test_files_of_own_stages():
    assert set(own_files(LOCK, PARAMS | {"evaluate": {}}, hash_inside)) == {
        *("data/estimate", "metrics/estimate.json", "data/tuned", "metrics/train.json")
    }
    assert list(own_files({}, PARAMS, hash_inside)) == []
