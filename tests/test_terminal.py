"""A terminal obeys nothing that a stranger wrote: answers, names, keys, values, rows and errors are shown, as codes."""

import ast
import json
import logging
import os
import shutil
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner, Result
from tokenizers import Tokenizer, models

from cuda_memory.errors import OneLineCommand, UserError
from cuda_memory.snapshot import snapshot
from cuda_memory.terminal import echo, echo_json, echo_text, visible
from lean_finetune.commands.chat import chat, text_streamer
from lean_finetune.commands.choose.plan import plan
from lean_finetune.commands.doctor import doctor
from lean_finetune.commands.explain import explain
from lean_finetune.commands.export import export
from lean_finetune.commands.fit import fit
from lean_finetune.commands.generate import generate, json_line
from lean_finetune.commands.import_config import import_config
from lean_finetune.commands.init import init
from lean_finetune.commands.run.experiments import compare
from lean_finetune.commands.run.pipeline import StageLog
from lean_finetune.commands.run.run import run as run_project
from lean_finetune.commands.run.shown import Shown
from lean_finetune.pinning.locate import TINY_DIRECTORY
from lean_finetune.stages.bucket import main as bucket
from lean_finetune.stages.pin import main as pin
from lean_finetune.stages.tokenize import main as tokenize
from tests.conftest import ROOT
from tests.cuda_memory.snapshots import Snapshot, frame
from tests.processes import run_bounded
from tests.workspace import lay_out, write_rows

HOSTILE = "\x1b]52;c;eA==\x07\u202egpj\x9b2J\r\x7f\x00"
"""Writes the clipboard, shows text from right to left, clears the screen, overwrites the line."""
NAMED = HOSTILE.replace("\x00", "")
"""As a name of a file, which cannot have the last character."""
LETTERS = "שלום 👩‍💻 naïve\tnext"
"""Letters of other scripts, joined emoji and tabs, which stay."""
FULL = Path("/dev/full")


def shown(result: Result, *parts: str) -> None:
    """Check that the output of a command has these parts, and nothing that a terminal obeys."""
    for text in (result.stdout, result.stderr):
        assert text == visible(text), repr(text)
    assert all(part in result.output for part in parts) and "Traceback" not in result.output, result.output


def run(command: click.Command, *arguments: str, **options: Any) -> Result:
    return CliRunner().invoke(command, list(arguments), catch_exceptions=False, **options)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with params.yaml, of a name that a terminal would obey."""
    directory = tmp_path / f"x{NAMED}"
    directory.mkdir()
    monkeypatch.chdir(directory)
    return lay_out(directory)


@pytest.fixture
def model(place: Path) -> Path:
    """A model whose directory has such a name."""
    return Path(shutil.copytree(TINY_DIRECTORY, place / f"m{NAMED}"))


@click.command(cls=OneLineCommand)
def answers() -> None:
    """Print an answer as `chat` does."""
    words = Tokenizer(models.WordLevel({HOSTILE: 0, f"{LETTERS}\n": 1, "a": 2}, unk_token="a"))
    printer = text_streamer(SimpleNamespace(tokenizer=words), {2}, partial(echo_text, nl=False))  # type: ignore[arg-type]
    for ids in ([2, 0], [0], [1], [2]):  # First the prompt.
        printer.put(torch.tensor(ids))
    printer.end()


def test_answers_of_chat_are_shown_and_letters_of_all_scripts_stay(model: Path):
    """An answer that writes the clipboard."""
    assert run(answers).stdout == f"{visible(HOSTILE)} {LETTERS}\n"
    shown(run(chat, "--model", str(model), "--max-new-tokens", "2", input=b"a\n"), "m\\x1b]52;c;eA==\\x07\\u202egpj")


def test_answers_of_generate_are_exact_and_its_output_is_shown(model: Path, place: Path):
    """Answers changed by what is made for terminals: JSON has codes of its own for such characters."""
    assert json.loads(json_line({"answer": f"{HOSTILE}{LETTERS}"}))["answer"] == f"{HOSTILE}{LETTERS}"
    write_rows(place / f"p{NAMED}.jsonl", [{"prompt": "a", HOSTILE: HOSTILE}])
    words = (f"p{NAMED}.jsonl", f"a{NAMED}.jsonl", "--model", str(model), "--max-new-tokens", "2")
    shown(run(generate, *words), "1 answer: a\\x1b]52")
    assert json.loads((place / f"a{NAMED}.jsonl").read_text())[HOSTILE] == HOSTILE
    write_rows(place / "wrong.jsonl", [{HOSTILE: 1}])
    shown(run(generate, "wrong.jsonl", f"b{NAMED}", "--model", str(model)), "error: wrong.jsonl:1: ")


def test_lines_of_export_and_names_of_adapters_are_shown(model: Path, place: Path):
    shown(run(export, f"out{NAMED}", "--model", str(model)), "vllm serve ", "out\\x1b]52")
    config = {"base_model_name_or_path": HOSTILE, "r": 4, "lora_alpha": HOSTILE, "target_modules": [HOSTILE]}
    (place / "adapter").mkdir()
    (place / "adapter/adapter_config.json").write_text(json.dumps(config))
    shown(run(chat, "--model", "adapter"), "error: --model: ", "\\x1b]52")
    shown(run(chat, "--model", NAMED), "error: --model: ", "\\x1b]52")


def test_what_init_says_is_shown(place: Path, monkeypatch: pytest.MonkeyPatch):
    """Names of directories."""
    monkeypatch.setenv("HOME", str(place))
    shown(run(init, f"new{NAMED}"), "new\\x1b]52", "a new project")
    shown(run(init, f"new{NAMED}"), "is a project already")
    shown(run(init, "--check", f"new{NAMED}"), "new\\x1b]52")


def test_keys_and_values_of_other_tools_are_shown(place: Path):
    """The configuration of a stranger."""
    quoted = json.dumps(HOSTILE)
    text = f"model_name_or_path: tiny\nstage: sft\ndo_train: true\nfinetuning_type: lora\n{quoted}: 1\n"
    (place / f"run{NAMED}.yaml").write_text(text)
    shown(run(import_config, f"run{NAMED}.yaml", "--out", f"p{NAMED}.yaml"), "not known", "\\x1b]52", "written")
    (place / "wrong.yaml").write_text(f"{text}lora_target: {quoted}\nlearning_rate: {quoted}\n")
    shown(run(fit, "--from", "wrong.yaml"), "error: wrong.yaml", "\\x1b]52")


def test_values_of_parameters_and_of_a_model_are_shown(place: Path):
    for key in ("model.name", "hardware.gpu", "train.optimizer", HOSTILE.replace("\x00", "")):
        shown(run(fit, "--model", "tiny", "--set", f"{key}={json.dumps(HOSTILE)}"), "error: ", "]52;c;eA==")
    config = json.loads((TINY_DIRECTORY / "config.json").read_text())
    (place / "model").mkdir()
    for key in ("model_type", "hidden_act", "dtype"):
        (place / "model/config.json").write_text(json.dumps({**config, key: HOSTILE}))
        shown(run(fit, "--model", "model", "--gpu", "24GiB"))
    shown(run(fit, "--model", "tiny", "--lengths", NAMED), "error: --lengths: ", "\\x1b]52")


def test_rows_of_a_data_set_are_shown(place: Path):
    """The keys and texts of rows, and the names of files, in notes and errors of the stages."""
    name = f"rows{NAMED}.jsonl"
    rows = [{"instruction": f"q {number}", "output": HOSTILE, HOSTILE: 1} for number in range(3)]
    write_rows(place / name, rows)
    lay_out(place, data__source=name, model__name="tiny")
    assert run(pin, "data").exit_code == run(pin, "model").exit_code == 0
    shown(run(tokenize))
    write_rows(place / name, [*rows, {HOSTILE: HOSTILE}])
    shown(run(tokenize), "error: ", "\\x1b]52")
    assert run(pin, "data").exit_code == 0
    shown(run(tokenize), "error: ", "\\x1b]52")
    shown(run(bucket, "--index", f"i{NAMED}"), "error: ", "\\x1b]52")
    lay_out(place, data__source=f"none{NAMED}")
    shown(run(pin, "data"), "error: data.source: ", "\\x1b]52")
    shown(run(plan, "--model", "tiny", "--data", name, "--gpu", "24GiB"), "\\x1b]52")


STAGES = {
    "estimate": "--plan",
    "reference": "--tokens",
    "train": "--tokens",
    "evaluate": "--tokens",
    "report": "--locks",
}


@pytest.mark.parametrize("stage", STAGES)
def test_errors_of_stages_are_shown(stage: str, place: Path):
    """A lock or a directory with such a name."""
    command = import_module(f"lean_finetune.stages.{stage}").main
    shown(run(command, STAGES[stage], f"none{NAMED}"), "error: ")


@click.command(cls=OneLineCommand)
@click.option("--json", "as_json", is_flag=True)
def events(as_json: bool) -> None:
    """Say what DVC says, as `run` does."""
    with Shown(as_json=as_json) as out:
        record = logging.LogRecord("dvc", logging.WARNING, "", 0, HOSTILE, None, None)
        StageLog(out).emit(record)
        out.event("end", HOSTILE, answer=HOSTILE)


def test_what_run_says_of_dvc_and_of_answers_is_shown(place: Path, capfd: pytest.CaptureFixture[str]):
    shown(run(events), "note: dvc: \\x1b]52", "\n\\x1b]52")
    capfd.readouterr()
    run(events, "--json")
    lines = capfd.readouterr().out.splitlines()
    assert [json.loads(line).get("answer") for line in lines] == [None, HOSTILE]
    assert all(line == visible(line) for line in lines)
    for command in (run_project, compare):
        shown(run(command, *(() if command is compare else (f"d{NAMED}", "--model", NAMED))), "error: ")


def test_recordings_and_this_machine_are_shown(place: Path, monkeypatch: pytest.MonkeyPatch):
    found = Snapshot()
    found.reserve(0, 1 << 22)
    found.alloc(0, 1 << 21, frame(f"/x/{HOSTILE}.py", 21, HOSTILE))
    found.fail(1 << 30, 1 << 20, frame(f"/x/{HOSTILE}.py", 22, HOSTILE))
    path = found.write(place / f"s{NAMED}.pickle")
    shown(run(snapshot, str(path)), "\\x1b]52")
    json.loads(run(snapshot, str(path), "--json").stdout)
    shown(run(snapshot, str(path), "--json"))
    (place / f"c{NAMED}.csv").write_text(f"step,{NAMED}\n1,2\n")
    shown(run(explain, f"c{NAMED}.csv"), "error: ", "\\x1b]52")
    monkeypatch.setattr("lean_finetune.commands.doctor.CHECKS", doctor.callback.__globals__["CHECKS"][4:8])  # type: ignore[union-attr]
    shown(run(doctor), "free for ", "\\x1b]52")


LIBRARY = """
import logging, sys, warnings
from cuda_memory.terminal import guarded_streams
text = sys.argv[1]
with guarded_streams():
    warnings.warn(text)
    logging.warning(text)
    print(text)
    sys.stderr.write("\\r 10 %\\x1b[A\\n")
    raise RuntimeError(text)
"""


def test_what_libraries_print_is_shown_and_bars_redraw():
    """A warning, a log line or a traceback that quotes a file's text; a progress bar of hundreds of lines."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = run_bounded([sys.executable, "-c", LIBRARY, NAMED], env=environment)
    assert done.stdout == visible(NAMED) + "\n"
    assert done.stderr.count("\\x1b]52;c;eA==\\x07\\u202egpj") == 3 and "\n 10 %\x1b[A\n" in done.stderr
    assert visible(done.stderr.replace("\x1b[A", "")) == done.stderr.replace("\x1b[A", "")


@click.command(cls=OneLineCommand)
def prints() -> None:
    """A command."""
    echo(f"a {HOSTILE}\nerror: b")
    echo_json({"a": HOSTILE})
    raise UserError(f"a:\n  {HOSTILE}\n\tb", f"more\n{HOSTILE}")


def test_a_line_is_one_line_and_json_stays_json():
    """A name with a line end that adds a line of its own; errors of other libraries in three lines."""
    result = run(prints)
    lines = result.stdout.splitlines()
    one = visible(HOSTILE.replace("\r", " "))
    assert lines[0] == f"a {one} error: b" and json.loads("".join(lines[1:])) == {"a": HOSTILE}
    assert result.stderr == f"error: a: {one} b\n  more {one}\n"


def test_all_output_passes_one_place():
    """A command that prints by itself prints what a stranger wrote."""
    allowed = {"cuda_memory/terminal.py", "lean_finetune/core/progress.py", "lean_finetune/core/systems.py"}
    wrong = []
    for package in ("cuda_memory", "lean_finetune"):
        for path in (ROOT / package).rglob("*.py"):
            name, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
            if not any(call in text for call in ("print(", "click.", "tqdm.write")):
                continue
            for node in ast.walk(ast.parse(text)):
                called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
                if called in ("print", "click.echo", "click.secho", "tqdm.write", "click.Path") and name not in allowed:
                    wrong.append(f"{name}: {ast.unparse(node)}")
    assert not wrong


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
@pytest.mark.parametrize(("words", "code"), [(["fit", "--list-gpus"], 1), (["fit", "--help"], 1), (["fit", "--no"], 2)])
def test_a_full_disk_behind_the_output_is_one_line(words: list[str], code: int):
    """A traceback, and two lines of the interpreter's."""
    command = [sys.executable, "-c", "from lean_finetune.cli import main; main()", *words]
    shell = ["sh", "-c", 'exec "$@" >/dev/full', "sh", *command]
    done = run_bounded(shell, env={**os.environ, "PYTHONPATH": str(ROOT)})
    reason = "output cannot be written (No space left on device); free space, or write elsewhere"
    assert done.returncode == code
    assert done.stderr == f"error: {reason}\n" if code == 1 else done.stderr.count("\n") == 1
