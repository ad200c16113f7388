"""Two machines that do not have the same run, or lose each other: both end with one line. Both are this machine."""

import re
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from stages.pin import main as pin
from tests.conftest import ROOT
from tests.distributed.launched import change, errors_of, free_port, made_a_step, planned, running
from tests.processes import wait_for
from tests.workspace import invoke

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

TIMEOUT_SECONDS = 20
ENDS_SECONDS = 300
"""Starting processes on two busy cores, the timeout, and what nodes wait for each other's answer."""


def change_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def change_code(root: Path) -> None:
    """Python finds the modules of the current directory first."""
    for package in ("cuda_memory", "lean_finetune"):
        shutil.copytree(ROOT / package, root / package)
    with open(root / "lean_finetune/step/training_step.py", "a") as file:
        file.write("\nCHANGED = True\n")


COPY_MODEL = r"error: model\.name: on node 1 \(.*model\.safetensors {}; copy it there from node 0$"
DIFFERENCES: dict[str, tuple[Callable[[Path], object], str]] = {
    "settings": (lambda root: change(root, train__lr=1e-3), 'train.lr: must be the same .*; got "auto" in process 0'),
    "restarts": (
        lambda root: change(root, run__max_restarts=1),
        "run.max_restarts: must be the same in all processes ",
    ),
    "processes": (
        lambda root: change(root, hardware__num_gpus=4),
        "hardware.num_gpus: must be the same in all processes ",
    ),
    "tokens": (lambda root: change_a_byte(root / "data/tokens/meta.json"), "tokens.meta.json: must be the same in all"),
    "code": (change_code, "lean_finetune/step/training_step.py: must be the same in all processes"),
    "model": (
        lambda root: change_a_byte(root / "model/model.safetensors"),
        COPY_MODEL.format("changed since it was pinned"),
    ),
    "weights": (lambda root: (root / "model/model.safetensors").unlink(), COPY_MODEL.format("is gone")),
    "inputs": (lambda root: shutil.rmtree(root / "data/batches"), "plan.arrow: is not on node 1 .*dvc pull"),
}


def two_copies(root: Path, **values: object) -> tuple[Path, Path]:
    """A run for two nodes with a model of its own, and its copy."""
    shutil.copytree(ROOT / "lean_finetune/tiny", root / "model")
    change(root, model__name="model")
    assert invoke(pin, "model").exit_code == 0
    given = {"run__rendezvous": f"127.0.0.1:{free_port()}", "run__rank_timeout_seconds": TIMEOUT_SECONDS, **values}
    planned(root, 2, "ddp", run__nodes=2, **given)
    other = root / "other-machine"
    shutil.copytree(root, other, symlinks=True)
    return root, other


@pytest.mark.parametrize("what", DIFFERENCES)
def test_a_difference_ends_both_machines_with_its_name(copy: Path, what: str):
    """Weights that differ between machines, or a wait for one that has ended."""
    roots = two_copies(copy)
    make_different, message = DIFFERENCES[what]
    make_different(roots[1])
    with ExitStack() as stack:
        launched = [stack.enter_context(running(root, PET_NODE_RANK=rank)) for rank, root in enumerate(roots)]
        assert [node.wait(ENDS_SECONDS) for node in launched] == [1, 1]
    (line,), (other,) = ([line for line in errors_of(root) if line.startswith("error: ")] for root in roots)
    assert line == other and re.search(message, line)
    assert not any((root / "data/tuned").exists() for root in roots)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_machine_ends_the_other_with_one_line_though_restarts_remain(copy: Path, lost: int):
    """Its agent would start processes that wait for those of the lost machine, or print a traceback."""
    roots = two_copies(copy, train__epochs=50, run__max_restarts=2)
    with ExitStack() as stack:
        launched = [stack.enter_context(running(root, PET_NODE_RANK=rank)) for rank, root in enumerate(roots)]
        wait_for(lambda: all(made_a_step(root) for root in roots), launched[0])
        killed = psutil.Process(launched[lost].pid)
        for process in (killed, *killed.children(recursive=True)):
            process.kill()
        assert launched[1 - lost].wait(ENDS_SECONDS) == 1, errors_of(roots[1 - lost])
    (line,) = (line for line in errors_of(roots[1 - lost]) if not line.startswith("train: node 1 of 2 waits"))
    assert line.startswith("error: ") and f"; the one that did not come: process {lost} on node {lost}" in line
