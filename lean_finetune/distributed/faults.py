"""Errors of a run on several processes and nodes: tell causes from timeouts, and report one error for the run."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lean_finetune.core.errors import UserError
from lean_finetune.distributed.processes import World

HOSTS = "LEAN_FINETUNE_HOSTS"
"""Environment variable of processes: the names of all nodes, with commas."""
DID_NOT_COME = "; the one that did not come: "


class WaitTimedOut(UserError):
    """This process timed out while it waited for others; the cause is in one of them."""

    def __init__(self, message: str, world: World, *, absent: Sequence[int] = ()):
        hosts = os.environ.get(HOSTS, "").split(",")
        super().__init__(message + (DID_NOT_COME + named_ranks(absent, world.local_size, hosts) if absent else ""))


class ConnectionLost(Exception):
    """The connection broke while this process waited for others; the cause is in one of them."""


class OtherNodeEnded(Exception):
    """The processes of another node have ended, and this one did not notice: it hangs, or waits for them."""


EndProcess = Callable[[Exception], None]
"""Ends this process from any thread, as if its main thread had raised the fault."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """Why the processes of one node ended."""

    kind: Literal["cause", "waited", "lost"]
    """An error in this node's processes | a timeout while waiting for others | a broken connection to others."""
    message: str
    details: Sequence[str] = ()
    exit_code: int = UserError.exit_code
    waited: Sequence[int] = ()
    """Ranks that waited for others, or lost the connection to them."""
    ended: Sequence[int] = ()
    """Ranks that were ended as those of another node had; whether they waited or hung is not known."""


def fault_of(endings: Mapping[int, Ending], hosts: Sequence[str], processes: int) -> UserError:
    """The error of the run: a cause if a node had one, otherwise a timeout, with the ranks that did not respond."""
    kinds = ("cause", "waited", "lost")
    rank = min(endings, key=lambda node: (kinds.index(endings[node].kind), node))
    ending = endings[rank]
    message = ending.message
    if ending.kind == "cause":
        same = len({one.message for one in endings.values()}) == 1 and len(endings) == len(hosts)
        named = f"node {rank} ({hosts[rank]})" in message
        where = "" if len(hosts) == 1 or same or named else f" (on node {rank}, {hosts[rank]})"
        return UserError.of_code(ending.exit_code, message + where, *ending.details)
    waited = {one for each in endings.values() for one in each.waited}
    ended = {one for each in endings.values() for one in each.ended} - waited
    absent = [one for one in range(processes * len(hosts)) if one not in waited | ended]
    if not absent and ending.kind == "waited":
        absent = sorted(ended)
    if absent and DID_NOT_COME not in message:
        message += DID_NOT_COME + named_ranks(absent, processes, hosts)
    return UserError(message, *ending.details)


def named_ranks(ranks: Sequence[int], per_node: int, hosts: Sequence[str]) -> str:
    """Ranks in a message, with their nodes if there are several."""
    if len(hosts) < 2:
        return f"process {', '.join(map(str, ranks))}"
    by_node: dict[int, list[str]] = {}
    for rank in ranks:
        by_node.setdefault(rank // per_node, []).append(str(rank))
    return ", ".join(f"process {', '.join(own)} on node {node} ({hosts[node]})" for node, own in by_node.items())
