"""Two machines that do not have the same run, or do not meet: both end with one line. Both are this machine."""

import re
import shutil
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from threading import Thread

import psutil
import pytest

from lean_finetune.core.errors import UserError
from lean_finetune.distributed import launch
from lean_finetune.distributed.launch import DEFAULT_PORT, Node, NodeGroup
from stages.pin import main as pin
from tests.conftest import ROOT
from tests.distributed.launched import change, errors_of, made_a_step, planned, running
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


def free_port() -> int:
    """A port that nothing uses now."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


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


def meet(node: Node, seconds: float = 1.0) -> None:
    """Let a node meet the others."""
    NodeGroup(node, seconds)


def test_a_node_that_does_not_come_is_named_with_its_number():
    """Two machines with run.node_rank=0 each wait for node 1."""
    with pytest.raises(
        UserError, match="node 1 did not come to port .* start .* there with run.node_rank=1 and the same run"
    ):
        meet(Node(count=2, port=free_port()))


def test_nodes_with_another_number_of_nodes_are_refused():
    """One would train while the other waits for a third."""
    node = Node(count=2, port=free_port())
    with ThreadPoolExecutor(2) as pool:
        met = [pool.submit(meet, one) for one in (node, replace(node, rank=1, count=3))]
        first, second = (str(one.exception()) for one in met)
    assert "2 machines must start " in first and "; node 1 did not come to port " in first
    assert "3 machines must start " in second and "; node 0, 2 did not come to port " in second


def test_a_port_that_stays_closed_is_named_after_the_limit():
    """A wrong port, or a node 0 that nobody started, was waited for without end."""
    port = free_port()
    node = Node(rank=1, count=2, port=port, join_timeout_seconds=0.5)
    with pytest.raises(
        UserError,
        match=f"^run.rendezvous: .* within 0.5 s; got no answer at 127.0.0.1:{port} .*; start node",
    ):
        meet(node)


def test_node_0_may_come_late_within_the_limit():
    """It tokenizes first, for longer than connected nodes wait for each other."""
    node = Node(rank=1, count=2, port=free_port(), join_timeout_seconds=60)
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(meet, node)
        time.sleep(2)
        assert not early.done()
        meet(replace(node, rank=0))
        early.result()


def test_two_nodes_with_the_same_number_are_refused():
    """One would wait for a node that never comes."""
    node = Node(rank=1, count=3, port=free_port())
    with ThreadPoolExecutor(3) as pool:
        met = [pool.submit(meet, one) for one in (replace(node, rank=0), node, node)]
        refused = [str(one.exception()) for one in met]
    assert sum("run.node_rank: must differ between the nodes of a run; got 1 twice" in line for line in refused) == 1


@pytest.mark.parametrize("greeting", [b"", b"SSH-2.0-OpenSSH_9.6\r\n"])
def test_another_program_on_the_port_is_refused(monkeypatch: pytest.MonkeyPatch, greeting: bytes):
    """A hang, or a traceback of PyTorch's store."""
    monkeypatch.setattr(launch, "ANSWER_SECONDS", 1)
    with socket.create_server(("127.0.0.1", 0)) as server, ExitStack() as stack:

        def answer() -> None:
            with suppress(OSError):
                while True:
                    stack.enter_context(server.accept()[0]).sendall(greeting)

        Thread(target=answer, daemon=True).start()
        with pytest.raises(
            UserError, match="run.rendezvous: must be the address of node 0; another program answers at "
        ):
            meet(Node(rank=1, count=2, port=server.getsockname()[1]))


def test_an_address_that_is_not_known_is_refused():
    """A name with a typing error was waited for without end."""
    with pytest.raises(UserError, match="run.rendezvous: .* within 1 s; got no answer at node-a.invalid:29500 "):
        meet(Node(rank=1, count=2, host="node-a.invalid", port=DEFAULT_PORT))
