"""Workspaces in which data or a model is pinned."""

from pathlib import Path

import pytest

from stages.pin import main
from tests.workspace import invoke, lay_out


@pytest.fixture
def workspace(tmp_path, monkeypatch) -> Path:
    """An empty directory as the working directory, outside DVC."""
    directory = tmp_path / "checkout"
    directory.mkdir()
    monkeypatch.chdir(directory)
    return directory


@pytest.fixture
def pin(workspace):
    """A function that sets data values and pins the data."""

    def run(source, **values):
        given = source if isinstance(source, list) else str(source)
        lay_out(workspace, data__source=given, **{f"data__{key}": value for key, value in values.items()})
        return invoke(main, "data")

    return run
