"""Commands that the page starts: their limits, and what they may read. Needs neither Gradio nor a browser."""

import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import psutil
import pytest

from lean_finetune.core.errors import UserError
from lean_finetune.page import jobs
from lean_finetune.page.fit_answer import fit_document
from lean_finetune.page.jobs import end_commands, environment, run_command
from lean_finetune.page.limits import HOSTED, LOCAL
from lean_finetune.page.project.documents import fault_document
from tests.conftest import ROOT
from tests.processes import command_words, run_bounded

NO_LIMITS = {"seconds": None, "memory_bytes": None, "file_bytes": None, "only_below": None}
PROGRAM = "from lean_finetune.page.child import set_limits; set_limits({limits}); {then}"


def ran(then: str, **limits: object) -> subprocess.CompletedProcess[str]:
    """What a process with these limits says."""
    program = PROGRAM.format(limits={**NO_LIMITS, **limits}, then=then)
    return run_bounded([sys.executable, "-c", program], cwd=ROOT, timeout_seconds=60)


def test_files_elsewhere_are_not_opened(tmp_path):
    """A visitor's configuration may name any file of the server."""
    inside, outside, link = tmp_path / "own" / "a", tmp_path / "b", tmp_path / "own" / "c"
    inside.parent.mkdir()
    inside.write_text("inside")
    outside.write_text("secret")
    link.symlink_to(outside)
    below = [str(inside.parent)]
    assert ran(f"print(open({str(inside)!r}).read())", only_below=below).stdout == "inside\n"
    for path in (outside, link, f"{inside.parent}/../b", f"{tmp_path}/ownother"):
        found = ran(f"print(open({str(path)!r}).read())", only_below=below)
        assert found.returncode == 1 and "not allowed on this page" in found.stderr and "secret" not in found.stdout
    assert "not allowed" in ran(f"import os; os.listdir({str(tmp_path)!r})", only_below=below).stderr


def test_memory_time_and_files_are_limited(tmp_path):
    assert "MemoryError" in ran("bytearray(1 << 30)", memory_bytes=1 << 28).stderr
    assert ran("\nwhile True: pass", seconds=1).returncode < 0
    big = f"open({str(tmp_path / 'big')!r}, 'wb').write(bytes(2 << 20))"
    assert ran(f"import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); {big}", file_bytes=1 << 20).returncode
    assert (tmp_path / "big").stat().st_size <= 1 << 20


def test_a_hosted_command_finds_no_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    found = environment(tmp_path, hosted=True)
    assert "HF_TOKEN" not in found and found["HOME"] == found["HF_HOME"] == str(tmp_path)
    assert environment(tmp_path, hosted=False)["HF_TOKEN"] == "secret"


def test_a_command_runs_in_its_place_and_says_its_error(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    listed = run_command(["fit", "--list-gpus"], tmp_path, HOSTED)
    assert listed.code == 0 and "H100" in listed.out
    wrong = run_command(["fit", "--lenght=3"], tmp_path, HOSTED)
    assert wrong.code == 2 and "--lenght" in wrong.fault and "\n" not in wrong.fault
    with pytest.raises(UserError, match="longer than 0.01 s"):
        run_command(["fit", "--list-gpus"], tmp_path, replace(HOSTED, seconds=0.01))  # type: ignore[arg-type]


def test_commands_end_with_the_page(tmp_path, monkeypatch):
    """Ctrl-C waited for the command of a window until an alarm ended the page, and the command went on."""
    monkeypatch.setattr(jobs, "_ending", threading.Event())
    with ThreadPoolExecutor(1) as thread:
        ended = thread.submit(run_command, ["fit", "--model=llama-3.1-70b", "--gpu=T4"], tmp_path, LOCAL)
        while not (started := [child for child in psutil.Process().children() if "fit" in command_words(child)]):
            assert not ended.done()
        end_commands()
        assert ended.result(10).code == -signal.SIGKILL
    assert not started[0].is_running()
    assert run_command(["fit", "--list-gpus"], tmp_path, LOCAL).code == -signal.SIGKILL, "one that has waited starts"


HOSTILE = "</pre><img src=x onerror=run()><script>run()</script>'\"&"
PHASE = {"peak_bytes": 5 << 30, "by_category_bytes": {"weights": 4 << 30, HOSTILE: 1 << 30}}
ANSWER = {
    "verdict": "does not fit",
    "verdict_text": f"does not fit: {HOSTILE}",
    "peak_bytes": 5 << 30,
    "usable_bytes": 4 << 30,
    "worst_phase": HOSTILE,
    "phases": {HOSTILE: PHASE},
    "tiers": {"native": {"tensors_bytes": 1, "reserved_bytes": 2, "process_bytes": None}},
    "device": {"name": HOSTILE, "memory_bytes": 6 << 30},
    "smallest_gpu": None,
    "longest_row_tokens": {"value": 0, "limit": None},
    "largest_micro_batch_tokens": {"value": 8, "limit": HOSTILE},
    "tokens_per_second": [1.0, 2.0],
    "largest_image": None,
    "would_fit": [{"settings": [f"a={HOSTILE}"], "peak_bytes": 1, "slowdown": 1.5, "effect": HOSTILE, "host_bytes": 7}],
    "from": {
        "tool": HOSTILE,
        "used": {HOSTILE: "train.lr"},
        "values": {"train.lr": HOSTILE},
        "differs": [HOSTILE],
        "ignored": {HOSTILE: [HOSTILE]},
        "unknown": [HOSTILE],
    },
    "as_tool": {
        "verdict": HOSTILE,
        "peak_bytes": 3,
        "worst_phase": HOSTILE,
        "causes": [{"bytes": 3, "what": HOSTILE}],
        "one_change": {"keys": {HOSTILE: HOSTILE}, "peak_bytes": 1, "verdict": HOSTILE},
        "what_fits": [{"keys": {HOSTILE: HOSTILE}, "peak_bytes": 1, "verdict": HOSTILE, "effect": HOSTILE}],
    },
}


def test_every_text_of_an_answer_is_escaped():
    """Names of models, files, keys and values are others'."""
    for found in (fit_document(json.loads(json.dumps(ANSWER)), ["fit", f"--model={HOSTILE}"]), fault_document(HOSTILE)):
        assert "<img" not in found and "<script" not in found and "&lt;img src=x" in found
    assert found.count("Content-Security-Policy") == 1


def test_where_gradio_is_absent_one_line_says_what_to_install():
    """The rest of the project never needs it."""
    program = (
        "import sys; sys.modules['gradio'] = None\nimport importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *more: None if name == 'gradio' else find(name, *more)\n"
        "from lean_finetune.cli import main; main(['page'])"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = run_bounded([sys.executable, "-c", program], env=environment, timeout_seconds=60)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert 'pip install "lean-finetune[page]"' in done.stderr
