"""A disk without room for what training writes is found before the first step."""

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lean_finetune.core.errors import UserError
from lean_finetune.train.checkpoint.disk_space import DiskSpace
from tests.train.interrupted import Breaking, finish, small_job

MIB = 1 << 20


class Usage(NamedTuple):
    """As `shutil.disk_usage` gives it."""

    total: int
    used: int
    free: int


@pytest.fixture
def said() -> list[str]:
    return []


def room(place: Path, said: list[str], free: int, monkeypatch: pytest.MonkeyPatch, **other: Any) -> DiskSpace:
    """On a disk with so many bytes free."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 40, 0, free))
    return DiskSpace(**{"out": place / "tuned", "merged_bytes": 0, "enforce": True, "notify": said.append, **other})


def test_run_without_disk_space_is_refused_before_its_first_step(
    small_llama: Path, tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
):
    """Saving fails after hours of training."""
    checkpoints = Breaking(tmp_path / "kept", every_step=True)
    checkpoints._disk_space = room(tmp_path, said, MIB, monkeypatch, merged_bytes=MIB)
    with pytest.raises(
        UserError, match=r"tuned: the disk has too little free space .* of weights and .* 1 MiB are free; free "
    ):
        finish(small_job(small_llama, tmp_path / "tokens"), checkpoints)
    assert not list(tmp_path.glob("kept/*step-*"))


SIZES = {"trained_bytes": 2 * MIB, "checkpoint_bytes": 6 * MIB}
CASES = {
    "room for all": (30, 0, 3, {}, None),
    "none for the end": (7, 0, 3, {}, "8 MiB"),
    "the last checkpoint is there already": (7, 1, 1, {}, None),
    "those before the last give room": (1, 2, 2, {}, None),
    "none for merging": (12, 0, 1, {"merged_bytes": 5 * MIB}, "refused"),
    "none for so many checkpoints": (17, 0, 3, {}, "warned"),
    "two are there already": (6, 2, 3, {}, None),
    "trained all the same": (1, 0, 3, {"enforce": False}, "warned"),
}


@pytest.mark.parametrize("free_mib, there, most, other, told", CASES.values(), ids=CASES)
def test_required_disk_space(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch, free_mib, there, most, other, told
):
    """A refusal of what would have had room is as bad as none."""
    asked = room(tmp_path, said, free_mib * MIB, monkeypatch, **other)
    refused = ""
    try:
        asked.check(tmp_path, **SIZES, there=there, most=most)
    except UserError as error:
        refused = str(error)
    assert (bool(refused), bool(said)) == (told not in (None, "warned"), told == "warned"), (refused, said)
    assert all(line.startswith("warning: run.keep_checkpoints: up to 3 checkpoints of 6 MiB ") for line in said)
