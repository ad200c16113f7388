"""Undo changes that DVC leaves in the checkout when a stage fails: deleted metrics, overridden parameters."""

import os
import re
import subprocess
from pathlib import Path


def restore_metrics() -> None:
    """Restore the committed metrics that DVC deleted before it ran this stage, which failed."""
    if "DVC_STAGE" in os.environ and (deleted := _git("ls-files", "-z", "--deleted", "--", "metrics").split("\0")[:-1]):
        _git("restore", "--", *deleted)


def override_remedy(message: str) -> str:
    """The remedy for overrides of `dvc exp run -S` that DVC left in params.yaml; empty if there are none."""
    if "DVC_EXP_BASELINE_REV" not in os.environ or not re.match(r"\w+(\.\w+)+:", message):
        return ""
    if "-S " in message:  # The remedy in the message builds on the overrides.
        return ""
    params = Path("params.yaml")  # Temporary and queued experiments have their own copy.
    if Path.cwd() != Path(os.environ.get("DVC_ROOT", ".")).resolve() or not params.is_file():
        return ""
    if _git("show", "HEAD:./params.yaml") in ("", params.read_text(encoding="utf-8")):
        return ""
    # Git compares sizes and whole seconds, so it may not notice what DVC has just written.
    os.utime(params, (params.stat().st_atime, params.stat().st_mtime + 1))
    return "; params.yaml still has the values of -S: `git restore params.yaml` undoes them"


def _git(*arguments: str) -> str:
    """The output of a git command; empty if git is missing or fails."""
    try:
        return subprocess.run(["git", *arguments], capture_output=True, text=True).stdout
    except OSError:
        return ""
