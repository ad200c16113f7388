"""Too little disk space for the outputs of training is found before the first step."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cuda_memory.units import MIB
from lean_finetune.core.errors import UserError
from lean_finetune.train.checkpoint.checkpointer import DiskSpace
from tests.train.interrupted import Breaking, finish, small_job


def space_of(directory: Path, free: int, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> tuple[DiskSpace, list]:
    """A disk with this many free bytes; and its warnings."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    warnings: list[str] = []
    options = {"out": directory / "tuned", "merged_bytes": 0, "enforce": True, "notify": warnings.append, **changes}
    return DiskSpace(**options), warnings


def test_run_without_disk_space_is_refused_before_its_first_step(small_llama: Path, tmp_path: Path, monkeypatch):
    """Saving fails after hours of training."""
    checkpoints = Breaking(tmp_path / "checkpoints", every_step=True)
    checkpoints._disk_space, _ = space_of(tmp_path, MIB, monkeypatch, merged_bytes=MIB)
    with pytest.raises(
        UserError, match=r"tuned: the disk has too little free space .* of weights and .* 1 MiB are free; free "
    ):
        finish(small_job(small_llama, tmp_path / "tokens"), checkpoints)
    assert not list(tmp_path.glob("checkpoints/*step-*"))


CASES = {
    "room for all": (30, 0, 3, {}, None),
    "none for the end": (7, 0, 3, {}, "refused"),
    "the last checkpoint exists already": (7, 1, 1, {}, None),
    "those before the last free space": (1, 2, 2, {}, None),
    "none for merging": (12, 0, 1, {"merged_bytes": 5 * MIB}, "refused"),
    "none for so many checkpoints": (17, 0, 3, {}, "warned"),
    "two exist already": (6, 2, 3, {}, None),
    "not enforced": (1, 0, 3, {"enforce": False}, "warned"),
}


@pytest.mark.parametrize("free_mib, there, most, changes, expected", CASES.values(), ids=CASES)
def test_required_disk_space(tmp_path: Path, monkeypatch, free_mib, there, most, changes, expected):
    """A run refused that would have had room, or the reverse."""
    space, warnings = space_of(tmp_path, free_mib * MIB, monkeypatch, **changes)
    outcome = None
    try:
        space.check(tmp_path, trained_bytes=2 * MIB, checkpoint_bytes=6 * MIB, there=there, most=most)
    except UserError:
        outcome = "refused"
    assert (outcome or ("warned" if warnings else None)) == expected
    assert all(line.startswith("warning: run.keep_checkpoints: up to 3 checkpoints of 6 MiB ") for line in warnings)
