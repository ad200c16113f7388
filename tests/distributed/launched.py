"""Start `python -m stages.train` on several processes as a user does."""

import csv
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from stages.bucket import main as bucket
from tests.conftest import ROOT
from tests.distributed.hosts import Host
from tests.kit.write_params import write_params
from tests.processes import kill_group, killed_after
from tests.workspace import invoke


def change(root: Path, **values: object) -> None:
    """Write values into params.yaml: `train__lr` is train.lr."""
    write_params(root, {key.replace("__", "."): value for key, value in values.items()}, root / "params.yaml")


def planned(root: Path, gpus: int, sharding: str, **values: object) -> None:
    """Change parameters, and plan the batches of so many GPUs."""
    change(root, hardware__num_gpus=gpus, train__sharding=sharding, **values)
    assert invoke(bucket).exit_code == 0


def free_port() -> int:
    """A port that nothing uses now."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def other_machine(root: Path) -> Path:
    """A copy of the checkout, as on a second machine's own disk."""
    other = root / "other-machine"
    shutil.copytree(root, other, symlinks=True, ignore=shutil.ignore_patterns("scratch"))
    return other


def made_a_step(root: Path) -> bool:
    """Whether a process of a run has made an optimizer step. Before, it may still be importing."""
    files = root.glob("scratch/train/running/*/last_step.json")
    return any(json.loads(file.read_text())["step"] for file in files)


def curve(root: Path) -> list[dict[str, str]]:
    with open(root / "data/train/curves.csv", newline="") as file:
        return list(csv.DictReader(file))


def running(
    root: Path, *command: str, host: Host | None = None, **environment: object
) -> AbstractContextManager[subprocess.Popen[bytes]]:
    """A run, or Python with other arguments, which is killed at the end of the block; `errors_of` has its errors."""
    return _started(root, [sys.executable, *(command or ("-m", "stages.train"))], host, environment)


def script(
    root: Path, text: str, host: Host | None = None, **environment: object
) -> AbstractContextManager[subprocess.Popen[bytes]]:
    """As `running`, of a script for a shell."""
    return _started(root, ["bash", "-ec", text], host, environment)


@contextmanager
def _started(
    root: Path, words: list[str], host: Host | None, environment: Mapping[str, object]
) -> Iterator[subprocess.Popen[bytes]]:
    given: dict[str, object] = {**os.environ, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": 1, **environment}
    given.pop("DVC_STAGE", None)
    with open(_errors_file(root, host), "w") as errors:
        process = subprocess.Popen(
            words if host is None else host.command(*words),
            cwd=root,
            env={name: str(value) for name, value in given.items()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )
    with killed_after(process):
        try:
            yield process
        finally:
            kill_group(process)


def errors_of(root: Path, host: Host | None = None) -> list[str]:
    """Lines on standard error of the last run."""
    return _errors_file(root, host).read_text().splitlines()


def _errors_file(root: Path, host: Host | None) -> Path:
    return root / ("stderr" if host is None else f"stderr-{host.name}")


def only_error_of(root: Path) -> str:
    """The only line on standard error of the last run."""
    lines = errors_of(root)
    assert len(lines) == 1, lines
    return lines[0]
