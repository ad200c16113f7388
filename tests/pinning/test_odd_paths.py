"""Paths that cannot be read or stored are refused in one line."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from lean_finetune.core.atomic_files import read_json
from lean_finetune.pinning.locate import data_files
from stages.pin import main
from tests.pinning.test_data_source import ROWS, pinned
from tests.processes import run_bounded
from tests.workspace import error, invoke, lay_out, write_rows


def without_rights_of_root() -> list[str]:
    """A command prefix that makes a process of root obey permissions."""
    if os.geteuid() != 0:
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("root may read everything, and setpriv, which removes that right, is not installed")
    return ["setpriv", "--bounding-set", "-dac_override,-dac_read_search", "--inh-caps", "-all"]


@pytest.mark.parametrize("given", ["rows", "rows/*/*.jsonl", "rows/*.jsonl"])
def test_a_directory_that_cannot_be_listed_is_refused_where_the_source_needs_it(pin, repo_root, given):
    write_rows(Path("rows/b.jsonl"), ROWS)
    write_rows(Path("rows/deep/a.jsonl"), ROWS)
    assert pin(given).exit_code == 0
    Path("rows/deep").chmod(0)
    try:
        command = [*without_rights_of_root(), sys.executable, "-m", "stages.pin", "data"]
        environment = {**os.environ, "PYTHONPATH": str(repo_root)}
        done = run_bounded(command, env=environment)
    finally:
        Path("rows/deep").chmod(0o755)
    if given == "rows/*.jsonl":
        assert done.returncode == 0 and pinned("files") == [["b.jsonl"]]
        return
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith("error: data.source: ") and "rows/deep" in line and "(Permission denied)" in line


def test_unusual_names_and_files_are_refused(pin, tmp_path):
    folder = tmp_path / "odd"
    write_rows(folder / "a.jsonl", ROWS)
    odd = folder / os.fsdecode(b"\xff.jsonl")
    odd.write_bytes((folder / "a.jsonl").read_bytes())
    for given in (folder, f"{folder}/*"):
        assert "a name that is not UTF-8; rename it" in error(pin(given))
    odd.unlink()
    os.mkfifo(folder / "b.jsonl")
    assert error(pin(folder)).endswith("b.jsonl is neither a file nor a directory; move it away")
    assert "is neither a file nor a directory" in error(pin(folder / "b.jsonl"))
    (tmp_path / "loop").symlink_to("loop")
    assert "(Too many levels of symbolic links)" in error(pin(tmp_path / "loop"))


@pytest.mark.parametrize("given", ["rows", "rows/**/*.jsonl"])
def test_a_temporary_run_reads_a_partly_tracked_directory_completely(pin, monkeypatch, given):
    """Its copy of the checkout has only the tracked files; the others would be silently missing."""
    checkout = Path.cwd()
    for name in ("rows/tracked.jsonl", "rows/deep/mine.jsonl"):
        write_rows(Path(name), ROWS)
    copy = checkout.parent / "copy"
    copy.mkdir()
    monkeypatch.chdir(copy)
    monkeypatch.setenv("DVC_ROOT", str(checkout))
    write_rows(Path("rows/tracked.jsonl"), ROWS)
    lay_out(copy, data__source=given)
    assert invoke(main, "data").exit_code == 0
    assert pinned("files") == [["deep/mine.jsonl", "tracked.jsonl"]]
    lock = read_json(Path("locks/data.json"))
    assert [file.path for file in data_files(lock)] == [checkout / "rows" / name for name in pinned("files")[0]]
    (checkout / "rows/deep/mine.jsonl").unlink()  # Now the copy has all files of the checkout.
    assert invoke(main, "data").exit_code == 0
    assert [file.path for file in data_files(read_json(Path("locks/data.json")))] == [Path("rows/tracked.jsonl")]
