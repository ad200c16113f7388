"""Preferences: a step has the same loss, gradients, rewards and order in any micro-batches and on several processes."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lean_finetune.islands.objectives.registry import OBJECTIVES
from tests.distributed.cases import Case
from tests.distributed.conftest import Single
from tests.distributed.group import Group
from tests.distributed.test_parity import EXACT, check, plain_of
from tests.small_model import moved_adapter, spec_of
from tests.step.common import slow

pytestmark = pytest.mark.multiprocess

NAMES = [name for name, objective in OBJECTIVES.items() if objective.compares]
DIVISIONS: dict[str, dict[str, Any]] = {
    # One of two processes has no work in the last turn.
    "padded": {"sizes": (2, 4, 2)},
    "packed": {"sizes": (2, 4, 2), "flat": True, "chunk": 16},
    "ckpt": {"sizes": (4, 4), "chunk": 16, "model": {"grad_ckpt": True}},
}
ALL = list(product(NAMES, ("ddp", "zero3"), ("full", "lora", "qlora"), DIVISIONS))
FAST = [
    ("dpo", "ddp", "lora", "packed"),
    ("ipo", "zero3", "qlora", "ckpt"),
    ("orpo", "zero3", "full", "padded"),
    ("kto", "zero3", "lora", "padded"),
]


def case_of(directory: Path, name: str, mode: str, method: str, division: str) -> Case:
    given = dict(DIVISIONS[division])
    # A rate at which ipo, whose gradients are larger, does not make rounding grow.
    model = {"method": method, "objective": name, **given.pop("model", {})}
    return Case(directory=str(directory), mode=mode, model=model, steps=4, optim={"lr": 5e-4}, **given)


def check_preferences(group: Group, single: Single, case: Case) -> None:
    """Losses, weights and gradient norms are those of one process with one micro-batch; so are rewards and order."""
    results = check(group, single, case, plain_of(case), EXACT)
    found, expected = results["found"], results["expected"]
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-4)
    assert len(found["rewards"]) == case.steps and expected["losses"][-1] < expected["losses"][0]
    np.testing.assert_allclose(found["rewards"], expected["rewards"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "mode", "method", "division"), [one if one in FAST else slow(*one) for one in ALL])
def test_two_processes_prefer_what_one_prefers(small_llama, pair: Group, single: Single, name, mode, method, division):
    """A mean over a process's own pairs, a coefficient of a micro-batch, or a divergence of one process's answers."""
    check_preferences(pair, single, case_of(small_llama, name, mode, method, division))


COPY: dict[str, Any] = {"lora_modules_to_save": ["embed_tokens"]}
ROWS: dict[str, Any] = {"lora_trainable_tokens": [3, 9]}
REWARD: list[Any] = [
    ("new", "zero3", COPY),
    ("reward", "ddp", ROWS),
    *product(("new",), ("zero1", "zero2"), ({}, {"method": "full"})),
    *product(("new", "reward"), ("ddp", "zero1", "zero2", "zero3"), ({"method": "qlora"} | COPY, ROWS)),
    *product(("sft",), ("ddp", "zero1", "zero2", "zero3"), ({"method": "qlora"}, ROWS)),
]


@pytest.mark.parametrize(
    ("start", "mode", "model"), [*REWARD[:2], *(slow(*one) for one in REWARD[2:] if one not in REWARD[:2])]
)
def test_two_processes_train_the_reward_model_of_one(small_llama, tmp_path, pair, single, start, mode, model):
    """A head or an embedding of one process's rows, or an adapter that the second process does not go on from."""
    case = case_of(small_llama, "reward", mode, "lora", "padded")
    case = replace(case, model={**case.model, **model})
    if start != "new":  # The objective of an adapter that goes on.
        spec = spec_of(**{**case.model, "objective": start, "loss_chunk": None})
        case = replace(case, adapter=str(moved_adapter(small_llama, tmp_path / "start", spec)))
    check_preferences(pair, single, case)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_groups_of_processes_train_the_reward_model_of_one(small_llama, four: Group, single: Single, method):
    check_preferences(four, single, replace(case_of(small_llama, "reward", "hsdp", method, "padded"), group_gpus=2))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), [*product(NAMES, ("ddp", "zero3"))])
def test_four_processes_prefer_what_one_prefers(small_llama, four: Group, single: Single, name, mode):
    """One of four has no work."""
    check_preferences(four, single, case_of(small_llama, name, mode, "lora", "padded"))
