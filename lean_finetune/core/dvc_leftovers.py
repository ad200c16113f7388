"""What DVC leaves changed in the checkout when a stage fails: overridden parameters, deleted metrics."""

import os
import re
import subprocess
from pathlib import Path


def restore_metrics() -> None:
    """Bring back the metrics of the last commit that DVC deleted before it ran this stage.

    Git tracks them: without this, an interrupted or refused run shows as a deletion in `git status`.
    """
    if "DVC_STAGE" in os.environ and (deleted := _git("ls-files", "-z", "--deleted", "--", "metrics").split("\0")[:-1]):
        _git("restore", "--", *deleted)


def override_remedy(message: str) -> str:
    """What undoes the overrides of `dvc exp run -S` after a parameter was refused; empty where there are none.

    DVC leaves them in params.yaml, where they would be refused again by the next command. Temporary and queued
    experiments have a copy of the file.
    """
    if "DVC_EXP_BASELINE_REV" not in os.environ or not re.match(r"\w+(\.\w+)+:", message):
        return ""
    if "-S " in message:  # The remedies it names go on from what was set.
        return ""
    params = Path("params.yaml")
    if Path.cwd() != Path(os.environ.get("DVC_ROOT", ".")).resolve() or not params.is_file():
        return ""
    if _git("show", "HEAD:./params.yaml") in ("", params.read_text(encoding="utf-8")):
        return ""
    # git compares whole seconds and sizes: it may take what DVC has just written for what is committed.
    os.utime(params, (params.stat().st_atime, params.stat().st_mtime + 1))
    return "; params.yaml keeps what -S set: `git restore params.yaml` undoes its changes"


def _git(*arguments: str) -> str:
    """What a git command prints; nothing where there is no git, or it fails."""
    try:
        return subprocess.run(["git", *arguments], capture_output=True, text=True).stdout
    except OSError:
        return ""
