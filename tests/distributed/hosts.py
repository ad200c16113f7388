"""Two hosts on one machine: network namespaces joined by a veth pair, each with an address and a hostname of its own.

They need Linux, root and the commands `ip` and `unshare`; `tc` too for a slow link. Removed at the end of the block,
also after a failure, with all processes inside.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from uuid import uuid4

import pytest


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
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def skip_without_hosts(*commands: str) -> None:
    """Skip the test where there are no network namespaces."""
    missing = [name for name in ("ip", "unshare", *commands) if shutil.which(name) is None]
    if sys.platform != "linux" or os.geteuid() != 0 or missing:
        pytest.skip(f"two hosts need Linux, root, and the commands ip and unshare; missing: {missing or 'root'}")
    probe = f"lf-{uuid4().hex[:6]}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"two hosts need network namespaces; {made.stderr.strip()}")
    _ip("netns", "delete", probe)


@contextmanager
def two_hosts(*, delay: Sequence[str] = ()) -> Iterator[tuple[Host, Host]]:
    """Hosts `node-a` and `node-b`; `delay` are arguments of tc's netem, such as `delay 50ms loss 1%`, for both."""
    skip_without_hosts(*(["tc"] if delay else []))
    mark = uuid4().hex[:6]
    a = Host(f"lf-{mark}-a", "node-a", "10.213.0.1", f"lf{mark}a")
    b = Host(f"lf-{mark}-b", "node-b", "10.213.0.2", f"lf{mark}b")
    try:
        for host in (a, b):
            _ip("netns", "add", host.namespace)
        _ip("link", "add", a.device, "netns", a.namespace, "type", "veth", "peer", b.device, "netns", b.namespace)
        for host in (a, b):
            _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", host.device)
            _ip("-n", host.namespace, "link", "set", "lo", "up")
            host.set_link("up")
            if delay:
                _ip("netns", "exec", host.namespace, "tc", "qdisc", "add", "dev", host.device, "root", "netem", *delay)
        yield a, b
    finally:
        for host in (a, b):
            inside = subprocess.run(["ip", "netns", "pids", host.namespace], capture_output=True, text=True).stdout
            for process in inside.split():
                with suppress(ProcessLookupError):
                    os.kill(int(process), signal.SIGKILL)
            subprocess.run(["ip", "netns", "delete", host.namespace], capture_output=True)
