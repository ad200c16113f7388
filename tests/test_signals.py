"""The first stop signal is raised, the second kills; a library that swallows the exception is killed after a while."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.processes import killed_after, run_bounded

BEGINNING = """
import os, signal, time
from lean_finetune.core import signals

def send(number=signal.SIGTERM):
    os.kill(os.getpid(), number)

"""
SWALLOWED = """
signals.GRACE_SECONDS = 1
with signals.raised():
    try:
        send()
    except BaseException:
        time.sleep(30)
"""
IGNORED = "signal.signal(signal.SIGINT, signal.SIG_IGN)\nwith signals.raised(): send(signal.SIGINT)"
CASES = {
    "SIGTERM": ("with signals.raised(): send()", 1, "Interrupted: SIGTERM"),
    "Ctrl-C": ("with signals.raised(): send(signal.SIGINT)", 1, "Interrupted: SIGINT"),
    "twice": (
        "with signals.raised():\n    try: send()\n    finally: send(signal.SIGINT)",
        -signal.SIGINT,
        "",
    ),
    "swallowed by a library": (SWALLOWED, -signal.SIGALRM, ""),
    "after the block": ("with signals.raised(): pass\nsend()", -signal.SIGTERM, ""),
    "deferred": (
        "with signals.raised(), signals.defer_signals(), signals.defer_signals(): send()",
        1,
        "Interrupted: SIGTERM",
    ),
    "deferred, twice": (
        "with signals.raised(), signals.defer_signals():\n    send()\n    send()",
        -signal.SIGTERM,
        "",
    ),
    "default actions": ("with signals.raised(), signals.default_signal_actions(): send()", -signal.SIGTERM, ""),
    "ignored": (IGNORED, 0, ""),
}


@pytest.mark.parametrize("code, status, message", CASES.values(), ids=CASES)
def test_a_signal_ends_the_process_in_the_right_way(code, status, message):
    done = run_bounded([sys.executable, "-c", BEGINNING + code], cwd=ROOT, timeout_seconds=20)
    assert done.returncode == status, done.stderr
    assert done.stderr.strip().splitlines()[-1:] == ([f"lean_finetune.core.signals.{message}"] if message else [])


DURING_IMPORTS = """
from lean_finetune.core.stage_command import exit_on_signal

with signals.raised(), exit_on_signal():
    try:
        send()
    except BaseException:
        print("an exception inside of an import")
"""


def test_a_signal_during_imports_raises_no_exception():
    """An abort with 80 lines, or an ignored Ctrl-C: PyTorch imports modules from C++ code."""
    done = run_bounded([sys.executable, "-c", BEGINNING + DURING_IMPORTS], cwd=ROOT, timeout_seconds=20)
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, "")
    assert done.stderr == "stopped by SIGTERM: no output is half-written; the same command starts again\n"


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


def test_a_signal_during_an_atomic_write_leaves_no_partial_directory(tmp_path: Path):
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
    assert ended >= 8, "a signal at every change of the disk"


STAGE = """
import atexit, importlib.machinery, os, signal, sys
sys.modules["__main__"].__spec__ = importlib.machinery.ModuleSpec("stages.demo", None)
from lean_finetune.core.stage_command import StageCommand

class Library:
    def __del__(self, write=os.write):
        write(1, b"module torn down, ")

library = Library()
atexit.register(print, "closed,", end=" ")

def work():
    if len(sys.argv) > 1:
        os.kill(os.getpid(), int(sys.argv[1]))

StageCommand("demo", callback=work).main([])
"""


@pytest.mark.parametrize(
    "numbers, status, output",
    [([], 0, "closed, "), ([signal.SIGTERM], 143, "closed, "), ([signal.SIGINT], 130, "closed, ")],
)
def test_a_stage_ends_after_its_exit_handlers_without_the_teardown_of_modules(numbers, status, output):
    """The teardown of torch's modules takes seconds, after which a scheduler kills a stopped stage."""
    done = run_bounded([sys.executable, "-c", STAGE, *(str(int(number)) for number in numbers)], cwd=ROOT)
    assert (done.returncode, done.stdout) == (status, output), done.stderr


def test_output_that_cannot_be_written_is_no_success():
    """A full disk behind standard output, and exit code 0."""
    program = STAGE.replace("def work():", "def work():\n    print('result')")
    with open("/dev/full", "w") as full:
        command, pipe = [sys.executable, "-c", program], subprocess.PIPE
        child = subprocess.Popen(command, cwd=ROOT, stdout=full, stderr=pipe, text=True, start_new_session=True)
        with killed_after(child):
            _, errors = child.communicate()
    assert child.returncode and "No space left on device" in errors


def test_importing_the_module_changes_no_signal_handler():
    """Only `python -m stages.…` restores the default action of Ctrl-C; a notebook that imports a stage does not."""
    code = "import signal, lean_finetune.core.signals as s; assert signal.getsignal(2) is signal.default_int_handler"
    run_bounded([sys.executable, "-c", code], cwd=ROOT, check=True)
