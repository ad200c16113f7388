"""Packed rows of hybrids on several GPUs: predictions per GPU compared with what real processes count."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from lean_finetune.config.model_families import families_that
from tests.distributed.group import Group, group_of
from tests.memory.predict.test_sharded import check
from tests.model.recurrent.test_packed_layers import saved
from tests.step.common import slow

pytestmark = pytest.mark.multiprocess

# Zamba2's layers share blocks: zero3 refuses that, and ddp their adapters, some of which get no gradient.
SHARES_BLOCKS = "zamba2"
SHARED = [family for family in families_that("packs_other_layers") if family != SHARES_BLOCKS]
CASES = [(*case, False) for case in product(SHARED, ("ddp", "zero3"), ("full", "lora"))]
CASES.append((SHARES_BLOCKS, "ddp", "full", False))
RECOMPUTED = [("qwen3_next", mode, method, True) for mode, method in product(("ddp", "zero3"), ("full", "qlora"))]
FAST = ("qwen3_5_text", "zero3", "lora", False)


@pytest.fixture(scope="module")
def pair() -> Iterator[Group]:
    """Two processes."""
    with group_of(2) as group:
        yield group


@pytest.mark.parametrize(
    ("family", "mode", "method", "recomputed"),
    [case if case == FAST else slow(*case) for case in (*CASES, *RECOMPUTED)],
)
def test_packed_hybrids_are_predicted_as_processes_count_them(
    tmp_path: Path, pair: Group, family: str, mode: str, method: str, recomputed: bool
):
    """Bands of the delta rule or states of Mamba beside gathered weights, traced with another allocation order."""
    check(pair, 2, saved(family, tmp_path), mode, "joined", method=method, grad_ckpt=recomputed)
