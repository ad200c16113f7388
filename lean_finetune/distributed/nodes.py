"""The machines (nodes) of a run: the rank of this one, the rendezvous with the others, and one error for all.

Node 0 hosts a key-value store, torch.distributed's TCPStore, which torchrun's static rendezvous shares. Like all of
torch.distributed it has no authentication: use a private network.
"""

import json
import math
import os
import platform
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psutil
import torch.distributed as dist

from lean_finetune.core.errors import UserError
from lean_finetune.distributed.faults import Ending, fault_of
from lean_finetune.distributed.processes import ended_key

if TYPE_CHECKING:
    from lean_finetune.config.schema import Params

LOCAL = "127.0.0.1"
DEFAULT_PORT = 29500
"""Default port of node 0, the same as torchrun's."""
SLURM_PORTS = (20000, 10000)
"""First port of SLURM jobs, and their number: jobs that share a node get different ones."""
POLL_SECONDS = 0.2
ANSWER_SECONDS = 15
"""How long a node whose processes have ended waits for the others to say why theirs have."""
SECOND_RUN = "; a second run on these machines needs another port"


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
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Parameters that must be equal on all nodes; checked before processes start."""

    @classmethod
    def here(cls, params: "Params", environment: Mapping[str, str] = os.environ) -> "Node":
        """Read section `run`, and for what is blank the environment of torchrun (`PET_…`) or of SLURM.

        Raises:
            UserError: the rank or the address of node 0 is not known, or there is no such node.
        """
        run = params.run
        settings = {"run.nodes": run.nodes, "hardware.num_gpus": params.hardware.num_gpus}
        if run.nodes == 1:
            return cls(settings=settings)
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
            settings=settings | {"run.max_restarts": run.max_restarts},
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


class NodeGroup:
    """The nodes of a run, connected through a store on node 0."""

    def __init__(self, node: Node, timeout_seconds: float, notify: Callable[[str], None]):
        """Open the store on node 0, and wait for the others.

        `timeout_seconds` is how long nodes that are connected wait for the others.

        Raises:
            UserError: nodes did not come, have the same rank, or have other settings.
        """
        self.node, self._timeout = node, timeout_seconds
        self._store = self._open(notify)
        self.port = self._store.port
        self.hosts = [platform.node()]
        self.interface = "lo"
        if node.count > 1:
            self._meet()

    def _open(self, notify: Callable[[str], None]) -> dist.TCPStore:
        node = self.node
        timeout = timedelta(seconds=self._timeout)
        if not node.rank:
            own: dict[str, Any] = {"port": node.port}
            if node.count == 1:  # Given only a port, the store listens on all interfaces, and lets anybody write.
                listener = socket.create_server((LOCAL, node.port))
                own = {"port": listener.getsockname()[1], "master_listen_fd": listener.detach()}
            try:
                return dist.TCPStore(
                    LOCAL, is_master=True, wait_for_workers=False, multi_tenant=True, timeout=timeout, **own
                )
            except RuntimeError:
                raise UserError(
                    f"run.rendezvous: must have a free port on node 0; got {node.port}, which is in use on "
                    f"{platform.node()}{SECOND_RUN}"
                ) from None
        where, limit, waits, start = f"{node.host}:{node.port}", node.join_timeout_seconds, False, time.monotonic()
        while True:  # A plain socket, since TCPStore would not let signals through.
            try:
                socket.create_connection((node.host, node.port), timeout=2).close()
                break
            except socket.gaierror as error:
                if time.monotonic() > start + self._timeout:
                    raise UserError(
                        f"run.rendezvous: must be the address of node 0; {platform.node()} does not know {node.host} "
                        f"({error.strerror}); correct it"
                    ) from None
            except OSError as error:
                if time.monotonic() > start + limit:
                    raise UserError(
                        f"run.join_timeout_seconds: node 0 must answer within {limit:g} s; nothing answers at {where} "
                        f"({error.strerror or error}); start node 0, open this port to {platform.node()}, correct "
                        "run.rendezvous, or raise the limit"
                    ) from None
            if not waits:
                notify(f"train: node {node.rank} of {node.count} waits up to {limit:g} s for node 0 at {where}")
                waits = True
            time.sleep(POLL_SECONDS)
        stores: list[dist.TCPStore] = []

        def connect() -> None:
            with suppress(RuntimeError):
                stores.append(dist.TCPStore(node.host, node.port, wait_for_workers=False, timeout=timeout))

        _bounded(connect)
        if not stores:
            raise UserError(
                f"run.rendezvous: must be the address of node 0; another program answers at {where}; correct it, or "
                "start again if node 0 was ending"
            )
        return stores[0]

    def _meet(self) -> None:
        node, store = self.node, self._store
        if store.add(f"nodes/{node.rank}/joined", 1) > 1:
            raise UserError(
                f"run.node_rank: must differ between the nodes of a run; got {node.rank} twice; change it, or "
                f"start again if an earlier run of node 0 was still ending{SECOND_RUN}"
            )
        here = {"host": platform.node(), "settings": node.settings}
        if node.rank:
            here["address"] = _address_towards(node.host, node.port)
        store.set(f"nodes/{node.rank}", json.dumps(here))
        found: dict[int, dict[str, Any]] = {}
        until = time.monotonic() + self._timeout
        while absent := [rank for rank in range(node.count) if rank not in found]:
            for rank in absent:
                if store.check([f"nodes/{rank}"]):
                    found[rank] = json.loads(store.get(f"nodes/{rank}"))
                    _refuse_other_settings(found)
            if time.monotonic() > until:
                numbers = ", ".join(str(rank) for rank in absent)
                first = found[0]["host"] if 0 in found else node.host
                raise UserError(
                    f"run.nodes: {node.count} machines must start within run.rank_timeout_seconds={self._timeout:g}; "
                    f"node {numbers} did not come to port {self.port} of {first}; "
                    f"start `python -m stages.train` there with run.node_rank={absent[0]}, or check that its network "
                    "reaches this port"
                )
            time.sleep(POLL_SECONDS)
        self.hosts = [found[rank]["host"] for rank in range(node.count)]
        own = here["address"] if node.rank else _address_towards(found[1]["address"], self.port)
        self.interface = _interface_of(str(own))

    def end(self, ending: Ending, processes: int, attempt: int) -> UserError:
        """Exchange why the nodes' processes ended, and return the one error for all of them."""
        endings: dict[int, Ending] = {self.node.rank: ending}
        if self.node.count > 1:
            _bounded(self._exchange, ending, attempt, endings)
            self.leave()
        return fault_of(dict(endings), self.hosts, processes)

    def _exchange(self, ending: Ending, attempt: int, endings: dict[int, Ending]) -> None:
        """Publish how this node ended, and collect the endings of the others in order of arrival."""
        mine, store = self.node.rank, self._store
        until = time.monotonic() + ANSWER_SECONDS
        with suppress(RuntimeError):  # The connection broke.
            store.set(f"nodes/{mine}/ending", json.dumps(asdict(ending)))
            store.set(ended_key(attempt), "")
            while time.monotonic() < until and len(endings) < self.node.count:
                for rank in range(self.node.count):
                    if rank not in endings and store.check([f"nodes/{rank}/ending"]):
                        endings[rank] = Ending(**json.loads(store.get(f"nodes/{rank}/ending")))
                time.sleep(POLL_SECONDS)

    def leave(self) -> None:
        """On node 0, wait shortly until the others need the store no more."""
        if self.node.count > 1:
            _bounded(self._leave)

    def _leave(self) -> None:
        until = time.monotonic() + ANSWER_SECONDS
        with suppress(RuntimeError):  # The connection broke.
            left = self._store.add("nodes/left", 1)
            while not self.node.rank and left < self.node.count and time.monotonic() < until:
                time.sleep(POLL_SECONDS)
                left = self._store.add("nodes/left", 0)


def _bounded(function: Callable[..., None], *arguments: Any) -> None:
    """Call a function with the timeout that nodes have for each other.

    Without a connection, a call of the store ends after a quarter of an hour.
    """
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    thread.start()
    thread.join(ANSWER_SECONDS + 1)


def _refuse_other_settings(found: Mapping[int, Mapping[str, Any]]) -> None:
    """Raise UserError if a node has other settings than node 0."""
    for rank, theirs in found.items():
        for name, value in found.get(0, theirs)["settings"].items():
            if (other := theirs["settings"].get(name)) != value:
                raise UserError(
                    f"{name}: must be the same on all nodes of a run; got {value} on node 0 ({found[0]['host']}) and "
                    f"{other} on node {rank} ({theirs['host']}); copy params.yaml from node 0"
                )


def _address_towards(host: str, port: int) -> str:
    """The local address that routes to another machine; sends nothing."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _interface_of(address: str) -> str:
    """The network interface that has an address."""
    for name, addresses in psutil.net_if_addrs().items():
        if address in [one.address.partition("%")[0] for one in addresses]:
            return name
    raise UserError(f"run.rendezvous: no network interface of this machine has the address {address}")
