"""Rows with images: several processes learn what one learns, also where one of them has no image."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.cases import Case
from tests.distributed.conftest import Single
from tests.distributed.group import Group
from tests.distributed.test_parity import EXACT, check, same_batches
from tests.small_vision import FAMILIES, vision_model
from tests.step.common import slow

pytestmark = pytest.mark.multiprocess

TRAINED: dict[str, dict[str, Any]] = {
    "frozen": {},
    "full": {"vision": "full", "projector": "full"},
    "lora": {"vision": "lora", "projector": "lora"},
    "projector": {"projector": "lora"},
    "full projector": {"projector": "full"},
    "full tower": {"vision": "full"},
}
SWITCHES: list[tuple[str, str, bool]] = [
    *product(("full",), ("frozen", "full"), (False,)),
    *product(("lora", "qlora"), ("frozen", "lora"), (False, True)),
    ("lora", "projector", False),
    ("lora", "full projector", False),
    ("qlora", "full projector", True),
    ("lora", "full", False),
    ("qlora", "full tower", True),
]
"""Method, what of the tower is trained, and whether layers are recomputed."""
TURNS = (2, 1, 2, 1, 1, 1)
"""Rows of each micro-batch. Of two processes, both have images in one turn, and one of them in the last."""
LAST_WITHOUT = TURNS[:-1]
"""The same, without images in the last turn."""
MODES = ("ddp", "zero1", "zero2", "zero3")
FAST = [("zero3", ("lora", "lora", False), TURNS), ("ddp", ("full", "full", False), LAST_WITHOUT)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Small models by family, made as they are asked for."""

    class Made(dict[str, Path]):
        def __missing__(self, family: str) -> Path:
            self[family] = vision_model(tmp_path_factory.mktemp(family) / family, family)
            return self[family]

    yield Made()


def case_of(directory: Path, mode: str, method: str, trained: str, ckpt: bool, **changes: Any) -> Case:
    model = {"method": method, **TRAINED[trained], "grad_ckpt": ckpt}
    case = {"sizes": TURNS, "chunk": 16, "steps": 4, "images": True, **changes}
    return Case(directory=str(directory), mode=mode, model=model, **case)


@pytest.mark.parametrize(
    ("mode", "switches", "sizes"),
    [one if one in FAST else slow(*one) for one in product(MODES, SWITCHES, (TURNS, LAST_WITHOUT))],
)
def test_two_processes_learn_what_one_learns(models, pair: Group, single: Single, mode, switches, sizes):
    """A process without an image that does not take part in the tower, or sums gradients in another order.

    There are turns of both processes with images, of one of them, and of none; and steps without any.
    """
    case = case_of(models["qwen2_5_vl"], mode, *switches, sizes=sizes)
    check(pair, single, case, same_batches(case), EXACT)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "mode"), list(product(FAMILIES, ("ddp", "zero3"))))
def test_every_family_learns_on_two_processes(models, pair: Group, single: Single, family, mode):
    """Features that enter the decoder at several layers, or a tower with other parts."""
    case = case_of(models[family], mode, "full", "full", False)
    check(pair, single, case, same_batches(case), EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 1, 1, 1, 2, 1), LAST_WITHOUT])
@pytest.mark.parametrize("switches", [("full", "full", False), ("lora", "lora", True), ("qlora", "frozen", False)])
def test_groups_of_processes_learn_what_one_learns(models, four: Group, single: Single, switches, sizes):
    """Gradients of a tower that one group has summed, and the step's last turn does not reach."""
    case = case_of(models["qwen2_5_vl"], "hsdp", *switches, group_gpus=2, sizes=sizes)
    check(four, single, case, same_batches(case), EXACT)
