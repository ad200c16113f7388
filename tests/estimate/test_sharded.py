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
MODES = ("ddp", "zero1")


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


@pytest.mark.multiprocess
@pytest.mark.parametrize(("mode", "method", "steps"), list(product(MODES, ("full", "lora", "qlora"), STEPS)))
def test_prediction_equals_what_processes_count(small_llama: Path, pair: Group, mode, method, steps):
    check(pair, 2, small_llama, mode, steps, method=method)
