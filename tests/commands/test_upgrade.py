"""`lean-finetune init --check` and `--upgrade`: a project of another version, and what its user edited."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from lean_finetune.commands.init import init
from lean_finetune.commands.project import create, upgrade, write_all
from lean_finetune.commands.project.merge_params import merge_params
from lean_finetune.commands.project.params_file import change_params
from lean_finetune.commands.project.template import (
    FORMER,
    IGNORE_FILES,
    STAMP,
    generated_files,
    installed_version,
    template_files,
    text_hash,
)
from lean_finetune.config.load import load_params
from lean_finetune.core.read_yaml import parse_yaml
from tests.workspace import error, invoke

PARAMS = template_files()["params.yaml"]


@pytest.fixture(scope="module")
def new_project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project that tests copy."""
    directory = tmp_path_factory.mktemp("new")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        patch.setattr(create, "start_dvc", lambda here, *_: (here / ".dvc").mkdir())
        assert invoke(init, "run").exit_code == 0
    return directory / "run"


@pytest.fixture
def project(new_project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project in the working directory."""
    shutil.copytree(new_project, tmp_path / "run", symlinks=True)
    monkeypatch.chdir(tmp_path / "run")
    return tmp_path / "run"


def of_version(project: Path, version: str, files: dict[str, str]) -> None:
    """Make a project look as if another version had made it, with other files."""
    path = project / STAMP
    stamp = json.loads(path.read_text())
    for name, text in files.items():
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text(text)
        stamp["files"][name] = text_hash(text)
    path.write_text(json.dumps({**stamp, "version": version}))


def tree(directory: Path) -> dict[str, str]:
    paths = (path for path in directory.rglob("*") if ".git" not in path.parts)
    return {path.relative_to(directory).as_posix(): path.read_text() for path in paths if path.is_file()}


def test_a_new_project_differs_in_nothing(project: Path):
    before = tree(project)
    done = invoke(init, "--check")
    assert (done.exit_code, done.output) == (0, f".: a project of lean-finetune {installed_version()}\n")
    done = invoke(init, "--upgrade", str(project))
    assert done.exit_code == 0 and done.output.endswith("\nnothing to upgrade\n")
    assert tree(project) == before


def test_an_upgrade_replaces_what_the_user_did_not_edit(project: Path, monkeypatch: pytest.MonkeyPatch):
    """Edits that are lost, or a pipeline that stays that of an old version for ever."""
    monkeypatch.setattr(upgrade, "FORMER", ("stages/old.py",))
    old_pipeline = "# The pipeline of 0.1.\n"
    of_version(
        project,
        "0.1.0",
        {"dvc.yaml": old_pipeline, "stages/old.py": "", "stages/pin.py": "0.1", "stages/train.py": "0.1"},
    )
    (project / "stages/train.py").write_text("# mine\n")  # Edited, and changed since.
    (project / "stages/report.py").write_text("# mine\n")  # Edited alone.
    (project / ".gitignore").write_text("*.log\n")
    (project / "locks/watched-model").unlink()
    (project / "stages/code.py").unlink()
    before = tree(project)
    checked = invoke(init, "--check")
    assert checked.exit_code == 1 and tree(project) == before
    lines = checked.output.splitlines()
    assert lines[0] == f".: a project of lean-finetune 0.1.0; {installed_version()} is installed"
    assert lines[1:7] == [
        "  dvc.yaml: is of another version",
        "  stages/code.py: is missing",
        "  stages/old.py: is not used any more",
        "  stages/pin.py: is of another version",
        f"  .gitignore: lacks {', '.join(template_files()['.gitignore'].splitlines())}",
        "  locks/watched-model: is missing",
    ]
    assert lines[7] == "  stages/report.py: edited by you, and stays"
    assert lines[8].startswith(
        "  stages/train.py: edited by you, and stays, although this version's differs; move it away"
    )
    assert lines[9] == "`lean-finetune init --upgrade` changes all of these that do not stay" and len(lines) == 10
    done = invoke(init, "--upgrade")
    assert done.exit_code == 0 and done.output.splitlines()[1:9] == lines[1:9]
    after, ours = tree(project), template_files()
    assert [name for name in ours if after[name] != ours[name]] == [".gitignore", "stages/report.py", "stages/train.py"]
    assert after[".gitignore"] == "*.log\n" + ours[".gitignore"] and "stages/old.py" not in after
    assert os.readlink("locks/watched-model") == "README.md"
    again = invoke(init, "--check")
    assert again.exit_code == 0 and "stages/train.py: edited by you, and stays\n" in again.output


def test_params_are_merged_by_key(project: Path):
    """A value or comment of the user's that is lost, or a file that the schema refuses."""
    text = PARAMS.replace("  epochs: 2", "  # My reason.\n  epochs: 7").replace(
        "source: data/raw/sample.jsonl", "source: mine.jsonl"
    )
    for key in ("rank", "max_length", "method", "router"):
        start = PARAMS.index(f"\n{' ' * (4 if key == 'rank' else 2)}{key}: ")
        line = PARAMS[start + 1 : PARAMS.index("\n", start + 1) + 1]
        assert text.count(line) == 1
        text = text.replace(line, "" if key != "router" else f"{line}  # Of 0.1.\n  old_key: [1, 2]\n")
    section = text[text.index("evaluate:\n") : text.index("# Seeds")]
    text = text.replace(section, "extra:\n  a: 1\n\n")
    (project / "params.yaml").write_text(text)
    checked = invoke(init, "--check")
    assert checked.exit_code == 1 and (project / "params.yaml").read_text() == text
    assert checked.output.splitlines()[1:-1] == [
        "  params.yaml: data.max_length is new (512)",
        '  params.yaml: train.method is new ("qlora")',
        "  params.yaml: train.lora.rank is new (16)",
        "  params.yaml: evaluate is new",
        "  params.yaml: train.old_key is no parameter any more; it was [1, 2]",
        '  params.yaml: extra is no parameter any more; it was {"a": 1}',
    ]
    assert invoke(init, "--upgrade").exit_code == 0
    p = load_params(project / "params.yaml")
    assert (p.train.epochs, p.data.source, p.train.method) == (7, "mine.jsonl", "qlora")
    merged, ours = (project / "params.yaml").read_text(), PARAMS.splitlines()
    assert "  # My reason.\n  epochs: 7\n" in merged and "Of 0.1" not in merged
    lost = [line for line in ours if line not in merged.splitlines()]
    assert lost == ["  source: data/raw/sample.jsonl", "  epochs: 2"]
    keys = [line for line in merged.splitlines() if not line.lstrip().startswith("#") and line.strip()]
    assert [line.partition(":")[0] for line in keys] == [
        line.partition(":")[0] for line in ours if not line.lstrip().startswith("#") and line.strip()
    ], "another order than the template's"


def test_line_ends_permissions_and_links_of_params_yaml_stay(project: Path, tmp_path: Path):
    """A diff of every line on Windows, a file that others can read, or a link that became a copy."""
    real = project / "shared.yaml"
    text = (project / "params.yaml").read_text().replace("\nseed: 17\n", "\n")
    real.write_bytes(text.replace("\n", "\r\n").encode())
    real.chmod(0o640)
    (project / "params.yaml").unlink()
    (project / "params.yaml").symlink_to(real)
    params = project / "params.yaml"
    for change in (
        lambda: invoke(init, "--upgrade"),
        lambda: change_params({"train": {"method": "lora"}}, params, params),
    ):
        change()
        content = real.read_bytes()
        assert (project / "params.yaml").is_symlink() and real.stat().st_mode & 0o777 == 0o640
        assert content.count(b"\n") == content.count(b"\r\n") > 100 and b"seed: 17" in content
    assert load_params(project / "params.yaml").train.method == "lora"
    assert not list(tmp_path.glob(".shared*"))


@pytest.mark.parametrize("lost", ["lora", "bucket", "init", "name", "run", "trackers", "data"])
def test_any_key_that_is_removed_is_added_at_its_place(lost: str):
    """Whatever a version adds: a section, a first key, a last one."""

    def without(values: dict[str, Any]) -> dict[str, Any]:
        return {
            key: without(value) if isinstance(value, dict) else value for key, value in values.items() if key != lost
        }

    template = parse_yaml(PARAMS)
    fewer = merge_params(PARAMS, dump(without(template)))
    assert parse_yaml(fewer.text) == without(template) and list(fewer.removed) and not fewer.added
    merged = merge_params(fewer.text, PARAMS)
    assert list(merged.added) == list(fewer.removed)
    assert [line for line in merged.text.splitlines() if line.strip()] == [
        line for line in PARAMS.splitlines() if line.strip()
    ]


def dump(values: dict[str, Any], indent: str = "") -> str:
    """YAML in block form."""
    text = ""
    for key, value in values.items():
        shown = f"\n{dump(value, indent + '  ')}" if isinstance(value, dict) else f" {json.dumps(value)}\n"
        text += f"{indent}{key}:{shown}"
    return text


def _blank_section(text: str, name: str) -> str:
    start = text.index(f"\n{name}:\n") + len(name) + 3
    return text[:start] + text[text.index("\n# Rarely changed: all sections below", start) :]


def test_a_key_that_is_a_number_is_removed():
    """A traceback."""
    assert merge_params(f"{PARAMS}5:\n  a: 1\n", PARAMS).removed == {"5": {"a": 1}}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda run: (run / STAMP).unlink(), ".: is no project of `lean-finetune init`: it has no locks/project.json"),
        (lambda run: (run / STAMP).write_text("{"), "locks/project.json: cannot be read"),
        (lambda run: (run / STAMP).write_text("[]"), "locks/project.json: cannot be read"),
        (lambda run: (run / "params.yaml").write_text("a: ["), "params.yaml:1: not YAML"),
        (lambda run: (run / "params.yaml").write_text("[]"), "params.yaml: must be a mapping of sections"),
        (
            lambda run: (run / "params.yaml").write_text("{model: {name: tiny}, seed: 1}\n"),
            "params.yaml: cannot be merged",
        ),
        (
            lambda run: (run / "params.yaml").write_text(
                PARAMS.replace("  epochs: 2\n", "").replace("method: qlora", "method: dora")
            ),
            "train.method: must be",
        ),
        (lambda run: (run / "params.yaml").write_text(_blank_section(PARAMS, "bucket")), "bucket: "),
    ],
)
@pytest.mark.parametrize("option", ["--check", "--upgrade"])
def test_what_cannot_be_merged_is_refused(project: Path, option: str, change: Any, says: str):
    change(project)
    (project / "stages/code.py").unlink()
    before = tree(project)
    assert error(invoke(init, option)).startswith(says)
    assert tree(project) == before


def test_a_full_disk_leaves_the_project_as_it_was(project: Path, monkeypatch: pytest.MonkeyPatch):
    of_version(project, "0.1.0", {f"stages/{name}.py": "0.1" for name in ("code", "old", "pin", "train")})
    monkeypatch.setattr(upgrade, "FORMER", ("stages/old.py",))
    before, replace, calls = tree(project), os.replace, iter(range(9))

    def fail(source: Any, target: Any) -> None:
        if next(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(write_all.os, "replace", fail)
    assert error(invoke(init, "--upgrade")).startswith(".: cannot be written (No space left on device); free space")
    assert tree(project) == before


@pytest.mark.parametrize(
    "name", ["../victim.txt", "{outside}", "stages/../../victim.txt", "mine.txt", "stages/mine.py"]
)
def test_a_stamp_that_names_other_files_is_refused(project: Path, tmp_path: Path, name: str):
    """An upgrade removed files outside of the project, and a user's own."""
    (tmp_path / "victim.txt").write_text("theirs\n")
    name = name.format(outside=tmp_path / "victim.txt")
    of_version(project, "9.0", {name: "theirs\n"})
    before = tree(tmp_path)
    line = error(invoke(init, "--upgrade"))
    assert line.startswith(f"locks/project.json: names {repr(name)[:40]}") and "lean-finetune 9.0" in line
    assert ", which no version up to " in line
    assert tree(tmp_path) == before


def test_every_name_of_an_earlier_version_is_known():
    """A project of that version, which could not be upgraded; a name that the template drops belongs into FORMER."""
    stages = ("__init__", *("bucket code estimate evaluate pin reference report tokenize train".split()))
    plots = "lengths loss memory reserved switches timeline watched".split()
    names = {"dvc.yaml", "locks/README.md", *(f"stages/{stage}.py" for stage in stages)}
    assert names | {f".dvc/plots/{plot}.json" for plot in plots} <= {*generated_files(), *FORMER}


@pytest.mark.parametrize("link", [*IGNORE_FILES, "params.yaml", "dvc.yaml", "stages", "stages/code.py", "locks"])
def test_an_upgrade_writes_nothing_through_a_link_out_of_the_project(project: Path, tmp_path: Path, link: str):
    """Lines for .gitignore were written into another repository's, or into a file of the user's home."""
    of_version(project, "0.1.0", {"dvc.yaml": "old", "stages/code.py": "old"})
    (project / "params.yaml").write_text(PARAMS.replace("\nseed: 17\n", "\n"))
    (project / "locks/watched-model").unlink()
    for name in IGNORE_FILES:
        (project / name).write_text("*.log\n")
    outside = tmp_path / "outside"
    (project / link).rename(outside)
    (project / link).symlink_to(outside)
    before = tree(tmp_path)
    line = error(invoke(init, "--upgrade"))
    assert line.startswith(link) and f": a link leads to {outside}" in line and "outside of this directory" in line
    assert tree(tmp_path) == before


def test_a_link_inside_the_project_is_followed(project: Path):
    (project / ".gitignore").rename(project / "ignored")
    (project / "ignored").write_bytes(b"caf\xe9\n")  # Not UTF-8.
    (project / ".gitignore").symlink_to("ignored")
    assert invoke(init, "--upgrade").exit_code == 0
    assert (project / ".gitignore").is_symlink()
    assert (project / "ignored").read_bytes() == b"caf\xe9\n" + template_files()[".gitignore"].encode()


@pytest.mark.parametrize(
    "options", [("--check", "--upgrade"), ("--check", "--model", "tiny"), ("--upgrade", "--gpu", "T4")]
)
def test_options_of_a_new_project_are_refused(project: Path, options: tuple[str, ...]):
    assert error(invoke(init, *options), 2).startswith("--check, --upgrade: take no other option")
