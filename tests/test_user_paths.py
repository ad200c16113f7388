"""Paths as users and strangers write them: what the system cannot look up is one line, in commands and parameters."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from cuda_memory.errors import UserError
from cuda_memory.snapshot import snapshot
from cuda_memory.user_paths import output_file, shell_line, text_path, user_path
from lean_finetune.commands.chat import chat
from lean_finetune.commands.choose.plan import plan
from lean_finetune.commands.explain import explain
from lean_finetune.commands.export import export
from lean_finetune.commands.fit import fit
from lean_finetune.commands.generate import generate
from lean_finetune.commands.import_config import import_config
from lean_finetune.commands.init import init
from lean_finetune.core.atomic_files import read_json
from lean_finetune.pinning.locate import TINY_DIRECTORY
from lean_finetune.stages.pin import main as pin
from tests.commands.tool_configs import LLAMA_FACTORY
from tests.processes import run_bounded
from tests.workspace import error, invoke, lay_out, write_rows

TINY = str(TINY_DIRECTORY)
PATHS = {
    "long": "x" * 300,
    "deep": "a/" * 3000 + "x",
    "no user": "~nouser/x",
    "a loop": "loop",
    "below a loop": "loop/x",
    "below a file": "rows.jsonl/x",
    "a device": "/dev/zero",
    "half an emoji": "\ud83d",
    "a null": "a\0b",
    "an option": "-rf",
    "long and a config": f"{'x' * 300}/config.json",
}
COMMANDS: dict[str, tuple[click.Command, list[str]]] = {
    "chat --model": (chat, ["--model", "@"]),
    "generate": (generate, ["--model", TINY, "--", "@", "out.jsonl"]),
    "generate --model": (generate, ["rows.jsonl", "out.jsonl", "--model", "@"]),
    "export --model": (export, ["out", "--model", "@"]),
    "init --model": (init, ["new", "--model", "@"]),
    "init --data": (init, ["new", "--data", "@"]),
    "init --check": (init, ["--check", "--", "@"]),
    "fit --model": (fit, ["--model", "@"]),
    "fit --params": (fit, ["--params", "@"]),
    "fit --from": (fit, ["--from", "@"]),
    "fit --lengths": (fit, ["--model", "tiny", "--gpu", "24GiB", "--lengths", "@"]),
    "plan --model": (plan, ["--model", "@"]),
    "plan --params": (plan, ["--params", "@"]),
    "import": (import_config, ["--out", "out.yaml", "--", "@"]),
    "explain": (explain, ["--", "@"]),
    "snapshot": (snapshot, ["--", "@"]),
}
"""Commands that read a path, which is @."""
OUTPUTS: dict[str, tuple[click.Command, list[str]]] = {
    "generate": (generate, ["--model", TINY, "--", "rows.jsonl", "@"]),
    "import --out": (import_config, ["run.yaml", "--out", "@"]),
    "plan --out": (plan, ["--model", "tiny", "--length", "16", "--out", "@"]),
    "snapshot --html": (snapshot, ["rows.jsonl", "--html", "@"]),
}
PARAMETERS: dict[str, tuple[str, dict[str, Any]]] = {
    "data.source": ("data", {}),
    "data.heldout_source": ("data", {"data__source": "rows.jsonl", "data__heldout_fraction": 0}),
    "data.chat_template": ("data", {"data__source": "rows.jsonl"}),
    "model.name": ("model", {}),
    "model.adapter": ("model", {"model__name": "tiny"}),
}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with rows, a configuration and a loop of links."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b"}] * 3)
    (tmp_path / "run.yaml").write_text(LLAMA_FACTORY)
    (tmp_path / "loop").symlink_to("loop")
    return tmp_path


def refused(command: click.Command, words: list[str]) -> str:
    """The one line that refuses a path."""
    result = CliRunner().invoke(command, words, catch_exceptions=False, input="")
    return error(result, result.exit_code or 1)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_path_that_cannot_be_looked_up_is_one_line(name: str, place: Path):
    """A traceback of the file system's `File name too long`, or a device that is read without end."""
    command, words = COMMANDS[name]
    before = sorted(place.rglob("*"))
    of_hub = ("below a loop", "below a file") if name == "init --model" else ()  # As ids of the hub are.
    for path in (path for kind, path in PATHS.items() if kind not in of_hub):
        text = refused(command, [word.replace("@", path) for word in words])
        assert len(text) < 1200, text
    assert sorted(place.rglob("*")) == before


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_that_is_no_file_is_refused_before_the_work(name: str, place: Path):
    """A device of the system replaced by a file of answers, or answers of an hour that cannot be written."""
    command, words = OUTPUTS[name]
    (place / "closed").mkdir(mode=0o500)
    (place / "directory").mkdir()
    for path in ("/dev/null", "directory", "rows.jsonl/x", "x" * 300, "loop"):
        refused(command, [word.replace("@", path) for word in words])
    assert not Path("/dev/null").is_file()


@pytest.mark.parametrize("parameter", PARAMETERS)
def test_a_parameter_that_cannot_be_looked_up_is_one_line(parameter: str, place: Path):
    what, values = PARAMETERS[parameter]
    for name, path in PATHS.items():
        if name not in ("half an emoji", "a null"):  # No YAML has them.
            lay_out(place, **{**values, parameter.replace(".", "__"): path})
            assert error(invoke(pin, what)).startswith(f"{parameter}: "), name


def test_a_path_of_home_a_link_and_a_pipe_are_taken(place: Path):
    os.mkfifo("pipe")
    assert user_path("~/rows.jsonl", "x") == place / "rows.jsonl" and user_path("none/x", "x") == Path("none/x")
    assert user_path("pipe", "x") == Path("pipe")
    Path("link").symlink_to("rows.jsonl")
    assert output_file(Path("link"), "x") == place / "rows.jsonl" and output_file(Path("new/x"), "x") == place / "new/x"
    assert user_path(os.fsdecode(b"\xff"), "x").name == "\udcff"
    with pytest.raises(UserError, match="must be a name in UTF-8"):
        text_path(os.fsdecode(b"\xff"), "x")


def test_printed_commands_are_read_back_by_a_shell():
    """`cd -rf`, or a name with a line end that ends the command."""
    words = ["./-rf", "a b", "it's", "a\nb", "\x1b]52;x", "naïve\\x", "é\u202e\U0001f600\t"]
    line = shell_line(["printf", "%s\\0", *words])
    assert line.isprintable()
    done = run_bounded(["bash", "-c", line], check=True, env={**os.environ, "LC_ALL": "C.UTF-8"})
    assert done.stdout.split("\0")[:-1] == words


def test_init_names_a_directory_that_no_shell_takes_for_an_option(place: Path, monkeypatch: pytest.MonkeyPatch):
    from lean_finetune.commands.project import create

    monkeypatch.setattr(create, "start_dvc", lambda here, *_: (here / ".dvc").mkdir())
    assert "  cd ./-rf\n" in invoke(init, "--", "-rf").output
    export_lines = invoke(export, "--model", TINY, "--", "-o").output
    assert "vllm serve ./-o\n" in export_lines and "create o -f ./-o/Modelfile" in export_lines


def made_a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("how", ["corrupt", "locked", "a directory"])
def test_a_git_index_that_cannot_be_read_is_one_line(how: str, place: Path):
    """Tracebacks of DVC's libraries, or a check that is left out without a word."""
    run_bounded(["git", "init", "-q"], check=True)
    run_bounded(["git", "add", "run.yaml"], check=True)
    index = place / ".git/index"
    changes: dict[str, Callable[[], Any]] = {
        "corrupt": lambda: index.write_bytes(b"x" * 300),
        "locked": lambda: shutil.copy(index, place / ".git/index.lock"),
        "a directory": lambda: made_a_directory(index),
    }
    changes[how]()
    assert "`git status`" in error(invoke(init, "new")) and not (place / "new").exists()
    if how != "locked":  # Reading needs no lock.
        lay_out(place, data__source="rows.jsonl")
        assert "git: cannot read which files it tracks" in error(invoke(pin, "data"))


def test_a_deep_or_unreadable_stamp_is_one_line(place: Path, monkeypatch: pytest.MonkeyPatch):
    (place / "locks").mkdir()
    for text in ("[" * 100_000, '{"a":' * 100_000, "{", '{"version": 1}', "\udcff"):
        (place / "locks/project.json").write_bytes(text.encode(errors="surrogateescape"))
        assert "locks/project.json: cannot be read" in error(invoke(init, "--check", "."))
        (place / "stamp.json").write_bytes(text.encode(errors="surrogateescape"))
        if "version" not in text:
            with pytest.raises(UserError, match=r"stamp\.json.*not JSON"):
                read_json(place / "stamp.json")
    for unreadable in (place / "locks", place / "loop"):
        with pytest.raises(UserError, match="cannot be read"):
            read_json(unreadable)
