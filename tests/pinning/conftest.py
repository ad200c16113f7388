"""A workspace in which data is pinned."""

import pytest

from stages.pin import main
from tests.workspace import invoke, lay_out


@pytest.fixture
def pin(tmp_path, monkeypatch):
    """A workspace's directory, and a function that sets data values and pins."""
    directory = tmp_path / "checkout"
    directory.mkdir()
    monkeypatch.chdir(directory)
    monkeypatch.delenv("DVC_STAGE", raising=False)
    monkeypatch.delenv("DVC_ROOT", raising=False)

    def run(source, **values):
        given = source if isinstance(source, list) else str(source)
        lay_out(directory, data__source=given, **{f"data__{key}": value for key, value in values.items()})
        return invoke(main, "data")

    return run
