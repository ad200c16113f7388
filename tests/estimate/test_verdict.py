"""The verdict: when a run fits, and what the one line says when it does not."""

from stages.estimate.devices import GIB, Device
from stages.estimate.predict import Prediction
from stages.estimate.switches import Switch
from stages.estimate.trace import Peak
from stages.estimate.verdict import judge


def prediction_of(gib: float) -> Prediction:
    peak = Peak(
        bytes=int(gib * GIB), by_category={"weights": int(gib * GIB) - 3 * GIB, "logits": 2 * GIB, "inputs": GIB}
    )
    small = Peak(bytes=GIB, by_category={"weights": GIB})
    return Prediction(by_phase={"forward": small, "backward": peak}, steps_of_peak=(), layers_traced="all")


def gpu(gib: float, name: str = "card") -> Device:
    return Device(name=name, kind="cuda", memory_bytes=int(gib * GIB), compute_capability=(8, 0))


SWITCHES = [
    Switch(label="current", flag=None, peak_bytes=30 * GIB),
    Switch(label="max_tokens=512", flag="bucket.max_tokens=512", peak_bytes=25 * GIB),
    Switch(label="grad_ckpt=true", flag="train.grad_ckpt=true", peak_bytes=9 * GIB),
    Switch(label="loss_chunk=512", flag="train.loss_chunk=512", peak_bytes=20 * GIB),
    Switch(label="precision=bf16", flag="train.precision=bf16", peak_bytes=15 * GIB),
    Switch(label="method=qlora", flag="train.method=qlora", peak_bytes=4 * GIB),
]


def test_headroom_decides_at_the_edge():
    """A run let through that fills the device to the last byte."""
    run = prediction_of(9.2)
    assert judge(run, gpu(10), [], headroom_percent=8.0, enforce=True).fits
    assert not judge(run, gpu(10), [], headroom_percent=8.1, enforce=True).fits


def test_the_verdict_is_the_same_on_every_device_that_fits():
    """Looking at another GPU retrains."""
    run = prediction_of(9)
    verdicts = [judge(run, gpu(size, f"gpu{size}"), SWITCHES, headroom_percent=8.0, enforce=True) for size in (10, 80)]
    assert verdicts[0].as_json() == verdicts[1].as_json() == {"enforce": True, "refusal": None}


def test_a_refusal_tells_sizes_the_largest_parts_and_up_to_three_remedies():
    """A refusal that leaves the user alone; the remedy that changes least comes first."""
    verdict = judge(prediction_of(30), gpu(24, "RTX-4090"), SWITCHES, headroom_percent=8.0, enforce=True)
    assert not verdict.fits
    assert verdict.refusal == (
        "hardware.gpu: predicted peak 30 GiB (in backward) exceeds the 22.08 GiB usable on RTX-4090 (24 GiB less "
        "8%); largest: weights 27 GiB, logits 2 GiB, inputs 1 GiB; would fit: -S train.grad_ckpt=true "
        "(9 GiB), -S train.loss_chunk=512 (20 GiB), -S train.precision=bf16 (15 GiB)"
    )


def test_a_small_runs_refusal_is_told_in_mib():
    """`predicted peak 0.00 GiB exceeds the 0.00 GiB usable`."""
    peak = Peak(bytes=5 << 20, by_category={"weights": (4 << 20) + (1 << 19), "logits": 1 << 19})
    run = Prediction(by_phase={"backward": peak}, steps_of_peak=(), layers_traced="all")
    small = [Switch(label="grad_ckpt=true", flag="train.grad_ckpt=true", peak_bytes=1 << 19)]
    assert judge(run, gpu(1 / 1024), small, headroom_percent=8.0, enforce=True).refusal == (
        "hardware.gpu: predicted peak 5 MiB (in backward) exceeds the 0.92 MiB usable on card (1 MiB less 8%); "
        "largest: weights 4.5 MiB, logits 0.5 MiB; would fit: -S train.grad_ckpt=true (0.5 MiB)"
    )


def test_no_remedy_is_invented():
    """A switch recommended that does not fit either."""
    refusal = judge(prediction_of(30), gpu(2), SWITCHES, headroom_percent=8.0, enforce=False).refusal
    assert refusal is not None and refusal.endswith(
        "no single switch makes it fit: combine several or choose a larger device"
    )
