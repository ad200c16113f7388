"""A child that does not end fails its test with what it said, and leaves nothing behind."""

import ast
import subprocess

import psutil
import pytest

from tests.conftest import ROOT
from tests.processes import killed_after, run_bounded


def test_a_hang_is_killed_with_its_children_and_told():
    with pytest.raises(AssertionError, match=r"no end within 1 s: (?s:.*)working") as failure:
        run_bounded(["sh", "-c", "sleep 60 & echo working $!; wait"], timeout_seconds=1)
    child = int(str(failure.value).split()[-1])
    if psutil.pid_exists(child):  # Not yet taken by the system from the parent that did not wait for it.
        psutil.Process(child).wait(10)


def test_a_daemon_that_holds_the_output_is_not_waited_for():
    """A reader of a pipe would wait the daemon's whole life."""
    done = run_bounded(["sh", "-c", "sleep 20 & echo $!"], timeout_seconds=10)
    psutil.Process(int(done.stdout)).kill()


def test_a_failure_is_told_with_its_output():
    with pytest.raises(AssertionError, match="exit status 3: .*\nout\nerr\n"):
        run_bounded(["sh", "-c", "echo out; echo err >&2; exit 3"], check=True)
    assert run_bounded(["sh", "-c", "exit 3"]).returncode == 3


def test_a_pipe_that_is_read_ends_with_the_time():
    with subprocess.Popen(["sleep", "60"], stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        with killed_after(process, 0.2):
            assert process.stdout.read() == b""
    assert process.returncode == -9


def test_no_other_test_waits_for_a_child_without_end():
    """One such wait once kept the whole suite for 90 minutes."""
    waits = {"run", "call", "check_call", "check_output"}
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in (ROOT / "tests").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in waits
        if isinstance(node.value, ast.Name) and node.value.id == "subprocess"
    ]
    assert found == []
