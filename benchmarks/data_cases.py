"""The contestants of benchmarks.data: each prepares the same file in fresh processes and tells the same figures."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
from ruamel.yaml import YAML

import lean_finetune
from benchmarks.chat_file import SCRATCH, ChatFile
from benchmarks.watch import WHOLE, watch
from lean_finetune.core.atomic_files import sha256_json
from lean_finetune.core.errors import UserError

ROOT = Path(lean_finetune.__file__).parents[1]
RIVALS = Path(__file__).parent / "rivals"
WORKERS = 2
NO_LIMIT = (1 << 16) - 1
"""Longer than any row: nothing is cut, so all contestants have the same tokens to make."""
MAX_TOKENS = 1 << 16
"""Of a micro-batch, which has to hold the longest row that may be; nothing here makes one."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a contestant."""

    wall_s: float
    """From the start of its process to its end."""
    work_s: float
    """Without the start of the interpreter and its imports."""
    rows: int
    tokens: int
    written_bytes: int
    peak_rss_bytes: int = 0
    """Over all its processes; 0 where nobody watched."""
    anonymous_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Stage tokenize as users run it, in a directory of its own with params.yaml and locks."""

    source: ChatFile
    engine: str

    @property
    def directory(self) -> Path:
        """Where it runs."""
        return SCRATCH / "runs" / f"stage-{self.engine}-{self.source.rows}"

    def prepare(self) -> None:
        """Write params.yaml and pin the file and the tokenizer. The stages' own entries do it.

        Raises:
            UserError: a stage failed; its last line is told.
        """
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir(parents=True)
        yaml = YAML()
        values = yaml.load((ROOT / "params.yaml").read_text(encoding="utf-8"))
        values["model"]["name"] = str(self.source.model.resolve())
        values["data"] |= {"source": str(self.source.path.resolve()), "max_length": NO_LIMIT}
        values["bucket"]["max_tokens"] = values["evaluate"]["max_tokens"] = MAX_TOKENS
        values["run"] |= {"progress": False, "data_workers": WORKERS, "tokenizer_engine": self.engine}
        with open(self.directory / "params.yaml", "w", encoding="utf-8") as file:
            yaml.dump(values, file)
        for what in ("data", "model"):
            _run([sys.executable, "-m", "stages.pin", what], self.directory, _environment())

    def run(self, watched: bool = False) -> Run:
        """Tokenize from nothing.

        Its `work_s` is `wall_s` here; `without_start` takes off what the imports take, which is a case of its own.

        Raises:
            UserError: the stage failed.
        """
        for left_over in ("data", "metrics", "scratch"):
            shutil.rmtree(self.directory / left_over, ignore_errors=True)
        run = _run([sys.executable, "-m", "stages.tokenize"], self.directory, _environment(), watched)
        files = sorted(self.tokens.rglob("*.arrow"))
        shards = [file for file in files if file.parent != self.tokens]
        counts = [_count(shard) for shard in shards]
        return replace(
            run,
            rows=sum(rows for rows, _ in counts),
            tokens=sum(tokens for _, tokens in counts),
            written_bytes=_size(self.tokens),
        )

    @property
    def tokens(self) -> Path:
        """What it writes."""
        return self.directory / "data/tokens"


def start_of_stage() -> Run:
    """The stage's interpreter and imports, and nothing else."""
    return _run([sys.executable, "-c", "import stages.tokenize"], Path(), _environment())


def without_start(runs: Sequence[Run], starts: Sequence[Run]) -> list[Run]:
    """The stage's runs with `work_s` less the start measured in the same round."""
    return [replace(run, work_s=run.wall_s - start.wall_s) for run, start in zip(runs, starts, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Rival:
    """A script beside this file, in this environment or in one of its own."""

    name: str
    script: str
    requirements: tuple[str, ...] = ()
    """Of its own virtual environment; empty where it runs in this one."""

    def prepare(self) -> str | None:
        """Make its environment where it is missing; the reason where that fails."""
        if not self.requirements or self._environment_path.joinpath(".installed").exists():
            return None
        shutil.rmtree(self._environment_path, ignore_errors=True)
        python = str(self.python)
        steps = [[sys.executable, "-m", "venv", str(self._environment_path)]]
        steps.append([python, "-m", "pip", "install", "--quiet", *self.requirements])
        for step in steps:
            done = subprocess.run(step, capture_output=True, text=True)
            if done.returncode:
                lines = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
                fault = next((line for line in lines if line.startswith("ERROR")), lines[-1])
                return f"`{' '.join(step[1:])[:80]}` failed: {fault}"
        self._environment_path.joinpath(".installed").touch()
        return None

    def run(self, source: ChatFile, watched: bool = False) -> Run:
        """Prepare the file with an empty cache.

        Raises:
            UserError: the script failed.
        """
        out = SCRATCH / "runs" / Path(self.script).stem
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        environment = _environment() | {"HF_HOME": str(out.resolve()), "HF_HUB_OFFLINE": "1"}
        arguments = [str(path.resolve()) for path in (source.path, source.model, out)]
        try:
            run = _run([self.python, RIVALS / self.script, *arguments, str(WORKERS)], Path(), environment, watched)
            return replace(run, written_bytes=_size(out))
        finally:
            shutil.rmtree(out)

    @property
    def _environment_path(self) -> Path:
        return SCRATCH / "venvs" / f"{Path(self.script).stem}-{sha256_json(self.requirements)[:8]}"

    @property
    def python(self) -> Path:
        """The interpreter that has its requirements, once prepared."""
        return (self._environment_path / "bin/python").absolute() if self.requirements else Path(sys.executable)


def _run(command: Sequence[str | Path], cwd: Path, environment: dict[str, str], watched: bool = False) -> Run:
    """Run a process; its figures are in the last line of its output where that is JSON.

    Raises:
        UserError: it failed; its last line is told.
    """
    texts = list(map(str, command))
    usage = None
    start = time.perf_counter()
    try:
        if watched:
            usages, output = watch(texts, cwd, environment, anonymous=True)
            usage = usages[WHOLE]
        else:
            done = subprocess.run(
                texts, cwd=cwd, env=environment, check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            output = done.stdout
    except subprocess.CalledProcessError as error:
        lines = [line for line in (error.output or "no output").strip().splitlines() if line.strip()]
        raise UserError(f"benchmarks.data: `{' '.join(texts[1:3])}` failed: {lines[-1]}") from error
    wall_s = time.perf_counter() - start
    last = output.strip().rpartition("\n")[2]
    told = json.loads(last) if last.startswith("{") else {"work_s": wall_s, "rows": 0, "tokens": 0}
    return Run(
        wall_s=wall_s,
        written_bytes=0,
        peak_rss_bytes=usage.peak_rss_bytes if usage else 0,
        anonymous_bytes=usage.peak_anonymous_bytes if usage else 0,
        **told,
    )


def _environment() -> dict[str, str]:
    """This process's environment without DVC's variables and with this code on the path."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("DVC_")}
    # Tests set it to keep to one thread; a contestant must have all cores.
    environment.pop("RAYON_NUM_THREADS", None)
    environment.pop("TOKENIZERS_PARALLELISM", None)
    return environment | {"PYTHONPATH": str(ROOT)}


def _count(shard: Path) -> tuple[int, int]:
    """(rows, tokens) of a shard."""
    with pa.memory_map(str(shard)) as source, pa.ipc.open_file(source) as reader:
        batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
    return sum(map(len, batches)), sum(len(batch.column("input_ids").flatten()) for batch in batches)


def _size(directory: Path) -> int:
    """Bytes of all files below a directory."""
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file() and not file.is_symlink())
