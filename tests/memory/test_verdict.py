"""The verdict: when a run fits, and what the one line says when it does not."""

from lean_finetune.core.units import GIB
from lean_finetune.memory.advice.search import Remedy
from lean_finetune.memory.advice.verdict import judge
from lean_finetune.memory.gpus import Device
from lean_finetune.memory.predict.peak import Prediction
from lean_finetune.memory.trace.memory_trace import Peak
from tests.memory.common import joined, shape


def prediction_of(gib: float) -> Prediction:
    peak = Peak(
        bytes=int(gib * GIB), by_category={"weights": int(gib * GIB) - 3 * GIB, "logits": 2 * GIB, "inputs": GIB}
    )
    small = Peak(bytes=GIB, by_category={"weights": GIB})
    return Prediction(
        by_phase={"forward": small, "backward": peak}, steps_of_peak=((shape(2, 128, 100),),), layers_traced="all"
    )


def gpu(gib: float, name: str = "card") -> Device:
    return Device(name=name, kind="cuda", memory_bytes=int(gib * GIB), compute_capability=(8, 0))


def remedy(flags: tuple[str, ...], peak_bytes: int, slowdown: float) -> Remedy:
    return Remedy(flags=flags, peak_bytes=peak_bytes, slowdown=slowdown, effect="none")


REMEDIES = [
    remedy(("bucket.max_tokens=512", "train.grad_ckpt=true"), 9 * GIB, 1.31),
    remedy(("train.optimizer=adamw_8bit",), 20 * GIB, 1.0),
    remedy(("train.precision=bf16",), 15 * GIB, 0.5),
    remedy(("train.method=qlora",), 4 * GIB, 0.7),
]


def test_headroom_decides_at_the_edge():
    """A run let through that fills the device to the last byte."""
    run = prediction_of(9.2)
    assert judge(run, gpu(10), [], headroom_percent=8.0, enforce=True).fits
    assert not judge(run, gpu(10), [], headroom_percent=8.1, enforce=True).fits


def test_the_context_has_room_whatever_the_headroom():
    """A small GPU, or no headroom: tensors told to fit where the CUDA context (525 MiB here) lies."""
    for gib, headroom in ((10, 0.0), (4, 8.0)):
        edge = gib - 525 / 1024
        assert judge(prediction_of(edge - 0.01), gpu(gib), [], headroom_percent=headroom, enforce=True).fits
        refused = judge(prediction_of(edge + 0.01), gpu(gib), [], headroom_percent=headroom, enforce=True)
        assert refused.state == "does not fit" and "less 525 MiB for a CUDA context" in str(refused.refusal)


def test_the_verdict_is_the_same_on_every_device_that_fits():
    """Looking at another GPU retrains."""
    run = prediction_of(9)
    verdicts = [judge(run, gpu(size, f"gpu{size}"), REMEDIES, headroom_percent=8.0, enforce=True) for size in (10, 80)]
    assert verdicts[0].as_json(None) == verdicts[1].as_json(None) == {"enforce": True, "refusal": None}


def test_a_refusal_tells_sizes_the_largest_parts_and_up_to_three_remedies():
    """A refusal that leaves the user alone; the remedy that changes least comes first."""
    verdict = judge(prediction_of(30), gpu(24, "RTX-4090"), REMEDIES, headroom_percent=8.0, enforce=True)
    assert not verdict.fits and verdict.state == "does not fit"
    assert verdict.refusal == (
        "hardware.gpu: predicted peak 30 GiB (in backward, micro-batch of 2 x 128 tokens) exceeds the 22.08 GiB usable "
        "on RTX-4090 (24 GiB less 8%); largest: weights 27 GiB, logits 2 GiB, inputs 1 GiB; would fit: "
        "-S bucket.max_tokens=512 -S train.grad_ckpt=true (9 GiB, 1.31x time); "
        "-S train.optimizer=adamw_8bit (20 GiB, 1.00x time); -S train.precision=bf16 (15 GiB, 0.50x time)"
    )


def test_a_run_that_leaves_less_than_the_headroom_is_told_apart_and_refused():
    """A tight fit told as hopeless, or let through to meet the CUDA context."""
    verdict = judge(prediction_of(9.4), gpu(10), [], headroom_percent=8.0, enforce=True)
    assert verdict.state == "tight" and not verdict.fits
    assert verdict.refusal is not None
    assert "(10 GiB less 8% of headroom, without which it would fit)" in verdict.refusal


def test_the_first_phase_that_is_too_much_and_its_joined_rows_are_named():
    """The user sent to backward where forward fails already."""
    peaks = {"forward": Peak(bytes=20 * GIB, by_category={"logits": 20 * GIB})}
    peaks["backward"] = Peak(bytes=30 * GIB, by_category={"logits": 30 * GIB})
    run = Prediction(by_phase=peaks, steps_of_peak=((joined((60, 40), 90),),), layers_traced="all")
    refusal = judge(run, gpu(16), [], headroom_percent=8.0, enforce=True).refusal
    assert refusal is not None
    assert "(in backward, too large from forward on, micro-batch of 2 rows packed into 100 tokens)" in refusal


def test_a_small_runs_refusal_is_told_in_mib():
    """`predicted peak 0.00 GiB exceeds the 0.00 GiB usable`."""
    peak = Peak(bytes=5 << 20, by_category={"weights": (4 << 20) + (1 << 19), "logits": 1 << 19})
    run = Prediction(by_phase={"backward": peak}, steps_of_peak=((shape(2, 128, 100),),), layers_traced="all")
    small = [remedy(("train.grad_ckpt=true",), 1 << 19, 1.3)]
    ram = Device(name="card", kind="cpu", memory_bytes=1 << 20, compute_capability=(0, 0))
    assert judge(run, ram, small, headroom_percent=8.0, enforce=True).refusal == (
        "hardware.gpu: predicted peak 5 MiB (in backward, micro-batch of 2 x 128 tokens) exceeds the 0.92 MiB usable "
        "on card (1 MiB less 8%); largest: weights 4.5 MiB, logits 0.5 MiB; would fit: -S train.grad_ckpt=true "
        "(0.5 MiB, 1.30x time)"
    )


def test_no_remedy_is_invented():
    """A switch recommended that does not fit either."""
    refusal = judge(prediction_of(30), gpu(2), [], headroom_percent=8.0, enforce=False).refusal
    assert refusal is not None and refusal.endswith(
        "no change of the known switches makes it fit: choose a larger device"
    )
