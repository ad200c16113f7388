"""Outputs are replaced completely or not at all, by one run at a time."""

import errno
import os
from pathlib import Path

import pytest

from lean_finetune.core.atomic_files import atomic_directory, atomic_path, write_errors, write_text
from lean_finetune.core.errors import UserError

ASIDE = ".out.partial"


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def make(path: Path, text: str) -> None:
    """Write a directory of one file as stages do."""
    with atomic_directory(path) as aside:
        write_text(aside / "inside.txt", text)


def test_a_directory_is_replaced_with_all_its_files(tmp_path):
    make(tmp_path / "out", "one")
    (tmp_path / "out/stray.txt").write_text("old")
    make(tmp_path / "out", "two")
    assert names(tmp_path) == ["out"] and names(tmp_path / "out") == ["inside.txt"]
    assert (tmp_path / "out/inside.txt").read_text() == "two"


def test_an_exception_leaves_the_old_output(tmp_path):
    out = tmp_path / "out"
    make(out, "old")
    with pytest.raises(ZeroDivisionError), atomic_directory(out) as aside:
        (aside / "half").touch()
        1 / 0  # noqa: B018
    with pytest.raises(ZeroDivisionError), atomic_path(out / "inside.txt") as aside:
        aside.write_text("half")
        1 / 0  # noqa: B018
    assert names(tmp_path) == ["out"] and (out / "inside.txt").read_text() == "old"


def test_a_refused_rename_restores_the_old_directory(tmp_path, monkeypatch):
    """The old directory is renamed first, so a disk that refuses the second rename would lose it."""
    out = tmp_path / "out"
    make(out, "old")
    replace = os.replace

    def refuse(source: Path, target: Path) -> None:
        if Path(target) == out and Path(source).name != "old":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(target))
        replace(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(UserError, match=r"out: cannot be written \(Input/output error\); correct that, then rerun"):
        make(out, "new")
    assert names(tmp_path) == ["out"] and (out / "inside.txt").read_text() == "old"


def test_leftovers_of_a_killed_run_are_removed(tmp_path):
    left = tmp_path / ASIDE
    (left / "out").mkdir(parents=True)
    (left / "out/half.txt").write_text("half")
    (left / "old").mkdir()
    (left / "lock").touch()
    make(tmp_path / "out", "new")
    assert names(tmp_path) == ["out"] and names(tmp_path / "out") == ["inside.txt"]


def test_a_second_writer_is_refused_and_changes_nothing(tmp_path):
    out = tmp_path / "out"
    with atomic_directory(out) as aside:
        (aside / "first.txt").touch()
        with pytest.raises(UserError, match="out: another run is writing it; wait until that ends, then rerun"):
            make(out, "second")
        assert names(aside) == ["first.txt"]
    assert names(out) == ["first.txt"] and names(tmp_path) == ["out"]


REMEDIES = {
    errno.ENOSPC: "free space",
    errno.EROFS: "change permissions or write elsewhere",
    errno.ENOENT: "do not remove files while a stage runs",
    errno.EIO: "correct that",
}


@pytest.mark.parametrize("number, remedy", REMEDIES.items(), ids=[errno.errorcode[number] for number in REMEDIES])
def test_a_write_error_names_the_file_and_the_remedy(number, remedy):
    reason = os.strerror(number)
    with pytest.raises(UserError) as failure, write_errors(Path("data/x")):
        raise OSError(number, reason, "data/x/y")
    assert str(failure.value) == f"data/x: cannot be written ({reason}: data/x/y); {remedy}, then rerun"
