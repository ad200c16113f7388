"""The verdict: when a run fits, and what the one line says when it does not."""

import pytest

from cuda_memory.gpus import Device
from cuda_memory.units import GIB, MIB
from lean_finetune.memory.advice.search import Remedy
from lean_finetune.memory.advice.verdict import Verdict, judge
from lean_finetune.memory.predict.peak import Prediction
from lean_finetune.memory.trace.memory_trace import Peak
from tests.memory.common import card, joined, setting_of, shape


def prediction_of(gib: float, rows=None, forward_gib: float = 1) -> Prediction:
    size = int(gib * GIB)
    parts = {"weights": size - size // 15 - size // 30, "logits": size // 15, "inputs": size // 30}
    peak = Peak(bytes=size, by_category=parts)
    forward = Peak(bytes=int(forward_gib * GIB), by_category={"weights": int(forward_gib * GIB)})
    by_phase = {"forward": forward, "backward": peak}
    steps = ((rows or shape(2, 128, 100),),)
    return Prediction(setting=setting_of(), by_phase=by_phase, steps_of_peak=steps, layers_traced="all")


def verdict(run: Prediction, gpu: Device, remedies: list[Remedy] | None = None, headroom: float = 8.0) -> Verdict:
    return judge(run, gpu, remedies or [], headroom_percent=headroom, enforce=True)


def remedy(flags: tuple[str, ...], peak_bytes: int, slowdown: float) -> Remedy:
    return Remedy(flags=flags, peak_bytes=peak_bytes, slowdown=slowdown, effect="none")


REMEDIES = [
    remedy(("bucket.max_tokens=512", "train.grad_ckpt=true"), 9 * GIB, 1.31),
    remedy(("train.optimizer=adamw_8bit",), 20 * GIB, 1.0),
    remedy(("train.precision=bf16",), 15 * GIB, 0.5),
    remedy(("train.method=qlora",), 4 * GIB, 0.7),
]


def test_headroom_decides_at_the_edge():
    """A run accepted that fills the device to the last byte."""
    assert verdict(prediction_of(9.2), card(10 * GIB), headroom=8.0).fits
    assert not verdict(prediction_of(9.2), card(10 * GIB), headroom=8.1).fits


@pytest.mark.parametrize(("gib", "headroom"), [(10, 0.0), (4, 8.0)])
def test_the_context_has_room_whatever_the_headroom(gib, headroom):
    """A small GPU, or no headroom: tensors accepted in the memory of the CUDA context (525 MiB here)."""
    edge = gib - 525 / 1024
    assert verdict(prediction_of(edge - 0.01), card(gib * GIB), headroom=headroom).fits
    refused = verdict(prediction_of(edge + 0.01), card(gib * GIB), headroom=headroom)
    assert refused.state == "does not fit" and "less 525 MiB for a CUDA context" in str(refused.refusal)


def test_the_verdict_is_the_same_on_every_device_that_fits():
    """A prediction for another GPU changes verdict.json and retrains."""
    run = prediction_of(9)
    verdicts = [verdict(run, card(size * GIB, f"gpu{size}"), REMEDIES).as_json() for size in (10, 80)]
    assert verdicts[0] == verdicts[1] == {"enforce": True, "refusal": None}


def test_a_refusal_has_sizes_the_largest_parts_and_up_to_three_remedies():
    found = verdict(prediction_of(30), card(24 * GIB, "RTX-4090"), REMEDIES)
    assert found.state == "does not fit" and not found.fits
    assert found.refusal == (
        "hardware.gpu: predicted peak 30 GiB (in backward, micro-batch of 2 rows of 128 tokens) exceeds the "
        "22.08 GiB usable on RTX-4090 (24 GiB less 8%); largest: weights 27 GiB, logits 2 GiB, inputs 1 GiB; "
        "would fit: "
        "-S bucket.max_tokens=512 -S train.grad_ckpt=true (9 GiB, 1.31x time); "
        "-S train.optimizer=adamw_8bit (20 GiB, 1.00x time); -S train.precision=bf16 (15 GiB, 0.50x time)"
    )


def test_a_run_that_leaves_less_than_the_headroom_is_tight_and_refused():
    """A tight fit refused as if nothing helped, or accepted although the CUDA context needs the memory."""
    found = verdict(prediction_of(9.4), card(10 * GIB))
    assert found.state == "tight" and not found.fits
    assert "(10 GiB less 8% of headroom, without which it would fit)" in str(found.refusal)


def test_the_first_phase_that_is_too_large_and_its_joined_rows_are_named():
    """The user sent to backward where forward fails already."""
    refusal = verdict(prediction_of(30, joined((60, 40), 90), forward_gib=20), card(16 * GIB)).refusal
    assert "(in backward, too large from forward on, micro-batch of 2 rows packed into 100 tokens)" in str(refusal)
    assert str(refusal).endswith("no change of the known switches makes it fit: choose a larger device")


def test_a_small_run_is_refused_in_mib():
    """`predicted peak 0.00 GiB exceeds the 0.00 GiB usable`."""
    ram = Device(name="card", kind="cpu", memory_bytes=MIB, compute_capability=(0, 0))
    refusal = str(verdict(prediction_of(5 / 1024, forward_gib=0.001), ram).refusal)
    assert "predicted peak 5 MiB " in refusal and "the 0.92 MiB usable on card (1 MiB less 8%)" in refusal
