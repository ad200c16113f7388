"""Rows with images on several GPUs: predictions of every process against what it counts."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from lean_finetune.images.attachment import ImageShape
from lean_finetune.memory.predict.peak import predict
from lean_finetune.memory.predict.traced_step import TracedModel, TracedSteps
from lean_finetune.memory.trace.known_images import KnownImages
from lean_finetune.model.model_config import read_config
from tests.distributed.group import Group, group_of
from tests.distributed.image_rows import inputs_of
from tests.distributed.test_images import MODES, TRAINED
from tests.kit.estimate_cpu import without_onednn
from tests.memory.common import CPU_TARGET, shape
from tests.memory.predict.test_sharded import TOLERATED_BYTES, TOLERATED_SHARE
from tests.memory.ranks import do_image_peaks, shared_setting
from tests.small_vision import FAMILIES, adapted_parts, vision_model
from tests.step.common import slow

pytestmark = pytest.mark.multiprocess

SHOWN = replace(shape(3, 160, 200), attached=(ImageShape(sizes=(((100, 200),), ((60, 60), (112, 56)), ())),))
FEW = replace(shape(2, 128, 100), attached=(ImageShape(sizes=(((120, 90),), ())),))
TEXT = shape(3, 96, 150)
# Turns of both with images, of one of them in each, of none.
BOTH, FIRST, SECOND, NONE = (SHOWN, FEW), (SHOWN, TEXT), (TEXT, FEW), (TEXT, TEXT)


def steps_of(rank: int, *, together: bool) -> TracedSteps:
    """The micro-batches of one of two processes."""
    return tuple(
        tuple(
            replace(turn[rank], attached=(ImageShape(beside=True),))
            if together and not turn[rank].attached and turn[1 - rank].attached
            else turn[rank]
            for turn in step
        )
        for step in ((FIRST, SECOND), (BOTH,), (NONE,))
    )


@pytest.fixture(scope="module")
def pair() -> Iterator[Group]:
    """Two processes."""
    with group_of(2) as group:
        yield group


CASES: list[tuple[str, str, str, str, bool]] = [
    *product(("qwen2_5_vl",), MODES, ("full",), ("frozen", "full"), (False,)),
    *product(("qwen2_5_vl",), MODES, ("lora", "qlora"), ("frozen", "lora"), (False, True)),
    *product(FAMILIES, ("ddp", "zero3"), ("lora",), ("frozen", "lora"), (True,)),
    *product(FAMILIES, ("ddp", "zero3"), ("full",), ("full",), (False,)),
    *product(("qwen2_5_vl",), MODES, ("lora", "qlora"), ("full projector", "full tower", "full"), (True,)),
    *product((one for one in FAMILIES if one != "qwen2_5_vl"), ("ddp", "zero3"), ("lora",), ("full",), (True,)),
]
FIRST_OF_ONE = ("internvl", "granite4_vision")
"""Families with such parameters: the class token and positions of a tower, the queries of a projector."""
FAST = [("qwen2_5_vl", "zero3", "lora", "lora", True)]


@pytest.mark.parametrize(
    ("family", "mode", "method", "trained", "ckpt"),
    [case if case in FAST else slow(*case) for case in dict.fromkeys(CASES)],
)
def test_every_process_counts_what_is_predicted(tmp_path, pair: Group, family, mode, method, trained, ckpt):
    """A tower that runs beside another process's and is counted nowhere, or gathered layers that outlive it."""
    directory = vision_model(tmp_path / family, family)
    changes: dict[str, Any] = adapted_parts(family, {"method": method, **TRAINED[trained], "grad_ckpt": ckpt})
    setting = shared_setting(mode, 2, "two turns", **changes)
    steps = tuple(steps_of(rank, together=setting.train.runs_towers_together) for rank in range(2))
    counted = pair.ask(do_image_peaks, directory, setting, steps)
    # Predicted is the process that updates most, and either may have either's micro-batches. Of parameters whose first
    # dimension is 1 the first process has the only shard.
    if mode == "zero1" or (family in FIRST_OF_ONE and (mode, method) == ("zero3", "full")):
        by_rank = [pair.ask(do_image_peaks, directory, setting, (own, own)) for own in steps]
        counted = [{phase: max(one[phase] for one in found) for phase in found[0]} for found in by_rank]
    config, images = read_config(directory, whole=True), KnownImages(inputs_of(str(directory)))
    with without_onednn():  # As in the processes: it embeds patches otherwise.
        predicted = [predict(TracedModel(config, setting, CPU_TARGET, images), own).by_phase for own in steps]
    for rank, phase in product(range(2), predicted[0]):
        found, peak = counted[rank][phase], predicted[rank][phase]
        allowed = max(TOLERATED_SHARE * found, TOLERATED_BYTES)
        assert abs(peak.bytes - found) <= allowed, (rank, phase, peak.bytes - found, found, peak)
