"""What would need less memory, with the bytes that it saves, most first."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from cuda_memory.origins import Category
from cuda_memory.recorded_state import expands
from cuda_memory.recording import Recording
from cuda_memory.remedies import EXPANDABLE, GRAD_CKPT, QLORA, REMEDIES, Remedy

REMEDY_SHARE = 0.05
"""Categories below this share of the peak get no remedy."""
FRAGMENTED_SHARE = 0.1
"""Of reserved memory: unused memory above this share is worth a remedy where no replay tells."""
REPLAYED_SHARE = 0.01
"""Of reserved memory: what a replay saves above this share is worth telling, since it costs nothing."""
UNUSED = "reserved but unused"
CHECKPOINTED, QUANTIZED = "utils/checkpoint.py", "bitsandbytes/functional.py"
"""Files in stacks of runs with checkpointing, and with quantised weights."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A remedy and what it saves."""

    parts: tuple[Category | str, ...]
    """Categories that it makes smaller."""
    remedy: Remedy
    saved_bytes: int
    basis: Literal["at most", "replayed"]
    """The remedy's share of these categories at the instant of interest | the difference of two replays."""


def advice_of(
    recording: Recording, by_category: Mapping[Category, int], allocated_bytes: int, reserved_bytes: int
) -> list[Advice]:
    """What would make the largest categories smaller, without what the stacks show to be in use."""
    in_use = _in_use(recording)
    saved, parts = Counter[str](), dict[str, list[Category]]()
    remedies: dict[str, Remedy] = {}
    for category, size in by_category.items():
        new = [each for each in REMEDIES.get(category, ()) if each.ours not in in_use]
        if new and size >= REMEDY_SHARE * allocated_bytes:
            remedy = new[0]
            remedies[remedy.ours] = remedy
            saved[remedy.ours] += int(remedy.share * size)
            parts.setdefault(remedy.ours, []).append(category)
    found = [
        Advice(parts=tuple(parts[ours]), remedy=remedies[ours], saved_bytes=size, basis="at most")
        for ours, size in saved.items()
    ]
    unused = reserved_bytes - allocated_bytes
    if unused > FRAGMENTED_SHARE * reserved_bytes and not expands(recording):
        found.append(Advice(parts=(UNUSED,), remedy=EXPANDABLE, saved_bytes=unused, basis="at most"))
    return ranked(found)


def replayed(advice: list[Advice], recording: Recording, baseline_bytes: int, expanding_bytes: int) -> list[Advice]:
    """The same, with what segments that expand save by replay: `baseline_bytes` are reserved without them."""
    others = [each for each in advice if each.remedy != EXPANDABLE]
    saved = baseline_bytes - expanding_bytes
    if expands(recording) or saved <= REPLAYED_SHARE * baseline_bytes:
        return others
    return ranked([*others, Advice(parts=(UNUSED,), remedy=EXPANDABLE, saved_bytes=saved, basis="replayed")])


def ranked(advice: list[Advice]) -> list[Advice]:
    """What saves most first."""
    return sorted(advice, key=lambda each: -each.saved_bytes)


def _in_use(recording: Recording) -> set[str]:
    """Remedies that the stacks show to be in use."""
    files = {frame.file for stack in recording.stacks for frame in stack}
    in_use = set()
    if any(file.endswith(CHECKPOINTED) for file in files):
        in_use.add(GRAD_CKPT.ours)
    if any(QUANTIZED in file for file in files):
        in_use.add(QLORA.ours)
    return in_use
