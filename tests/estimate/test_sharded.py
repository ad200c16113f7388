"""Runs that several GPUs share: predicted per GPU beside what real processes count, and what sharing saves."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from stages.estimate.predict import predict
from stages.model.load import read_config
from tests.dist.group import Group, group_of
from tests.estimate.common import CPU_TARGET
from tests.estimate.ranks import STEPS, shared_setting

TOLERATED_SHARE, TOLERATED_BYTES = 1e-3, 1536
MODES = ("ddp", "zero1", "zero2", "zero3")


@pytest.fixture(scope="module")
def pair() -> Iterator[Group]:
    """Two processes."""
    with group_of(2) as group:
        yield group


def check(group: Group, size: int, directory: Path, mode: str, steps: str, **changes: Any) -> None:
    """Every phase of the step, within the bound of one process."""
    setting = shared_setting(mode, size, steps, **changes)
    predicted = predict(read_config(directory), setting, STEPS[steps], CPU_TARGET)
    counted = group.ask("peaks", {"model": str(directory), "mode": mode, "steps": steps, "setting": changes})
    for phase, peak in predicted.by_phase.items():
        allowed = max(TOLERATED_SHARE * counted[phase], TOLERATED_BYTES)
        assert abs(peak.bytes - counted[phase]) <= allowed, (phase, peak.bytes - counted[phase], peak)


FAST = [("ddp", "full"), ("zero1", "lora"), ("zero2", "full"), ("zero3", "full"), ("zero3", "qlora")]
ALL = list(product(MODES, ("full", "lora", "qlora"), STEPS))


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("mode", "method", "steps"),
    [
        case if case[:2] in FAST and case[2] == "two turns" else pytest.param(*case, marks=pytest.mark.slow)
        for case in ALL
    ],
)
def test_prediction_equals_what_processes_count(small_llama: Path, pair: Group, mode, method, steps):
    """A buffer of DDP or FSDP2 that is traced unlike it is made, or a part that is counted whole."""
    check(pair, 2, small_llama, mode, steps, method=method)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_prediction_holds_for_groups_that_hold_the_same(small_llama: Path, method):
    """Sums between groups kept in buffers that are not traced."""
    with group_of(4) as four:
        for steps in STEPS:
            check(four, 4, small_llama, "hsdp", steps, method=method)
