"""The documentation names what is there."""

import re

import pytest

from tests.conftest import ROOT
from tests.processes import run_bounded

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_module_named_is_there(page):
    """A page that sends its reader to a module that was renamed."""
    tracked = run_bounded(["git", "ls-files", "--cached", "--others"], cwd=ROOT, check=True).stdout.splitlines()
    files = {f"/{name}" for name in tracked}
    named = re.findall(r"`((?:\w+/)*\w+\.py)`", page.read_text(encoding="utf-8"))
    assert [name for name in named if not any(file.endswith(f"/{name}") for file in files)] == []
