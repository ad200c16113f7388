"""Whether a run fits its device, and what would make it fit."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stages.estimate.devices import GIB, Device
from stages.estimate.predict import Prediction
from stages.estimate.switches import Switch

LARGEST_CATEGORIES = 3
MOST_REMEDIES = 3


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What train obeys. It says nothing of the device when the run fits, so another device does not retrain."""

    fits: bool
    refusal: str | None
    """One line: prediction, capacity, where the bytes are, what would fit; None when the run fits."""

    def as_json(self) -> dict[str, Any]:
        """The content of verdict.json."""
        return {"fits": self.fits, "refusal": self.refusal}


def usable_bytes(device: Device, headroom_percent: float) -> int:
    """The device's memory less what is kept free."""
    return int(device.memory_bytes * (1.0 - headroom_percent / 100.0))


def judge(prediction: Prediction, device: Device, headroom_percent: float, switches: Sequence[Switch]) -> Verdict:
    """Hold a prediction against a device; `switches` are the cheaper settings that were traced too."""
    usable = usable_bytes(device, headroom_percent)
    peak = prediction.peak
    if peak.bytes <= usable:
        return Verdict(fits=True, refusal=None)
    largest = sorted(peak.by_category.items(), key=lambda item: -item[1])[:LARGEST_CATEGORIES]
    parts = ", ".join(f"{category} {in_gib(size)}" for category, size in largest)
    fitting = sorted((s for s in switches if s.flag and s.peak_bytes <= usable), key=lambda s: -s.peak_bytes)
    remedies = ", ".join(f"-S {s.flag} ({in_gib(s.peak_bytes)})" for s in fitting[:MOST_REMEDIES])
    return Verdict(
        fits=False,
        refusal=(
            f"predicted peak {in_gib(peak.bytes)} in {prediction.worst_phase} exceeds the {in_gib(usable)} usable on "
            f"{device.name} ({in_gib(device.memory_bytes)} less {headroom_percent:g}% headroom); largest: {parts}; "
            + (
                f"would fit: {remedies}"
                if remedies
                else "no single switch makes it fit: combine them or take a larger GPU"
            )
        ),
    )


def in_gib(size: int) -> str:
    """Bytes as GiB for people."""
    return f"{size / GIB:.2f} GiB"
