"""What a stage needs of an earlier one that a test leaves out."""

from pathlib import Path

from lean_finetune.core.atomic_files import FIGURES, write_json

ESTIMATED = {
    "gpu": "cpu",
    "capacity_gib": 16.0,
    "peak_bytes_predicted": 54_000_000,
    "host_bytes_predicted": None,
    "offloaded_bytes_predicted": 0,
    "worst_phase": "backward",
}


def write_verdict(root: Path) -> None:
    """Put into a workspace what stage train reads of a run that fits."""
    write_json(root / "data/estimate/verdict.json", {"enforce": True, "refusal": None})
    write_json(root / "data/estimate" / FIGURES, ESTIMATED)
