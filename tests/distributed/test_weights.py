"""Rows with weights on several processes are learnt as on one."""

from pathlib import Path

import pytest

from tests.distributed.group import Group
from tests.distributed.test_resume import LOSS, Runner, check_exact

pytestmark = pytest.mark.multiprocess


def test_two_processes_learn_what_one_learns(small_llama: Path, tmp_path: Path, pair: Group):
    """A mean over the weights of a process's own rows."""
    options = {"method": "lora", "weights": True}
    together = Runner(small_llama, tmp_path / "two", **options).part(pair, "ddp")
    alone = Runner(small_llama, tmp_path / "one", **options).part(pair, "none")
    plain = Runner(small_llama, tmp_path / "plain", method="lora").part(pair, "none")
    assert together["losses"] == pytest.approx(alone["losses"], abs=LOSS)
    assert together["losses"] != pytest.approx(plain["losses"], abs=100 * LOSS)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "method"), [("zero3", "full"), ("pp", "lora"), ("tp none", "lora")])
def test_weighted_rows_resume_to_the_bit(small_llama: Path, tmp_path: Path, pair: Group, mode, method):
    check_exact(pair, small_llama, tmp_path, mode, method=method, weights=True)
