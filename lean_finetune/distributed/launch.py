"""Start a command in several processes by torchrun's agents, one on each node, with one output and one error message.

torchrun gives ranks, starts and watches the processes of a node, forwards signals, restarts, and names the error files.
Ours are three things: which node this is (`Node`), a wait for the others that names those that do not come
(`NodeGroup`), and one error for the user, made of the error files of all nodes (`launch`, and module `faults`).

Node 0 hosts a key-value store, torch.distributed's TCPStore, which torchrun's static rendezvous shares. Like all of
torch.distributed it has no authentication: use a private network.
"""

import json
import logging
import math
import os
import platform
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import psutil
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from cuda_memory.terminal import echo
from lean_finetune.config.schema import Params
from lean_finetune.core.errors import UserError
from lean_finetune.core.file_locks import locked_directory
from lean_finetune.core.signals import LAUNCHER, Interrupted
from lean_finetune.distributed.faults import (
    ERROR_FILE,
    RUN_ENDED,
    Ending,
    broken_connection,
    ended_key,
    endings_in,
    fault_of,
)
from lean_finetune.distributed.processes import listen_on_loopback

LOCAL = "127.0.0.1"
DEFAULT_PORT = 29500
"""Default port of node 0, the same as torchrun's."""
SLURM_PORTS = (20000, 10000)
"""First port of SLURM jobs, and their number: jobs that share a node get different ones."""
POLL_SECONDS = 0.2
ANSWER_SECONDS = 15
"""How long a node whose processes have ended waits for the others to say why theirs have."""
SECOND_RUN = "; a second run on these machines needs another port"
GRACE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""Environment variable of torchrun's agent: seconds from a signal until it kills the processes. After a fault of one
process, and in versions of torch without this variable, the others have 30 seconds."""
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Node:
    """This machine among those of the run."""

    rank: int = 0
    """From 0; node 0 writes the outputs."""
    count: int = 1
    host: str = LOCAL
    """Address of node 0, as this machine reaches it."""
    port: int = 0
    """Of the store on node 0; 0 = any free one, for a run on one machine."""
    join_timeout_seconds: float = math.inf
    """How long another node waits for node 0, which may still tokenize."""

    @classmethod
    def here(cls, params: Params, environment: Mapping[str, str] = os.environ) -> "Node":
        """Read section `run`, and for what is blank the environment of torchrun (`PET_…`) or of SLURM.

        Raises:
            UserError: the rank or the address of node 0 is not known, or there is no such node.
        """
        run = params.run
        if run.nodes == 1:
            return ONE_NODE
        ranks = (run.node_rank, environment.get("PET_NODE_RANK"), environment.get("SLURM_NODEID"))
        given = next((str(rank) for rank in ranks if rank not in (None, "")), "")
        if not given.isdecimal() or int(given) >= run.nodes:
            got = given or "nothing, and neither PET_NODE_RANK nor SLURM_NODEID is set"
            raise UserError(
                f"run.node_rank: must be the number of this machine, from 0 to {run.nodes - 1}, with "
                f"run.nodes={run.nodes}; got {got}; set it, start by srun, or set PET_NODE_RANK"
            )
        host, port = _endpoint(run.rendezvous or environment.get("PET_RDZV_ENDPOINT"), environment)
        rank = int(given)
        if rank and not host:
            raise UserError(
                f"run.rendezvous: must be the address of node 0 on the other nodes; got nothing on node {rank}; set it "
                f"to HOST or HOST:PORT (port {DEFAULT_PORT} unless given), start by srun, or set PET_RDZV_ENDPOINT"
            )
        return cls(
            rank=rank,
            count=run.nodes,
            host=host if rank else LOCAL,
            port=port,
            join_timeout_seconds=run.join_timeout_seconds,
        )


def _endpoint(given: str | None, environment: Mapping[str, str]) -> tuple[str, int]:
    """Address and port of node 0, from HOST, HOST:PORT or [IPv6]:PORT; of a SLURM job, its first machine."""
    if not given and (hosts := environment.get("SLURM_JOB_NODELIST")):
        job = environment.get("SLURM_JOB_ID") or "0"
        if not job.isdecimal():
            raise UserError(f"run.rendezvous: SLURM_JOB_ID must be a number; got {job!r}; set run.rendezvous=HOST:PORT")
        first, count = SLURM_PORTS
        host = re.sub(r",.*|\[([^\],-]+)[^\]]*\]", r"\1", hosts)  # rack[1-2]gpu[03-05,9]-ib,node7
        return host, first + int(job) % count
    found = re.fullmatch(r"(?:\[([^\[\]]+)\]|([^:\[\]\s]*))(?::(\d+))?", given or "")
    if found is None or (found[3] and not 0 < int(found[3]) < 2**16):
        raise UserError(
            f"run.rendezvous: must be HOST or HOST:PORT, an IPv6 address in brackets; got {given!r}; correct it"
        )
    return found[1] or found[2], int(found[3] or DEFAULT_PORT)


ONE_NODE = Node()


class NodeGroup:
    """The nodes of a run, connected through a store on node 0.

    torchrun's static rendezvous alone would count the nodes that come, and name none. Its dynamic one ("c10d") ranks
    them by address, and loads pickles from a store that anybody can write to.
    """

    def __init__(self, node: Node, timeout_seconds: float):
        """Open the store on node 0, and wait for the others.

        `timeout_seconds` is how long nodes that are connected wait for the others.

        Raises:
            UserError: nodes did not come, or have the same rank.
        """
        self.node, self._timeout = node, timeout_seconds
        self.store = self._reach_node_0() if node.rank else self._host()
        self.hosts = self._meet()

    def _host(self) -> dist.TCPStore:
        """The store on node 0; torchrun's agent in this process uses it too (`multi_tenant`)."""
        own: dict[str, Any] = {"port": self.node.port}
        if self.node.count == 1:  # Given only a port, the store listens on all interfaces, and lets anybody write.
            listener = socket.create_server((LOCAL, self.node.port))
            own = {"port": listener.getsockname()[1], "master_listen_fd": listener.detach()}
        timeout = timedelta(seconds=self._timeout)
        try:
            return dist.TCPStore(
                LOCAL, is_master=True, wait_for_workers=False, multi_tenant=True, timeout=timeout, **own
            )
        except RuntimeError:
            raise UserError(
                f"run.rendezvous: must have a free port on node 0; got {self.node.port}, which is in use on "
                f"{platform.node()}{SECOND_RUN}"
            ) from None

    def _reach_node_0(self) -> dist.TCPStore:
        """Connect to the store of node 0, which may start later."""
        node, start = self.node, time.monotonic()
        where = f"{node.host}:{node.port}"
        waits = (
            f"train: node {node.rank} of {node.count} waits up to {node.join_timeout_seconds:g} s for node 0 at {where}"
        )
        echo(waits, err=True)
        # A plain socket first: while TCPStore waits, it lets no signal through and prints a C++ stack for each attempt.
        while True:
            try:
                socket.create_connection((node.host, node.port), timeout=2).close()
                break
            except OSError as error:
                unknown = isinstance(error, socket.gaierror)  # A name with a typing error never comes.
                limit = self._timeout if unknown else node.join_timeout_seconds
                if time.monotonic() - start > limit:
                    raise UserError(
                        f"run.rendezvous: node 0 must answer within {limit:g} s; got no answer at {where} "
                        f"({error.strerror or error}); start node 0, open this port to {platform.node()}, correct the "
                        "address, or raise run.join_timeout_seconds"
                    ) from None
            time.sleep(POLL_SECONDS)
        timeout = timedelta(seconds=self._timeout)
        store = _bounded(lambda: dist.TCPStore(node.host, node.port, wait_for_workers=False, timeout=timeout))
        if store is None:
            raise UserError(
                f"run.rendezvous: must be the address of node 0; another program answers at {where}; correct it, or "
                "start again if node 0 was ending"
            )
        return store

    def _meet(self) -> list[str]:
        """Wait for all nodes; return their names by rank."""
        node = self.node
        if self.store.add(f"joined/{node.rank}", 1) > 1:
            raise UserError(
                f"run.node_rank: must differ between the nodes of a run; got {node.rank} twice; change it, or "
                f"start again if an earlier run of node 0 was still ending{SECOND_RUN}"
            )
        found = {node.rank: platform.node()}
        with suppress(RuntimeError):  # Node 0 has waited for longer, and given up.
            # Nodes with another run.nodes wait for each other, and say for how many.
            self._exchange(f"host of {node.count}", found, self._timeout)
        if absent := [rank for rank in range(node.count) if rank not in found]:
            raise UserError(
                f"run.nodes: {node.count} machines must start within run.rank_timeout_seconds={self._timeout:g}; "
                f"node {', '.join(map(str, absent))} did not come to port {self.store.port} of "
                f"{found.get(0, node.host)}; start `python -m stages.train` there with run.node_rank={absent[0]} and "
                "the same run.nodes, or check that its network reaches this port"
            )
        return [found[rank] for rank in range(node.count)]

    def _exchange(self, what: str, found: dict[int, Any], seconds: float) -> None:
        """Publish this node's value of `found`, and add those that the other nodes publish in time."""
        self.store.set(f"{what}/{self.node.rank}", json.dumps(found[self.node.rank]))
        until = time.monotonic() + seconds
        while len(found) < self.node.count and time.monotonic() < until:
            for rank in range(self.node.count):
                if rank not in found and self.store.check([key := f"{what}/{rank}"]):
                    found[rank] = json.loads(self.store.get(key))
            time.sleep(POLL_SECONDS)

    def restarted(self, attempt: int) -> bool:
        """End the other nodes' processes of the attempt before; return False if another node has given up."""
        self.store.set(ended_key(attempt - 1), "")
        return not self.store.check([RUN_ENDED])

    def end(self, endings: Mapping[int, Ending], per_node: int) -> UserError:
        """Exchange how the nodes' processes ended, and return the one error for all of them."""
        found: dict[int, Any] = {self.node.rank: {rank: asdict(ending) for rank, ending in endings.items()}}

        def exchange() -> None:
            self.store.set(RUN_ENDED, "")
            self._exchange("endings", found, ANSWER_SECONDS)

        _bounded(exchange)
        self.leave()
        # If the connection broke, those that had answered before count.
        everywhere = {int(rank): Ending(**one) for theirs in list(found.values()) for rank, one in theirs.items()}
        return fault_of(everywhere, self.hosts, per_node)

    def leave(self) -> None:
        """On node 0, wait shortly until the others need the store no more."""
        _bounded(lambda: self._exchange("left", {self.node.rank: True}, 0 if self.node.rank else ANSWER_SECONDS))


def _bounded(function: Callable[[], Result]) -> Result | None:
    """Call a function of the store; return None if it fails, or takes longer than nodes wait for each other.

    Without a connection, a call of the store ends after a quarter of an hour. A program that is no store may never
    answer.
    """
    results: list[Result] = []

    def call() -> None:
        with suppress(RuntimeError):
            results.append(function())

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(ANSWER_SECONDS + 1)
    return results[0] if results else None


def _interface_of(port: int) -> str:
    """The network interface over which the nodes have connected to the store."""
    links = psutil.Process().net_connections("tcp")
    addresses = {link.laddr.ip for link in links if link.raddr and port in (link.laddr.port, link.raddr.port)}
    own = {address.removeprefix("::ffff:").partition("%")[0] for address in addresses}  # IPv4 over an IPv6 socket
    interfaces = psutil.net_if_addrs().items()
    found = [name for name, known in interfaces if own & {one.address.partition("%")[0] for one in known}]
    return next((name for name in found if name != "lo"), "lo")  # Node 0 itself connects over "lo".


class NoRestart(Exception):
    """The processes are not started again: the fault would recur, or the run has ended on another node.

    torchrun's agent restarts after every fault; only an exception from a call between end and start stops it.
    """


class ErrorFiles(DefaultLogsSpecs):
    """Error files in the directory of a launch; torchrun asks for them each time before it starts the processes."""

    def __init__(self, directory: Path, group: NodeGroup):
        super().__init__(log_dir=os.devnull)  # No files but these.
        self._directory, self._group = directory, group

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Name the files; see the base class. Raises NoRestart."""
        if attempt := int(envs[0]["TORCHELASTIC_RESTART_COUNT"]):
            kinds = [ending.kind for ending in endings_in(self._directory).values()]
            stopped = kinds[:1] == ["stopped"] and len(kinds) == len(envs)  # Else the agent did, after a crash.
            lost_machine = attempt > 1 and "waited" in kinds  # Restarted processes waited in vain, too.
            if "error" in kinds or stopped or lost_machine or not self._group.restarted(attempt):
                raise NoRestart
            for file in self._directory.glob("*.json"):
                file.unlink()
        destination = super().reify(envs)
        for local_rank, environment in envs.items():
            file = self._directory / f"{environment['RANK']}.json"
            environment[ERROR_FILE] = destination.error_files[local_rank] = str(file)
        return destination


def launch(
    module: str,
    arguments: Sequence[str],
    *,
    processes: int,
    directory: Path,
    grace_seconds: float,
    node: Node = ONE_NODE,
    max_restarts: int = 0,
) -> None:
    """Run `python -m module` in several processes on this node, until the processes of all nodes have ended.

    Rank 0 writes to the terminal. The output of the others, and every traceback, goes to `<rank>.log` in a directory of
    this launch below `directory`; directories of earlier launches are removed.

    Args (those that their types do not explain):
        processes: on each node.
        grace_seconds: how long processes may take to end after a signal, and nodes to connect.
        max_restarts: how often torchrun's agent restarts the processes after a crash.

    Raises:
        UserError: a process failed, on any node; with its own message, or the path of its traceback.
        Interrupted: a signal came and was forwarded to all processes.
        SystemExit: with the code of a signal that a process has reported.
    """
    name = f"node{node.rank}-{uuid4().hex[:8]}" if node.count > 1 else uuid4().hex[:8]
    with locked_directory(directory, name, shared=False) as own:
        group = NodeGroup(node, grace_seconds)
        os.environ[LAUNCHER] = str(os.getpid())  # Processes end with this one, and leave their errors to it.
        os.environ.setdefault(GRACE, str(math.ceil(grace_seconds)))
        if node.count == 1:
            listen_on_loopback()
        elif sys.platform == "linux":  # Else gloo resolves this host's name, which may be unknown.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", _interface_of(group.store.port))
        config = LaunchConfig(
            min_nodes=node.count,
            max_nodes=node.count,
            nproc_per_node=processes,
            run_id="lean-finetune",  # The same on all nodes.
            rdzv_backend="static",  # See NodeGroup.
            rdzv_endpoint=f"{node.host}:{group.store.port}",
            rdzv_configs={"rank": node.rank, "timeout": math.ceil(grace_seconds)},
            local_addr=LOCAL,  # Else torchrun looks up the name of this host.
            max_restarts=max_restarts,
            logs_specs=ErrorFiles(own.resolve(), group),
        )
        ranks = range(node.rank * processes, (node.rank + 1) * processes)
        lost = dict.fromkeys(ranks, Ending(kind="lost", message=broken_connection(own)))
        signalled = None
        logging.disable(logging.CRITICAL)  # The agent's own messages; ours are below.
        try:
            elastic_launch(config, entrypoint=sys.executable)("-m", module, *arguments)
            return
        except SignalException as signal_to_agent:
            endings, signalled = endings_in(own), signal_to_agent.sigval
        except (ChildFailedError, NoRestart) as error:
            endings = endings_in(own, getattr(error, "failures", {})) or lost
        except dist.DistError:  # Before a restart, the agent could not reach node 0.
            endings = lost | endings_in(own)
        finally:
            logging.disable(logging.NOTSET)
        first = next((ending for ending in endings.values() if ending.kind not in ("lost", "ended")), None)
        if first is not None and first.kind == "stopped":  # All have stopped cleanly; rank 0 says so, on its node.
            group.leave()
            raise SystemExit(first.exit_code)
        if signalled is not None:
            group.leave()
            raise Interrupted(signalled)
        raise group.end(endings, processes)
