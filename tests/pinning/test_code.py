"""Code hashes: of exactly what a stage imports, and unchanged by edits that do not change its behaviour."""

from pathlib import Path

import pytest

from lean_finetune.pinning.code import code_hashes

ENTRY = """import json

from lean_finetune.package.used import LIMIT


def main():
    from lean_finetune.package import late
"""
USED = '"""Limits."""\n\nLIMIT = 1000\n"""Of rows."""\n\n\ndef twice(x):\n    """Two times x."""\n    return 2 * x\n'


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A project of four modules, one of which the entry does not import, and a template."""
    package = tmp_path / "lean_finetune" / "package"
    (package / "templates").mkdir(parents=True)
    (tmp_path / "stages").mkdir()
    for directory in (tmp_path / "stages", package.parent, package):
        (directory / "__init__.py").touch()
    (tmp_path / "stages" / "train.py").write_text(ENTRY)
    (package / "used.py").write_text(USED)
    (package / "late.py").write_text("X = 1\n")
    (package / "unused.py").write_text("Y = 1\n")
    (package / "templates" / "chat.jinja").write_text("{{ text }}")
    return tmp_path


def hashes(root: Path) -> dict[str, str]:
    return code_hashes("stages.train", root)


def test_hashes_cover_imports_in_functions_and_package_data_and_nothing_else(root: Path):
    """A missing file leaves stale results; one too many reruns stages."""
    assert list(hashes(root)) == [
        "lean_finetune/package/late.py",
        "lean_finetune/package/templates/chat.jinja",
        "lean_finetune/package/used.py",
        "stages/train.py",
    ]


@pytest.mark.parametrize(
    "old, new, changes",
    [
        ("LIMIT = 1000", "LIMIT = 1_000  # At most.", False),
        ("Two times x.", "Twice `x`.", False),
        ('"""Of rows."""\n', "", False),
        ("return 2 * x", "return (\n        2 * x\n    )", False),
        ("1000", "1001", True),
        ("1000", "1000.0", True),
        ("return 2 * x", "return x * 2", True),
        ("def twice(x)", "def twice(x, /)", True),
        ("LIMIT = 1000", "LIMIT: int = 1000", True),
        ("def twice", "async def twice", True),
    ],
)
def test_only_an_edit_of_the_syntax_tree_changes_the_hash(root: Path, old: str, new: str, changes: bool):
    """A comment must not rerun a stage, and a constant must."""
    before = hashes(root)
    assert old in USED
    (root / "lean_finetune/package/used.py").write_text(USED.replace(old, new))
    changed = {path for path, digest in hashes(root).items() if before[path] != digest}
    assert changed == ({"lean_finetune/package/used.py"} if changes else set())


def test_an_edit_of_package_data_changes_its_hash(root: Path):
    before = hashes(root)
    (root / "lean_finetune/package/templates/chat.jinja").write_text("{{ text }} ")
    assert hashes(root) != before


@pytest.mark.parametrize("name", ["README.md", "pyproject.toml", "build/lib/used.py", "cuda_memory.egg-info/PKG-INFO"])
def test_what_the_code_does_not_read_changes_no_hash(root: Path, name: str):
    """An edit of cuda_memory's README, or its installation, that trains again."""
    alone = root / "cuda_memory"
    (alone / name).parent.mkdir(parents=True)
    (alone / "__init__.py").touch()
    (alone / "units.py").write_text("MIB = 2**20\n")
    (root / "stages" / "train.py").write_text(f"from cuda_memory.units import MIB\n{ENTRY}")
    before = hashes(root)
    assert "cuda_memory/units.py" in before
    (alone / name).write_text("Changed.")
    assert hashes(root) == before
    (alone / "units.py").write_text("MIB = 10**6\n")
    assert hashes(root) != before
