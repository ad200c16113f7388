"""Measure a running command from outside: wall time and peak memory of each pipeline stage it starts."""

import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
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
    last_seen_s: float
    """Seconds after the command's start."""
    peak_rss_bytes: int
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

    Args:
        command: the command line.
        cwd: its working directory.
        environment: its environment variables.
        anonymous: also measure anonymous memory, which takes longer and needs Linux.

    Returns:
        Usage by stage in order of appearance, then of the command under WHOLE_RUN; and the command's output.

    Raises:
        subprocess.CalledProcessError: the command failed; its output is attached.
        UserError: `anonymous` on a system without /proc/*/smaps_rollup.
    """
    if anonymous and not Path("/proc/self/smaps_rollup").exists():
        raise UserError("benchmarks: anonymous memory can be measured on Linux only; run there")
    stages: dict[str, Usage] = {}
    stage_of: dict[psutil.Process, str] = {}
    total_usage = Usage(first_seen_s=0.0, last_seen_s=0.0, peak_rss_bytes=0)
    with tempfile.TemporaryFile() as output:
        start = time.perf_counter()
        running = subprocess.Popen(command, cwd=cwd, env=environment, stdout=output, stderr=subprocess.STDOUT)
        root = psutil.Process(running.pid)
        while running.poll() is None:
            now = time.perf_counter() - start
            _sample(root, now, stages, stage_of, total_usage)
            if anonymous:
                total_usage.peak_anonymous_bytes = max(total_usage.peak_anonymous_bytes, _anonymous_bytes(root))
            time.sleep(POLL_SECONDS)
        total_usage.last_seen_s = time.perf_counter() - start
        output.seek(0)
        text = output.read().decode(errors="replace")
    if running.returncode:
        raise subprocess.CalledProcessError(running.returncode, list(command), text)
    return {**stages, WHOLE_RUN: total_usage}, text


def _sample(
    root: psutil.Process, now: float, stages: dict[str, Usage], stage_of: dict[psutil.Process, str], total_usage: Usage
) -> None:
    """Add one sample of the process tree to the usages."""
    rss_by_stage: dict[str, int] = {}
    total = 0
    for process, rss in _resident(root):
        total += rss
        # A child between fork and exec has no stage in its environment yet: try again at the next sample.
        stage = stage_of.get(process) or _stage(process)
        if stage:
            stage_of[process] = stage
            rss_by_stage[stage] = rss_by_stage.get(stage, 0) + rss
    for stage, rss in rss_by_stage.items():
        usage = stages.setdefault(stage, Usage(first_seen_s=now, last_seen_s=now, peak_rss_bytes=0))
        usage.last_seen_s = now
        usage.peak_rss_bytes = max(usage.peak_rss_bytes, rss)
    total_usage.peak_rss_bytes = max(total_usage.peak_rss_bytes, total)


def _resident(root: psutil.Process) -> list[tuple[psutil.Process, int]]:
    """Resident bytes of each process of the tree, without processes that end meanwhile."""
    found = []
    try:
        processes = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
    for process in processes:
        try:
            found.append((process, process.memory_info().rss))
        except psutil.NoSuchProcess:
            continue
    return found


def _anonymous_bytes(root: psutil.Process) -> int:
    """Anonymous memory of the process tree; a shared page is divided among the processes that share it."""
    total = 0
    for process, _ in _resident(root):
        try:
            lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):  # The process has ended.
            continue
        total += next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss_Anon:")), 0)
    return total


def _stage(process: psutil.Process) -> str | None:
    """The stage that a process belongs to; None if unknown or none."""
    try:
        return process.environ().get("DVC_STAGE")
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None
