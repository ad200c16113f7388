"""Signals that end a stage: raised once, final the second time, and final at last if nobody lets them through."""

import signal
import sys
from pathlib import Path

import pytest

import lean_finetune.core.signals
from tests.conftest import ROOT
from tests.processes import run_bounded

BEGINNING = """
import os, signal, time
from lean_finetune.core import signals

def send(number=signal.SIGTERM):
    os.kill(os.getpid(), number)

"""
CASES = {
    "raised": ("with signals.raised():\n    send()", 1, "Interrupted: SIGTERM"),
    "raised for Ctrl-C": ("with signals.raised():\n    send(signal.SIGINT)", 1, "Interrupted: SIGINT"),
    "the second is final": (
        "with signals.raised():\n    try:\n        send()\n    finally:\n        send(signal.SIGINT)",
        -signal.SIGINT,
        "",
    ),
    "kept to itself by a library": (
        "signals.GRACE_SECONDS = 1\nwith signals.raised():\n    try:\n        send()\n    except BaseException:\n"
        "        time.sleep(30)",
        -signal.SIGALRM,
        "",
    ),
    "as before, afterwards": ("with signals.raised():\n    pass\nsend()", -signal.SIGTERM, ""),
    "held back": (
        "with signals.raised():\n    with signals.defer_signals(), signals.defer_signals():\n        send()",
        1,
        "Interrupted: SIGTERM",
    ),
    "held back, yet final the second time": (
        "with signals.raised(), signals.defer_signals():\n    send()\n    send()",
        -signal.SIGTERM,
        "",
    ),
    "at once": (
        "with signals.raised():\n    with signals.default_signal_actions():\n        send()",
        -signal.SIGTERM,
        "",
    ),
    "told to ignore": (
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\nwith signals.raised():\n    send(signal.SIGINT)",
        0,
        "",
    ),
}


@pytest.mark.parametrize("code, status, said", CASES.values(), ids=CASES)
def test_a_process_ends_as_it_should(code, status, said):
    done = run_bounded([sys.executable, "-c", BEGINNING + code], cwd=ROOT, timeout_seconds=20)
    assert done.returncode == status, done.stderr
    assert done.stderr.strip().splitlines()[-1:] == ([f"lean_finetune.core.signals.{said}"] if said else [])


WRITE = """
from pathlib import Path
from lean_finetune.core import atomic_files

def at(number, call):
    def called(*args, **options):
        global calls
        calls += 1
        if calls == number:
            send()
        return call(*args, **options)
    return called

for name in ("mkdir", "open", "unlink", "rmdir", "close"):
    setattr(os, name, at(int(sys.argv[2]), getattr(os, name)))
calls = 0
with signals.raised():
    atomic_files.write_text(Path(sys.argv[1]), "new")
"""


def test_a_signal_leaves_nothing_beside_a_file(tmp_path: Path):
    """A directory of unfinished work that stays although the process ended in order."""
    ended = 0
    for number in range(1, 40):
        path = tmp_path / str(number) / "out"
        path.parent.mkdir()
        path.write_text("old")
        command = [sys.executable, "-c", f"import sys\n{BEGINNING}{WRITE}", str(path), str(number)]
        done = run_bounded(command, cwd=ROOT, timeout_seconds=20)
        assert [left.name for left in path.parent.iterdir()] == ["out"], number
        assert path.read_text() in ("old", "new")
        if done.returncode == 0:
            break
        assert done.stderr.strip().endswith("Interrupted: SIGTERM"), done.stderr
        ended += 1
    assert ended >= 8, "each change of the disk is met"


STAGE = """
import atexit, importlib.machinery, os, signal, sys
sys.modules["__main__"].__spec__ = importlib.machinery.ModuleSpec("stages.demo", None)
from lean_finetune.core.errors import StageCommand

class Library:
    def __del__(self, write=os.write):
        write(1, b"taken down, ")

library = Library()
atexit.register(print, "closed,", end=" ")

def work():
    if len(sys.argv) > 1:
        os.kill(os.getpid(), int(sys.argv[1]))

StageCommand("demo", callback=work).main([])
"""


@pytest.mark.parametrize(
    "asked, status, said",
    [([], 0, "closed, taken down, "), ([signal.SIGTERM], 143, "closed, "), ([signal.SIGINT], 130, "closed, ")],
)
def test_a_stage_that_a_signal_ended_is_not_taken_down(asked, status, said):
    """A scheduler waits seconds for torch's modules to be taken down; but what is to run at exit does, and is heard."""
    done = run_bounded([sys.executable, "-c", STAGE, *(str(int(number)) for number in asked)], cwd=ROOT)
    assert (done.returncode, done.stdout) == (status, said), done.stderr


def test_whoever_imports_it_keeps_his_own_signals(tmp_path):
    """Only `python -m stages.…` hands Ctrl-C to the system; a notebook or a test that imports a stage does not."""
    script = Path(tmp_path / "script.py")
    script.write_text(
        "import signal, lean_finetune.core.signals\n"
        "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    )
    run_bounded([sys.executable, script], cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, check=True)


def test_the_codes_are_those_of_the_shell():
    assert lean_finetune.core.signals.Interrupted(signal.SIGTERM).exit_code == 143
    assert lean_finetune.core.signals.Interrupted(signal.SIGINT).exit_code == 130
