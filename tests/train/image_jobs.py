"""Small training jobs over drawn images, and rows of text among them."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.synth import images
from lean_finetune.model.model_config import read_config
from lean_finetune.plan.batch_plan import Plan
from lean_finetune.step.token_rows import TokenRows
from lean_finetune.train.job import TrainJob
from stages.pin import main as pin
from stages.tokenize import main as tokenize
from tests.small_vision import vision_model
from tests.train.jobs import make_job, plan_of
from tests.workspace import invoke, lay_out

SHOWN = 24
"""Training rows with an image, which come before those of text."""
STEPS = np.arange(20).reshape(5, 2, 2).tolist()
"""Rows of the micro-batches of each step."""
MIXED = [
    [[0, 1], [24, 25], [2, 26], [3]],
    [[24, 26], [27]],
    [[27, 4], [5, 6], [25]],
    [[7], [8, 9]],
    [[24], [10], [26, 27], [11]],
]
"""The same with rows of text: micro-batches, turns of two processes, and a step without images."""


def image_workspace(root: Path, family: str = "qwen2_5_vl", **values: Any) -> Path:
    """Write tokens of drawn images and of text, and a small model of a family; `values` as of `lay_out`."""
    model = vision_model(root / "model", family, num_hidden_layers=3)  # Qwen3-VL adds features behind two of them.
    images.write(root / "shapes", train=SHOWN // 3, heldout=2, seed=0)
    texts = ("Who is there?", "Why?", "Is it late?", "What is a heron?")
    turns = [[{"role": "user", "content": text}, {"role": "assistant", "content": "Nobody knows."}] for text in texts]
    for name in ("train", "heldout"):
        with open(root / "shapes" / f"{name}.jsonl", "a") as file:
            file.writelines(json.dumps({"messages": turn}) + "\n" for turn in turns)
    sources = {"data__source": "shapes/train.jsonl", "data__heldout_source": "shapes/heldout.jsonl"}
    lay_out(root, **sources, data__heldout_fraction=0.0, model__name=str(model), **values)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        for command, arguments in ((pin, ["data"]), (pin, ["model"]), (tokenize, [])):
            result = invoke(command, *arguments)
            assert result.exit_code == 0, result.output
    return root


def job_of(root: Path, steps: Sequence[Sequence[Sequence[int]]] = STEPS, **changes: Any) -> TrainJob:
    """A job over the rows of a workspace, in micro-batches of these rows."""
    rows, heldout = (TokenRows(root / "data/tokens", side) for side in ("train", "heldout"))
    config = read_config(root / "model", whole=True)
    for one in (rows, heldout):
        one.attached = tuple(each.for_model(root / "model", config) for each in one.attached)
    plan: Plan = replace(plan_of(rows, steps), attached=rows.attached)
    own: dict[str, Any] = {"config": config, "measured_steps": frozenset(range(5)) - {1}}
    return make_job(root / "model", (rows, heldout), plan, **{**own, **changes})
