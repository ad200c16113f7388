"""Run the project's stages, and other tools in virtual environments, as processes of a benchmark, and measure them."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import lean_finetune
from lean_finetune.core.atomic_files import sha256_file
from lean_finetune.core.errors import UserError

ROOT = Path(lean_finetune.__file__).parents[1]
RIVALS = Path(__file__).parent / "rivals"
SCRATCH = Path("scratch/bench")
POLL_SECONDS = 0.05
"""Time between two samples: 20 a second take under 5% of one core. A shorter peak may be missed."""
WHOLE_RUN = "(whole run)"
"""Key of the usage of all processes together."""


def clean_environment(**more: str) -> dict[str, str]:
    """This process's environment for a child: this Python first on PATH, no variables of a DVC run.

    Limits of threads that tests set are removed, so that every tool has all cores.
    """
    removed = {"RAYON_NUM_THREADS", "TOKENIZERS_PARALLELISM"}
    environment = {k: v for k, v in os.environ.items() if not k.startswith("DVC_") and k not in removed}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', os.defpath)}"
    return environment | {"DVC_NO_ANALYTICS": "1"} | more


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


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A process that succeeded."""

    output: str
    wall_s: float
    usage: Usage | None
    """Its peak memory, if it was watched."""

    @property
    def figures(self) -> dict[str, Any]:
        """The JSON object in the last line of the output; empty if that line is none."""
        last = self.output.strip().rpartition("\n")[2]
        return dict(json.loads(last)) if last.startswith("{") else {}


def run(
    command: Sequence[str | Path],
    cwd: Path = Path(),
    environment: Mapping[str, str] | None = None,
    *,
    watched: bool = False,
) -> Finished:
    """Run a command; `watched` also measures the memory of its processes.

    Raises:
        UserError: it failed; the message has the last line of its output.
    """
    texts = [str(part) for part in command]
    environment = environment or clean_environment(PYTHONPATH=str(ROOT))
    usage = None
    start = time.perf_counter()
    try:
        if watched:
            usages, output = watch(texts, cwd, environment, anonymous=True)
            usage = usages[WHOLE_RUN]
        else:
            piped: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            output = subprocess.run(texts, cwd=cwd, env=environment, check=True, **piped).stdout
    except subprocess.CalledProcessError as error:
        raise UserError(f"benchmarks: `{' '.join(texts[1:3])}` failed: {error_line(error.output)}") from error
    return Finished(output=output, wall_s=time.perf_counter() - start, usage=usage)


def run_stage(stage: str, cwd: Path, *, watched: bool = False) -> Finished:
    """Run a stage as users do; `stage` may have arguments, as in "pin data"."""
    name, *arguments = stage.split()
    return run([sys.executable, "-m", f"stages.{name}", *arguments], cwd, watched=watched)


def error_line(output: str | None) -> str:
    """The error line of a failed command's output: one that starts with "error", else the last."""
    lines = [line for line in (output or "").splitlines() if line.strip()] or ["no output"]
    return next((line for line in lines if line.lower().startswith("error")), lines[-1])


@dataclass(frozen=True, kw_only=True)
class Rival:
    """Another tool, run by a script in benchmarks/rivals."""

    name: str
    key: str = ""
    """Its function in scripts that run several tools."""
    requirements: str | None = None
    """File in benchmarks/rivals with what its virtual environment needs; None = this environment."""

    def prepare(self) -> str | None:
        """Create its virtual environment if it is missing; return the reason if that fails."""
        if self.requirements is None or (self._venv / ".installed").exists():
            return None
        shutil.rmtree(self._venv, ignore_errors=True)
        try:
            run([sys.executable, "-m", "venv", self._venv])
            run([self.python, "-m", "pip", "install", "--quiet", "-r", RIVALS / self.requirements])
        except UserError as error:
            return str(error)
        (self._venv / ".installed").touch()
        return None

    def run(
        self,
        script: str,
        *arguments: str | Path,
        watched: bool = False,
        cwd: Path = Path(),
        cache: Path = SCRATCH / "hf",
    ) -> Finished:
        """Run a script in its environment, without network and with this Hugging Face cache."""
        environment = clean_environment(HF_HUB_OFFLINE="1", HF_HOME=str(cache.resolve()), PYTHONPATH=str(ROOT))
        return run([self.python, RIVALS / script, *arguments], cwd, environment, watched=watched)

    @property
    def python(self) -> Path:
        """Its interpreter, once prepared."""
        return Path(sys.executable) if self.requirements is None else (self._venv / "bin/python").absolute()

    @property
    def _venv(self) -> Path:
        assert self.requirements is not None
        return SCRATCH / "venvs" / f"{Path(self.requirements).stem}-{sha256_file(RIVALS / self.requirements)[:8]}"


DATASETS_MAP = Rival(name="datasets.map", key="datasets_map")
TRL = Rival(name="TRL 1.16.0", key="trl", requirements="requirements-trl.txt")
LLAMA_FACTORY = Rival(name="LLaMA-Factory 0.9.5", key="llama_factory", requirements="requirements-llama-factory.txt")
