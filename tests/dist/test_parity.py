"""A run shared by several processes learns what one process learns."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.dist.world import ALONE
from tests.dist.cases import Case, learn
from tests.dist.group import Group, group_of

pytestmark = pytest.mark.multiprocess

LOSS, NORM, WEIGHTS = 1e-5, 1e-4, 1e-4
"""Largest differences after 20 steps in fp32, that of the weights as a share of what was learnt."""

MODES = ("ddp", "zero1", "zero2", "zero3")
METHODS = ("full", "lora", "qlora")
IDLE = (2, 1, 2, 2, 1)
"""Five micro-batches: of two processes one has nothing to do in the last turn, of four three have."""

Single = Callable[[Case], dict[str, Any]]


@pytest.fixture(scope="module")
def pair() -> Iterator[Group]:
    """Two processes."""
    with group_of(2) as group:
        yield group


@pytest.fixture(scope="module")
def single() -> Single:
    """Runs a case in this process; equal cases once."""
    known: dict[str, dict[str, Any]] = {}

    def of(case: Case) -> dict[str, Any]:
        key = repr(case)
        if key not in known:
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            outcome = learn(case, ALONE)
            torch.set_num_threads(threads)
            weights = {name: tensor.clone() for name, tensor in outcome.team.whole()}
            known[key] = {"losses": outcome.losses, "norms": outcome.norms, "weights": weights}
        return known[key]

    return of


def plain_of(case: Case) -> Case:
    """The same learning in one process, without what saves memory."""
    model = {key: value for key, value in case.model.items() if "ckpt" not in key}
    return replace(case, mode="none", sizes=(8,), flat=False, chunk=None, model=model, group_gpus=None)


def assert_alike(found: dict[str, Any], plain: dict[str, Any], start: dict[str, torch.Tensor]) -> None:
    """Losses, norms and weights agree; and something was learnt."""
    assert plain["losses"][-1] < plain["losses"][0] - 0.1
    assert found["losses"] == pytest.approx(plain["losses"], abs=LOSS, rel=0)
    assert found["norms"] == pytest.approx(plain["norms"], abs=NORM, rel=0)
    assert found["weights"].keys() == plain["weights"].keys() == start.keys()
    apart = torch.stack([(found["weights"][name] - plain["weights"][name]).norm() for name in start]).norm()
    learnt = torch.stack([(plain["weights"][name] - start[name]).norm() for name in start]).norm()
    assert apart <= WEIGHTS * learnt


def check(group: Group, single: Single, case: Case) -> None:
    plain = plain_of(case)
    start = single(replace(plain, steps=0))["weights"]
    assert_alike(group.learn(case), single(plain), start)


OPTIONS: dict[str, dict[str, Any]] = {
    "accumulation": {"sizes": IDLE},
    "chunk": {"sizes": (4, 4), "chunk": 16},
    "ckpt": {"sizes": (3, 5), "model": {"grad_ckpt": True}},
    "packed": {"sizes": IDLE, "flat": True},
    "all": {"sizes": IDLE, "flat": True, "chunk": 16, "model": {"grad_ckpt": True}},
}


def case_of(directory: Path, mode: str, method: str, option: str) -> Case:
    given = dict(OPTIONS[option])
    model = {"method": method, **given.pop("model", {})}
    return Case(directory=str(directory), mode=mode, model=model, **given)


@pytest.mark.parametrize(
    ("mode", "method", "option"),
    [
        ("ddp", "full", "all"),
        ("ddp", "qlora", "accumulation"),
        ("zero1", "full", "accumulation"),
        ("zero1", "lora", "chunk"),
        ("zero2", "full", "chunk"),
        ("zero2", "lora", "accumulation"),
        ("zero3", "full", "accumulation"),
        ("zero3", "qlora", "all"),
    ],
)
def test_two_processes_learn_what_one_learns(small_llama: Path, pair: Group, single: Single, mode, method, option):
    check(pair, single, case_of(small_llama, mode, method, option))


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "method", "option"), list(product(MODES, METHODS, OPTIONS)))
def test_every_mode_method_and_switch(small_llama: Path, pair: Group, single: Single, mode, method, option):
    check(pair, single, case_of(small_llama, mode, method, option))
