"""Run the project's stages, and other tools in virtual environments, as processes of a benchmark."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

import lean_finetune
from benchmarks.process_usage import WHOLE_RUN, Usage, watch
from lean_finetune.core.atomic_files import sha256_file
from lean_finetune.core.errors import UserError

ROOT = Path(lean_finetune.__file__).parents[1]
RIVALS = Path(__file__).parent / "rivals"
SCRATCH = Path("scratch/bench")


def clean_environment(**more: str) -> dict[str, str]:
    """This process's environment for a child: this Python first on PATH, no variables of a DVC run.

    Limits of threads that tests set are removed, so that every tool has all cores.
    """
    removed = {"RAYON_NUM_THREADS", "TOKENIZERS_PARALLELISM"}
    environment = {k: v for k, v in os.environ.items() if not k.startswith("DVC_") and k not in removed}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', os.defpath)}"
    return environment | {"DVC_NO_ANALYTICS": "1"} | more


def write_params(directory: Path, changes: Mapping[str, Any], source: Path = ROOT / "params.yaml") -> None:
    """Write `source` as params.yaml into a directory, with the dotted parameters in `changes` replaced."""
    yaml = YAML()
    values = yaml.load(source.read_text(encoding="utf-8"))
    for dotted, value in changes.items():
        *sections, key = dotted.split(".")
        section = values
        for name in sections:
            section = section[name]
        section[key] = value
    with open(directory / "params.yaml", "w", encoding="utf-8") as file:
        yaml.dump(values, file)


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
