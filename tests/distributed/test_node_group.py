"""Nodes of a run that do not meet: each ends with one line that names the other. All nodes are threads here."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from threading import Thread

import pytest

from lean_finetune.core.errors import UserError
from lean_finetune.distributed import launch
from lean_finetune.distributed.launch import DEFAULT_PORT, Node, NodeGroup
from tests.distributed.launched import free_port


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
    node = Node(count=2, port=free_port(), join_timeout_seconds=60)
    with ThreadPoolExecutor(2) as pool:
        met = [pool.submit(meet, one) for one in (node, replace(node, rank=1, count=3))]
        first, second = (str(one.exception()) for one in met)
    assert "2 machines must start " in first and "; node 1 did not come to port " in first
    assert "3 machines must start " in second and "; node 0, 2 did not come to port " in second


def test_a_node_that_came_late_ends_when_node_0_has_given_up():
    """A traceback: node 0 had waited for longer, and its store ended with it."""
    node = Node(rank=1, count=3, port=free_port(), join_timeout_seconds=60)

    def give_up() -> None:
        with suppress(UserError):
            meet(replace(node, rank=0))

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(give_up)
        with pytest.raises(UserError, match="run.nodes: 3 machines must start .*; node 2 did not come to port "):
            meet(node, 60)
        first.result()


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
        early = pool.submit(meet, node, 0.5)
        time.sleep(1)  # Longer than the timeout of connected nodes.
        assert not early.done()
        meet(replace(node, rank=0))
        early.result()


def test_two_nodes_with_the_same_number_are_refused():
    """One would wait for a node that never comes."""
    node = Node(rank=1, count=3, port=free_port(), join_timeout_seconds=60)
    with ThreadPoolExecutor(3) as pool:
        met = [pool.submit(meet, one) for one in (replace(node, rank=0), node, node)]
        refused = [str(one.exception()) for one in met]
    assert sum("run.node_rank: must differ between the nodes of a run; got 1 twice" in line for line in refused) == 1


@pytest.mark.parametrize("greeting", [b"", b"SSH-2.0-OpenSSH_9.6\r\n"])
def test_another_program_on_the_port_is_refused(monkeypatch: pytest.MonkeyPatch, greeting: bytes):
    """A hang, or a traceback of PyTorch's store."""
    monkeypatch.setattr(launch, "ANSWER_SECONDS", 1)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with ExitStack() as connections, suppress(OSError):
                while True:
                    connections.enter_context(server.accept()[0]).sendall(greeting)

        answering = Thread(target=answer)
        answering.start()
        try:
            with pytest.raises(
                UserError, match="run.rendezvous: must be the address of node 0; another program answers at "
            ):
                meet(Node(rank=1, count=2, port=server.getsockname()[1]))
        finally:  # The thread closes what it accepted.
            server.shutdown(socket.SHUT_RDWR)
            answering.join()


def test_an_address_that_is_not_known_is_refused():
    """A name with a typing error was waited for without end."""
    with pytest.raises(UserError, match="run.rendezvous: .* within 1 s; got no answer at node-a.invalid:29500 "):
        meet(Node(rank=1, count=2, host="node-a.invalid", port=DEFAULT_PORT))
