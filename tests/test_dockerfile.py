"""The Dockerfile, as far as a machine without Docker can run it: its files exist, its pip commands and CMD work."""

import fnmatch
import json
import os
import re
import shlex
import shutil
import string
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import ROOT
from tests.processes import run_bounded

KNOWN = {"ARG", "CMD", "COPY", "ENV", "FROM", "RUN", "USER", "VOLUME", "WORKDIR"}


class Step(NamedTuple):
    """An instruction and its text, with build arguments filled in."""

    name: str
    text: str


def steps() -> list[Step]:
    """The instructions of the Dockerfile."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    values: dict[str, str] = {}
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        if not line.strip():
            continue
        name, _, rest = line.partition(" ")
        assert name in KNOWN, line
        rest = string.Template(rest.strip()).substitute(values)  # Raises for a name that no ARG or ENV has.
        if name == "ARG":
            key, _, values[key] = rest.partition("=")
        found.append(Step(name, rest))
    return found


def texts(name: str) -> list[str]:
    """The texts of all instructions of one name."""
    return [step.text for step in steps() if step.name == name]


def ignored(path: str) -> bool:
    """Whether .dockerignore keeps a file from Docker: the last pattern that matches it or a directory above decides."""
    places = [path, *(parent.as_posix() for parent in Path(path).parents if parent.name)]
    result = False
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        pattern = line.removeprefix("!").removeprefix("**/")
        if line.startswith("#"):
            continue
        names = [Path(place).name for place in places] if "**/" in line else places
        if any(fnmatch.fnmatchcase(name, pattern) for name in names):
            result = not line.startswith("!")
    return result


def copied() -> Iterator[tuple[str, str]]:
    """Tracked files that COPY takes, and where they go below the working directory."""
    listed = run_bounded(["git", "ls-files", "-z"], cwd=ROOT, check=True).stdout.split("\0")[:-1]
    for text in texts("COPY"):
        *sources, target = shlex.split(text)
        for source in sources:
            matching = [name for name in listed if name == source or name.startswith(f"{source}/")]
            assert matching, f"COPY {source}: git tracks no such file"
            for name in matching:
                assert not ignored(name), f".dockerignore leaves out {name}, which COPY takes"
                yield name, name if target == "./" else f"{target}{name.removeprefix(source)}"


def test_it_starts_from_a_python_that_the_package_supports_and_ends_without_root():
    (base,) = texts("FROM")
    version = re.fullmatch(r"python:(\d+\.\d+)-slim", base)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert version and f"Programming Language :: Python :: {version[1]}" in project["classifiers"]
    names = [step.name for step in steps()]
    assert texts("USER") == ["trainer"] and "useradd" in texts("RUN")[-1]
    assert max(i for i, name in enumerate(names) if name == "RUN") < names.index("USER")
    assert texts("WORKDIR")[-1] == "/project"
    assert any(re.search(r"apt-get install .*\bgit\b", text) for text in texts("RUN"))


def test_docker_gets_the_files_that_are_copied_and_no_others():
    """A context of gigabytes: weights, data, .venv, the cache of DVC."""
    names = {name for name, _ in copied()}
    assert {"pyproject.toml", "constraints.txt", "lean_finetune/cli.py", "cuda_memory/version.txt"} <= names
    left_out = ("params.yaml", "data/raw/sample.jsonl", ".venv/bin/python", "lean_finetune/core/__pycache__/errors.pyc")
    assert all(ignored(name) for name in (*left_out, ".git/HEAD", "scratch/x", "cuda_memory/build/lib/x.py"))


@pytest.mark.slow
def test_its_pip_commands_and_its_command_work(tmp_path: Path):
    """A file that the build needs and COPY does not take; an extra or a constraint that pip refuses."""
    source, target = tmp_path / "source", tmp_path / "target"
    for name, place in copied():
        (source / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / place)
    torch, package = (shlex.split(text) for text in texts("RUN") if text.startswith("pip install"))
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
    run_bounded([*pip, "--no-deps", "--dry-run", *torch[2:]], cwd=source, check=True)  # It is installed.
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--target", str(target)]
    run_bounded([*pip, *options, *package[2:]], cwd=source, check=True)
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = re.search(r"\[(.*)\]", package[-1])
    assert extras and set(extras[1].split(",")) <= requirements["optional-dependencies"].keys()
    empty = tmp_path / "project"
    empty.mkdir()
    command = json.loads(texts("CMD")[-1])
    environment = {**os.environ, "PYTHONPATH": str(target), "PATH": f"{target / 'bin'}:{os.environ['PATH']}"}
    done = run_bounded(command, cwd=empty, env=environment, check=True)
    assert "Usage: lean-finetune" in done.stdout and (target / "lean_finetune/cli.py").is_file()
