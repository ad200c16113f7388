"""Measure a running command from outside: wall time and peak memory of each pipeline stage it starts."""

import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from lean_finetune.core.errors import UserError

POLL_SECONDS = 0.05
"""Time between two samples: 20 a second take under 5% of one core. A shorter peak may be missed."""
WHOLE_RUN = "(whole run)"
"""Key of the usage of all processes together."""


@dataclass(kw_only=True)
class Usage:
    """Wall time and peak memory of a stage, or of the command."""

    first_seen_s: float
    """Seconds after the command's start."""
    last_seen_s: float = 0.0
    peak_rss_bytes: int = 0
    """Highest sum of the processes' resident memory. A page that several share counts for each of them."""
    peak_anonymous_bytes: int = 0
    """Memory that no file backs: for the command only, and only if `watch` measures it; else 0.

    A page that several processes share counts once: this is the memory that the machine needs.
    """

    @property
    def wall_s(self) -> float:
        """Seconds from the first sample to the last."""
        return self.last_seen_s - self.first_seen_s


def watch(
    command: Sequence[str], cwd: Path, environment: Mapping[str, str], anonymous: bool = False
) -> tuple[dict[str, Usage], str]:
    """Run a command and measure it and its child processes.

    A process belongs to the stage in its variable `DVC_STAGE`, which DVC sets for each stage and workers inherit.
    Returns the usage by stage in order of appearance, then of the command under WHOLE_RUN; and the command's output.
    `anonymous` also measures anonymous memory, which takes longer and needs Linux.

    Raises:
        subprocess.CalledProcessError: the command failed; its output is attached.
        UserError: `anonymous` on a system without /proc/*/smaps_rollup.
    """
    if anonymous and not Path("/proc/self/smaps_rollup").exists():
        raise UserError("benchmarks: anonymous memory can be measured on Linux only; run there")
    stages: dict[str, Usage] = {}
    total = Usage(first_seen_s=0.0)
    with tempfile.TemporaryFile() as output:
        start = time.perf_counter()
        running = subprocess.Popen(command, cwd=cwd, env=environment, stdout=output, stderr=subprocess.STDOUT)
        root = psutil.Process(running.pid)
        while running.poll() is None:
            now = time.perf_counter() - start
            rss_by_stage: Counter[str | None] = Counter()
            anonymous_bytes = 0
            for process in _tree(root):
                with suppress(psutil.Error, OSError):  # The process has ended.
                    rss_by_stage[process.environ().get("DVC_STAGE")] += process.memory_info().rss
                    anonymous_bytes += _anonymous_bytes(process.pid) if anonymous else 0
            for stage in filter(None, rss_by_stage):
                usage = stages.setdefault(stage, Usage(first_seen_s=now))
                usage.last_seen_s, usage.peak_rss_bytes = now, max(usage.peak_rss_bytes, rss_by_stage[stage])
            total.peak_rss_bytes = max(total.peak_rss_bytes, rss_by_stage.total())
            total.peak_anonymous_bytes = max(total.peak_anonymous_bytes, anonymous_bytes)
            time.sleep(POLL_SECONDS)
        total.last_seen_s = time.perf_counter() - start
        output.seek(0)
        text = output.read().decode(errors="replace")
    if running.returncode:
        raise subprocess.CalledProcessError(running.returncode, list(command), text)
    return {**stages, WHOLE_RUN: total}, text


def _tree(root: psutil.Process) -> Iterator[psutil.Process]:
    """The processes of a command."""
    with suppress(psutil.NoSuchProcess):
        yield from [root, *root.children(recursive=True)]


def _anonymous_bytes(pid: int) -> int:
    """Anonymous memory of a process; a shared page is divided among the processes that share it."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss_Anon:")), 0)
