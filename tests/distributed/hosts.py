"""Two hosts on one machine: network namespaces joined by a veth pair, each with an address and a hostname of its own.

They need Linux, root and the commands `ip` and `unshare`. Removed at the end of the block, also after a failure, with
all processes inside. A slow link is two TUN devices between which a thread carries the packets: many kernels have no
netem, which delays packets for `tc`.
"""

import fcntl
import os
import random
import select
import shutil
import signal
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import psutil
import pytest

from tests.processes import run_bounded

DELAY_SECONDS, LOSS = 0.05, 0.01
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
"""Of Linux' if_tun.h."""


@dataclass(frozen=True)
class Host:
    """A network namespace."""

    namespace: str
    name: str
    """Its hostname."""
    address: str
    device: str
    """Its end of the link."""

    def command(self, *words: str) -> list[str]:
        """The command that runs `words` on this host."""
        rename = 'hostname "$0" && exec "$@"'
        return ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", rename, self.name, *words]

    def set_link(self, state: str) -> None:
        """Pull the cable (`down`), or plug it in again (`up`)."""
        _ip("-n", self.namespace, "link", "set", self.device, state)


def _ip(*words: str) -> None:
    run_bounded(["ip", *words], check=True)


def skip_without_hosts() -> None:
    """Skip the test where there are no network namespaces."""
    missing = [name for name in ("ip", "unshare") if shutil.which(name) is None]
    if sys.platform != "linux" or os.geteuid() != 0 or missing:
        pytest.skip(f"two hosts need Linux, root, and the commands ip and unshare; missing: {missing or 'root'}")
    probe = f"lf-{uuid4().hex[:6]}"
    made = run_bounded(["ip", "netns", "add", probe])
    if made.returncode:
        pytest.skip(f"two hosts need network namespaces; {made.stderr.strip()}")
    _ip("netns", "delete", probe)


@contextmanager
def two_hosts(*, slow: bool = False) -> Iterator[tuple[Host, Host]]:
    """Hosts `node-a` and `node-b`; a `slow` link delays packets by `DELAY_SECONDS` and loses some of them."""
    mark = uuid4().hex[:6]
    _remove_left_behind()
    a = Host(f"lf-{os.getpid()}-{mark}-a", "node-a", "10.213.0.1", f"lf{mark}a")
    b = Host(f"lf-{os.getpid()}-{mark}-b", "node-b", "10.213.0.2", f"lf{mark}b")
    with ExitStack() as stack:
        for host in (a, b):
            stack.callback(_remove, host.namespace)
            _ip("netns", "add", host.namespace)
        if slow:
            stack.enter_context(_slow_link(a, b))
        else:
            _ip("link", "add", a.device, "netns", a.namespace, "type", "veth", "peer", b.device, "netns", b.namespace)
        for host in (a, b):
            _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", host.device)
            _ip("-n", host.namespace, "link", "set", "lo", "up")
            host.set_link("up")
            names = Path("/etc/netns", host.namespace)  # `ip netns exec` lays its files over those of /etc.
            names.mkdir(parents=True)
            (names / "hosts").write_text(f"127.0.0.1 localhost\n{a.address} {a.name}\n{b.address} {b.name}\n")
        yield a, b


def _remove_left_behind() -> None:
    """Remove the namespaces of tests that were killed."""
    for line in run_bounded(["ip", "netns", "list"]).stdout.splitlines():
        namespace = line.split()[0]
        parts = namespace.split("-")
        if parts[0] == "lf" and len(parts) == 4 and not psutil.pid_exists(int(parts[1])):
            _remove(namespace)


def _remove(namespace: str) -> None:
    inside = run_bounded(["ip", "netns", "pids", namespace]).stdout
    for process in inside.split():
        with suppress(ProcessLookupError):
            os.kill(int(process), signal.SIGKILL)
    run_bounded(["ip", "netns", "delete", namespace])
    shutil.rmtree(Path("/etc/netns", namespace), ignore_errors=True)


@contextmanager
def _slow_link(a: Host, b: Host) -> Iterator[None]:
    """Join the hosts by two TUN devices and a thread."""
    ends = []
    for host in (a, b):
        ends.append(os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK))
        fcntl.ioctl(ends[-1], TUNSETIFF, struct.pack("16sH", host.device.encode(), IFF_TUN | IFF_NO_PI))
        _ip("link", "set", host.device, "netns", host.namespace)
    finished = threading.Event()
    thread = threading.Thread(target=_carry, args=(ends, finished))
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()
        for end in ends:
            os.close(end)


def _carry(ends: list[int], finished: threading.Event) -> None:
    """Carry packets from each device to the other one, late; lose `LOSS` of them."""
    waiting: deque[tuple[float, int, bytes]] = deque()
    chance = random.Random(0)
    while not finished.is_set():
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, end, packet = waiting.popleft()
            with suppress(OSError):  # The device is down.
                os.write(end, packet)
        for end in select.select(ends, [], [], 0.001)[0]:
            with suppress(OSError):
                packet = os.read(end, 65536)
                if chance.random() >= LOSS:
                    waiting.append((now + DELAY_SECONDS, ends[1 - ends.index(end)], packet))
