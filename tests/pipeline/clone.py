"""A clone of the project in which DVC runs as for a user without remote and git identity."""

import contextlib
import hashlib
import json
import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.conftest import ROOT
from tests.kit.write_params import write_params
from tests.processes import run_bounded

IDENTITY = {f"GIT_{who}_{what}": "test@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
"""For `git commit` only: DVC must work without one."""

# Small enough that eight stages take half a minute, large enough for several steps of several micro-batches.
SMALL_RUN = {
    "data.max_rows": 120,
    "data.heldout_fraction": 0.1,
    "data.max_length": 128,
    "bucket.max_tokens": 512,
    "train.tokens_per_step": 2048,
    "train.heldout_every_steps": 4,
    "train.heldout_rows": 8,
    "evaluate.generate_rows": 6,
    "evaluate.max_new_tokens": 8,
    "run.progress": False,
    "run.cpu_threads": 1,
}


@dataclass(frozen=True)
class Clone:
    """A checkout and the environment its commands run in."""

    root: Path
    environment: dict[str, str]

    def run(self, *command: str, ok: bool = True, env: dict[str, str] | None = None) -> str:
        """Standard output and error of a command run in the checkout.

        Args:
            command: program and arguments.
            ok: True: the command must succeed; False: it must fail.
            env: more environment variables.
        """
        result = run_bounded(command, cwd=self.root, env={**self.environment, **(env or {})})
        output = result.stdout + result.stderr
        assert (result.returncode == 0) == ok, f"{' '.join(command)} exited {result.returncode}:\n{output}"
        return output

    def dvc(self, *arguments: str, ok: bool = True, env: dict[str, str] | None = None) -> str:
        """Output of a dvc command."""
        return self.run(sys.executable, "-m", "dvc", *arguments, ok=ok, env=env)

    def json(self, path: str) -> Any:
        """A JSON file of the checkout."""
        return json.loads((self.root / path).read_text())

    def sha256(self, path: str) -> str:
        """Hash of a file of the checkout."""
        return hashlib.sha256((self.root / path).read_bytes()).hexdigest()

    def set_params(self, **values: Any) -> None:
        """Change params.yaml. `train__lr` is train.lr."""
        changes = {key.replace("__", "."): value for key, value in values.items()}
        write_params(self.root, changes, self.root / "params.yaml")

    def processes(self) -> list[psutil.Process]:
        """Running processes of this clone, daemons included. Their home directory is unique."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # It ended just now, or belongs to another user.
                if process.environ().get("HOME") == self.environment["HOME"] and process.status() != "zombie":
                    found.append(process)
        return found

    def end_processes(self) -> None:
        """Kill all running processes of this clone."""
        left = self.processes()
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=10)

    def back_to_baseline(self) -> None:
        """Undo an experiment's changes of the workspace and of the index, which DVC changes too."""
        self.run("git", "restore", "--staged", "--worktree", ".")
        self.dvc("checkout", "--quiet")


def stages_run(output: str) -> list[str]:
    """The stages that dvc ran, in order, without cached ones and pin_code, which always runs."""
    return [name for name in re.findall(r"^Running stage '([\w@-]+)':", output, re.MULTILINE) if name != "pin_code"]


def is_up_to_date(clone: Clone) -> bool:
    """Whether `dvc status` lists nothing but pin_code."""
    return clone.dvc("status").split() == ["pin_code:", "always", "changed"]


def environment(home: Path) -> dict[str, str]:
    """The environment of a user with a new home directory."""
    home.mkdir()
    return {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "GIT_CONFIG_NOSYSTEM": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def make_clone(root: Path) -> Clone:
    """Copy the files that git tracks or would track into a new repository with one commit."""
    listed = run_bounded(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT).stdout
    for name in filter(None, listed.split("\0")):
        source, target = ROOT / name, root / name
        if not source.is_symlink() and not source.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target, follow_symlinks=False)
    clone = Clone(root, environment(root.parent / "home"))
    write_params(root, SMALL_RUN, root / "params.yaml")
    clone.run("git", "init", "-q", "-b", "main")
    clone.run("git", "add", "-A")
    clone.run("git", "commit", "-q", "-m", "clone", env=IDENTITY)
    return clone


def commit_all(clone: Clone) -> None:
    """Commit the workspace as the baseline of later experiments."""
    clone.run("git", "add", "-A")
    clone.run("git", "commit", "-q", "-m", "baseline", env=IDENTITY)
