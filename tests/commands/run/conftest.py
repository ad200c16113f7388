"""A user without git configuration, in an empty directory."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory and a git without configuration."""
    place = tmp_path / "place"
    (tmp_path / "home").mkdir()
    place.mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    monkeypatch.setenv("EMAIL", "")
    monkeypatch.chdir(place)
    return place
