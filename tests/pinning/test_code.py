"""Hashes of code: equal for edits that change nothing, and of exactly what a stage imports."""

from pathlib import Path

import pytest

from lean_finetune.pinning.code import code_hashes

ENTRY = """import json

from lean_finetune.room.used import LIMIT


def main():
    from lean_finetune.room import late
"""
USED = '"""Limits."""\n\nLIMIT = 1000\n"""Of rows."""\n\n\ndef twice(x):\n    """Two times x."""\n    return 2 * x\n'


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A project of four modules, one of which the entry does not import, and a template."""
    room = tmp_path / "lean_finetune" / "room"
    (room / "templates").mkdir(parents=True)
    (tmp_path / "stages").mkdir()
    for package in (tmp_path / "stages", room.parent, room):
        (package / "__init__.py").touch()
    (tmp_path / "stages" / "train.py").write_text(ENTRY)
    (room / "used.py").write_text(USED)
    (room / "late.py").write_text("X = 1\n")
    (room / "unused.py").write_text("Y = 1\n")
    (room / "templates" / "chat.jinja").write_text("{{ text }}")
    return tmp_path


def hashes(root: Path) -> dict[str, str]:
    return code_hashes("stages.train", root)


def test_imports_in_functions_and_package_data_count_and_nothing_else(root: Path):
    """A helper or a template that is in no hash leaves stale results; one too many reruns stages for nothing."""
    assert list(hashes(root)) == [
        "lean_finetune/room/late.py",
        "lean_finetune/room/templates/chat.jinja",
        "lean_finetune/room/used.py",
        "stages/train.py",
    ]


@pytest.mark.parametrize(
    "edited",
    [
        USED.replace("LIMIT = 1000", "LIMIT = 1_000  # At most."),
        USED.replace("Two times x.", "Twice `x`."),
        USED.replace('"""Of rows."""\n', "").replace('"""Limits."""\n', ""),
        USED.replace("return 2 * x", "return (\n        2 * x\n    )"),
    ],
    ids=["comment", "docstring", "docstrings gone", "format"],
)
def test_an_edit_that_changes_nothing_keeps_the_hash(root: Path, edited: str):
    before = hashes(root)
    assert edited != USED
    (root / "lean_finetune/room/used.py").write_text(edited)
    assert hashes(root) == before


@pytest.mark.parametrize(
    "edited",
    [
        USED.replace("1000", "1001"),
        USED.replace("1000", "1000.0"),
        USED.replace("return 2 * x", "return x * 2"),
        USED.replace("def twice(x)", "def twice(x, /)"),
        USED.replace("LIMIT = 1000", "LIMIT: int = 1000"),
        USED.replace("def twice", "async def twice"),
    ],
)
def test_an_edit_of_the_code_changes_its_hash_alone(root: Path, edited: str):
    before = hashes(root)
    (root / "lean_finetune/room/used.py").write_text(edited)
    assert {path for path, digest in hashes(root).items() if before[path] != digest} == {"lean_finetune/room/used.py"}


def test_an_edit_of_package_data_changes_its_hash(root: Path):
    before = hashes(root)
    (root / "lean_finetune/room/templates/chat.jinja").write_text("{{ text }} ")
    assert hashes(root) != before
