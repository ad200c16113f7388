"""A child process that does not end fails its test with its output, and is killed with its children."""

import ast

import psutil
import pytest

from tests.conftest import ROOT
from tests.processes import run_bounded


def test_a_hanging_child_is_killed_with_its_children():
    with pytest.raises(AssertionError, match=r"no end within 1 s: (?s:.*)working") as failure:
        run_bounded(["sh", "-c", "sleep 60 & echo working $!; wait"], timeout_seconds=1)
    child = int(str(failure.value).split()[-1])
    if psutil.pid_exists(child):  # A zombie until its parent waits for it.
        psutil.Process(child).wait(10)


def test_every_test_runs_child_processes_with_a_timeout():
    waits = {"run", "call", "check_call", "check_output"}
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in (ROOT / "tests").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in waits
        if isinstance(node.value, ast.Name) and node.value.id == "subprocess"
    ]
    assert found == []
