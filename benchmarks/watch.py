"""A running command seen from outside: wall time and peak memory of each pipeline stage it starts."""

import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from lean_finetune.core.errors import UserError

POLL_SECONDS = 0.05
"""Between two looks at the processes: 20 a second cost under 5% of one core here; a shorter peak may be missed."""
WHOLE = "(whole run)"


@dataclass(kw_only=True)
class Usage:
    """What a stage, or the whole command, took."""

    first_seen_s: float
    """Seconds after the command's start."""
    last_seen_s: float
    """Seconds after the command's start."""
    peak_rss_bytes: int
    """Resident memory summed over the processes, at its highest look. Pages that processes share count in each."""
    peak_anonymous_bytes: int = 0
    """Memory that no file backs, of the whole command alone, where `watch` was asked for it; else 0.

    Here a page that processes share counts once: it is what the machine has to have.
    """

    @property
    def wall_s(self) -> float:
        """Seconds from the first look to the last."""
        return self.last_seen_s - self.first_seen_s


def watch(
    command: Sequence[str], cwd: Path, environment: Mapping[str, str], anonymous: bool = False
) -> tuple[dict[str, Usage], str]:
    """Run a command and watch the processes below it.

    DVC names the stage in each stage's environment (`DVC_STAGE`), which workers inherit; that is how processes are told
    apart.

    Args:
        command: to run.
        cwd: its working directory.
        environment: its environment.
        anonymous: also sum anonymous memory, which takes the kernel longer to tell and which Linux alone tells.

    Returns:
        Usage by stage in order of appearance, then of the whole command under WHOLE; and the command's output.

    Raises:
        subprocess.CalledProcessError: the command failed; its output is attached.
        UserError: anonymous memory is asked for where the system does not tell it.
    """
    if anonymous and not Path("/proc/self/smaps_rollup").exists():
        raise UserError("benchmarks.watch: anonymous memory is told by Linux alone; run on Linux")
    stages: dict[str, Usage] = {}
    stage_of: dict[psutil.Process, str] = {}
    whole = Usage(first_seen_s=0.0, last_seen_s=0.0, peak_rss_bytes=0)
    with tempfile.TemporaryFile() as output:
        start = time.perf_counter()
        running = subprocess.Popen(command, cwd=cwd, env=environment, stdout=output, stderr=subprocess.STDOUT)
        root = psutil.Process(running.pid)
        while running.poll() is None:
            now = time.perf_counter() - start
            _look(root, now, stages, stage_of, whole)
            if anonymous:
                whole.peak_anonymous_bytes = max(whole.peak_anonymous_bytes, _anonymous_bytes(root))
            time.sleep(POLL_SECONDS)
        whole.last_seen_s = time.perf_counter() - start
        output.seek(0)
        text = output.read().decode(errors="replace")
    if running.returncode:
        raise subprocess.CalledProcessError(running.returncode, list(command), text)
    return {**stages, WHOLE: whole}, text


def _look(
    root: psutil.Process, now: float, stages: dict[str, Usage], stage_of: dict[psutil.Process, str], whole: Usage
) -> None:
    """Add one look at the process tree to the usages."""
    rss_by_stage: dict[str, int] = {}
    total = 0
    for process, rss in _resident(root):
        total += rss
        # A child that has not yet replaced its parent's image shows no stage: ask again at the next look.
        stage = stage_of.get(process) or _stage(process)
        if stage:
            stage_of[process] = stage
            rss_by_stage[stage] = rss_by_stage.get(stage, 0) + rss
    for stage, rss in rss_by_stage.items():
        usage = stages.setdefault(stage, Usage(first_seen_s=now, last_seen_s=now, peak_rss_bytes=0))
        usage.last_seen_s = now
        usage.peak_rss_bytes = max(usage.peak_rss_bytes, rss)
    whole.peak_rss_bytes = max(whole.peak_rss_bytes, total)


def _resident(root: psutil.Process) -> list[tuple[psutil.Process, int]]:
    """Each process of the tree with its resident bytes; processes that end meanwhile are left out."""
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
    """Anonymous memory of the tree's processes, of which each has its share of a page that several have."""
    total = 0
    for process, _ in _resident(root):
        try:
            lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
        total += next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss_Anon:")), 0)
    return total


def _stage(process: psutil.Process) -> str | None:
    """The stage a process works for, None if it is not yet known or it works for none."""
    try:
        return process.environ().get("DVC_STAGE")
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None
