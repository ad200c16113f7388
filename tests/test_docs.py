"""The documentation: its commands parse, its parameters pass the schema, its paths, links and images exist."""

import importlib.util
import os
import re
import shlex
import sys
from pathlib import Path

import click
import pytest
from dvc.cli import parse_args
from ruamel.yaml import YAML

from cuda_memory.snapshot import snapshot
from lean_finetune import cli
from lean_finetune.config.load import parse_params, with_flags
from tests.conftest import ROOT
from tests.processes import run_bounded

PAGES = [
    *sorted(ROOT.glob("README*.md")),
    ROOT / "cuda_memory/README.md",
    ROOT / "lean_finetune/project/README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]


def relative(page: Path) -> str:
    """A page's name below the repository."""
    return page.relative_to(ROOT).as_posix()


each_page = pytest.mark.parametrize("page", PAGES, ids=relative)
TARGETS = set(re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split())  # type: ignore[index]
YAML_FILES = YAML(typ="safe")
STAGES = set(YAML_FILES.load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))["stages"])
PARAMS = parse_params(YAML_FILES.load((ROOT / "params.yaml").read_text(encoding="utf-8")))
OTHER_TOOLS = {
    "cp",
    "cd",
    "python3",
    "pre-commit",
    "git",
    "source",
    "hf",
    "sbatch",
    "nvidia-smi",
    "tail",
    "tensorboard",
    "docker",
}
"""Commands that are not ours, apart from their paths."""


def documented_commands(page: Path) -> list[list[str]]:
    """The simple commands in a page's fenced `sh` blocks and indented or inline `dvc`, `make` and `python -m` lines."""
    text = page.read_text(encoding="utf-8")
    lines = [
        line
        for block in re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        for line in block.splitlines()
    ]
    inline = re.findall(r"`((?:dvc (?:exp run|repro|plots)|lean-finetune|make|python -m) [^`…]*)`", text)
    lines += [line for line in inline if not re.search(r"[<>]|\.\.\.", line)]
    commands = []
    for line in lines:
        words = shlex.split(line, comments=True)
        for part in " ".join(map(shlex.quote, words)).split(" '&&' ") if words else []:
            commands.append(shlex.split(part))
    return commands


def check_command(words: list[str]) -> None:
    """Parse a command as its program would; fail where it does not exist or does not accept the arguments."""
    program, *arguments = words
    if "=" in program:
        return check_command(arguments)
    if program == "dvc":
        return check_dvc(arguments)
    if program == "make":
        assert set(arguments) <= TARGETS, f"make has no target {arguments}"
    elif program == "lean-finetune":
        check_click(cli.main, arguments)
    elif program in ("python", "$BIN/python") and arguments[:1] == ["-m"]:
        check_module(arguments[1], arguments[2:])
    elif program == "cuda-memory":
        check_click(snapshot, arguments)
    elif program == "pip":
        assert arguments[:1] == ["install"]
    else:
        assert program in OTHER_TOOLS or (ROOT / program).exists(), f"unknown command {words}"
    return None


def check_dvc(arguments: list[str]) -> None:
    """Let dvc parse the arguments; check stages and the parameters given to -S together."""
    parsed = parse_args(arguments)
    assert set(getattr(parsed, "targets", None) or []) <= STAGES, arguments
    flags = getattr(parsed, "set_param", None) or []
    values = [flag.partition("=")[2].split(",") if parsed.queue else [flag.partition("=")[2]] for flag in flags]
    for number in range(max(map(len, values), default=0)):
        with_flags(
            PARAMS,
            [f"{flag.partition('=')[0]}={each[number % len(each)]}" for flag, each in zip(flags, values, strict=True)],
        )


def check_click(command: click.Command, arguments: list[str]) -> None:
    """Parse the arguments of a click command without running it."""
    if isinstance(command, click.Group):
        assert arguments[0] in command.commands, f"no command {arguments[0]}"
        command, arguments = command.commands[arguments[0]], arguments[1:]
    command.make_context(command.name, list(arguments), resilient_parsing="--help" in arguments)


def check_module(module: str, arguments: list[str]) -> None:
    """Import a module that is run by `python -m`, and parse its arguments."""
    if module in ("pip", "venv"):
        return
    if module == "pytest":
        named = [word.split("::")[0] for word in arguments if word.startswith("tests")]
        assert all((ROOT / name).exists() for name in named), named
        return
    if module.startswith("benchmarks."):  # Found, not imported: they import torch and transformers.
        assert importlib.util.find_spec(module) is not None, module
        return
    main = getattr(importlib.import_module(module), "main", None)
    if isinstance(main, click.Command):
        check_click(main, [re.sub(r"\$\w+/\$\w+", "0/4", word) for word in arguments])
    else:
        assert importlib.util.find_spec(module) is not None


@each_page
def test_every_command_exists_and_accepts_its_arguments(page):
    for words in documented_commands(page):
        try:
            check_command(words)
        except (Exception, SystemExit) as error:
            pytest.fail(f"{page.name}: {' '.join(words)}: {error!r}")


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "parameter-names.md"], ids=relative)
def test_every_parameter_named_is_in_params_yaml(page):
    """A dotted parameter in code quotes, such as `train.grad_ckpt`, that was renamed."""
    known = YAML_FILES.load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    sections = [name for name, value in known.items() if isinstance(value, dict)]
    text = page.read_text(encoding="utf-8").split("## All fields\n")[0]  # Of JSON, which has a `model.type`, too.
    named = re.findall(rf"`((?:{'|'.join(sections)})(?:\.\w+)+)(?:[:=][^`]*)?`", text)
    for dotted in (name for name in named if not name.endswith(".json")):
        value = known
        for key in dotted.split("."):
            assert isinstance(value, dict) and key in value, f"{page.name}: {dotted}"
            value = value[key]


@each_page
def test_every_link_and_image_resolves(page):
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    local = [target for target in targets if not target.startswith(("http://", "https://"))]
    assert [target for target in local if not (page.parent / target).exists()] == []


@each_page
def test_every_file_named_exists(page):
    """A page that sends its reader to a module or file that was renamed."""
    tracked = run_bounded(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, check=True)
    files = {f"/{name}" for name in tracked.stdout.splitlines()}
    text = page.read_text(encoding="utf-8")
    modules = re.findall(r"`((?:\w+/)*\w+\.py)(?:::\w+)?`", text)
    assert [name for name in modules if not any(file.endswith(f"/{name}") for file in files)] == []
    paths = re.findall(r"`((?:docs|cuda_memory|lean_finetune|stages|tests|benchmarks)/[\w./-]*)`", text)
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.slow
def test_the_prediction_in_the_readme_is_what_the_command_prints():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    command, shown = re.search(r"```sh\n(lean-finetune fit [^\n]*)\n```\n```\n(.*?)```", text, re.DOTALL).groups()  # type: ignore[union-attr]
    words = shlex.split(command, comments=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    program = [sys.executable, "-m", "lean_finetune.cli", *words[1:]]
    done = run_bounded(program, cwd=ROOT, env=environment, check=True)
    assert done.stdout.strip() == shown.strip()


@pytest.mark.slow
def test_the_curve_of_a_first_step_is_what_the_command_prints():
    """The case of a run that died in its first update, which its user must recognise."""
    section = (ROOT / "docs/out-of-memory.md").read_text(encoding="utf-8").split("ran out in the first update\n")[1]
    command, shown = re.search(r"```sh\n(lean-finetune fit [^\n]*)\n```\n```\n(.*?)```", section, re.DOTALL).groups()  # type: ignore[union-attr]
    program = [sys.executable, "-m", "lean_finetune.cli", *shlex.split(command)[1:]]
    done = run_bounded(program, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 3 and shown.strip() in done.stdout


@pytest.mark.slow
def test_the_command_for_70b_prints_the_figures_of_its_table():
    """Peak, RAM, disk and time of training all weights on one card, which only this page states."""
    text = (
        (ROOT / "docs/memory-switches.md").read_text(encoding="utf-8").split("## 70B, all weights, one 80 GB card")[1]
    )
    command = re.search(r"```sh\n(lean-finetune fit [^\n]*)\n```", text)[1]  # type: ignore[index]
    row = re.search(r"^\| `adamw` \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| (.*) \|$", text, re.MULTILINE)
    assert row is not None and row.groups() == ("16.58", "149.5", "788.5", "14 min")
    program = [sys.executable, "-m", "lean_finetune.cli", *shlex.split(command)[1:]]
    done = run_bounded(program, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    peak, ram, disk, step = row.groups()
    assert re.search(rf"^  tensors +{peak} GiB", done.stdout, re.MULTILINE) and "fits: " in done.stdout
    for shown in (
        f"{ram} GiB: ",
        f"{disk} GiB: optimizer",
        f"{step} by the data sheet",
    ):
        assert shown in done.stdout


@pytest.mark.slow
def test_the_python_of_the_page_for_scripts_runs(tmp_path: Path):
    """The lines that everyone copies, and that nobody has run."""
    [code] = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/scripts.md").read_text(encoding="utf-8"), re.S | re.M)
    command = tmp_path / "lean-finetune"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m lean_finetune "$@"\n')
    command.chmod(0o755)
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path}
    done = run_bounded([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True)
    assert re.fullmatch(r"fits \d+ \d+\n", done.stdout)
    code = code.replace('"llama-3.1-8b"', '"none/at/all"')
    done = run_bounded([sys.executable, "-c", code], cwd=tmp_path, env=environment)
    assert done.returncode == 1 and "Traceback" not in done.stderr and done.stderr.count("none/at/all") == 2


def test_the_readme_of_a_project_says_how_to_work_there():
    """An assistant that opens a project, and reads the one file that it always reads."""
    page = ROOT / "lean_finetune/project/README.md"
    commands = {words[1] for words in documented_commands(page) if words[0] == "lean-finetune"}
    assert {"run", "fit", "plan", "exp", "compare", "chat", "explain"} <= commands
    text = page.read_text(encoding="utf-8")
    outs = YAML_FILES.load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))["stages"].values()
    written = [next(iter(out)) if isinstance(out, dict) else out for stage in outs for out in stage["outs"]]
    named = re.findall(r"`(data/[\w./-]+)`", text)
    assert {"data/report/report.html", "data/tuned/"} < set(named)
    assert [name for name in named if not any(f"{name}/".startswith(f"{out}/") for out in written)] == []


def test_what_reruns_what_is_so():
    """The table of the page for scripts, against dvc.yaml."""
    text = (ROOT / "docs/scripts.md").read_text(encoding="utf-8").split("## What reruns what\n")[1].split("\n## ")[0]
    stages = YAML_FILES.load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))["stages"]
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) >= 8
    for changed, first in rows:
        [*_, named] = [None, *re.findall(r"`(\w+)`", first)[:1]]
        for key in re.findall(r"`([\w.]+)`", changed):
            readers = [
                name
                for name, stage in stages.items()
                if any(f"{key}.".startswith(f"{param}.") for param in stage.get("params", ()))
            ]
            # The last stage, which reads all, has no effect on the others.
            assert next((name for name in readers if name != "report"), None) == named, key


@pytest.mark.slow
def test_the_site_builds_without_a_broken_link(tmp_path: Path):
    """`make docs`, with mkdocs as its users install it."""
    pytest.importorskip("material", reason="mkdocs-material is not installed")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    run_bounded(command, cwd=ROOT, env=environment, check=True)
    assert "<h1" in (tmp_path / "site/index.html").read_text(encoding="utf-8")
    assert (tmp_path / "site/params.yaml").read_text() == (ROOT / "params.yaml").read_text()


@pytest.mark.parametrize("page", [page for page in PAGES if "zh" in relative(page)], ids=relative)
def test_lines_of_chinese_pages_do_not_end_inside_text(page: Path):
    """A line's end becomes a space, which Chinese text does not have."""
    chinese = "[\u3000-\u9fff\uff00-\uffef]"
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    starts = r"(?!\s*(?:[-|#!]|    ))"
    assert re.findall(f"^{starts}.*{chinese}\n{starts}.*{chinese}.*$", text, re.MULTILINE) == []
    assert re.findall(f"^- .*{chinese}\n {{2}}.*", text, re.MULTILINE) == []


def test_the_chinese_readme_shows_the_same_answer():
    """The sample of `fit` in one page is of another version than in the other."""
    pages = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh.md"))
    answers = {re.search(r"^```\n(verdict .*?)^```$", page, re.MULTILINE | re.DOTALL)[1] for page in pages}  # type: ignore[index]
    assert len(answers) == 1
