"""Counts of right verdicts, with which docs say how often `fits` was right."""

from benchmarks.verdict_counts import JudgedRow, count_verdicts
from cuda_memory.units import GIB
from lean_finetune.memory.advice.margins import State
from lean_finetune.memory.devices import resolve_gpu
from tests.memory.common import card


def test_only_fits_and_does_not_fit_can_be_right_or_wrong():
    """A tight run that ended counted as a wrong verdict, or a run that failed as a right one."""
    pairs: list[tuple[State, bool]] = [("fits", True), ("fits", True), ("fits", True), ("fits", False)]
    pairs += [("tight", True), ("tight", False), ("does not fit", False)]
    found = count_verdicts(pairs)
    assert (found.fits_right, found.fits_wrong, found.tight) == (3, 1, 2)
    assert (found.refused_right, found.refused_wrong) == (1, 0)
    assert found.share_of_fits == 0.75 and count_verdicts([]).share_of_fits == 1.0
    assert found.text == "`fits` was right for 3 of 4, `does not fit` for 1 of 1; 2 were `tight`"


def test_the_70b_run_that_failed_under_fsdp1_is_tight_and_others_fit():
    """72.6 GB of traced tensors said to fit an A100 of 85 GB, on which the run failed."""
    a100, _ = resolve_gpu("A100-80GB")
    failed = JudgedRow(predicted_bytes=72626466304, tier="tensors", device=a100, kind="tool_several_gpus", ran=False)
    ended = JudgedRow(predicted_bytes=61448125952, tier="tensors", device=a100, kind="tool_several_gpus", ran=True)
    assert (failed.verdict, ended.verdict) == ("tight", "fits")
    small = JudgedRow(predicted_bytes=9 * GIB, tier="process", device=card(8 * GIB), kind="tool_one_gpu", ran=False)
    assert small.verdict == "does not fit"
