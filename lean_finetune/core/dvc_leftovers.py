"""Undo what DVC leaves in a checkout: deleted metrics, overridden parameters, metrics of earlier runs."""

import os
import re
import subprocess
from pathlib import Path


def restore_metrics() -> None:
    """Restore the committed metrics that DVC deleted before it ran this stage, which failed."""
    if "DVC_STAGE" in os.environ and (deleted := _git("ls-files", "-z", "--deleted", "--", "metrics").split("\0")[:-1]):
        _git("restore", "--", *deleted)


def remove_outdated_metrics() -> None:
    """Remove the metrics of later stages that must run again, in DVC's copy of the checkout for an experiment.

    `dvc exp run --queue … estimate` ends before those stages, and DVC would commit the metrics as the experiment's own.
    They stay in the user's own checkout, where they may be the only copy.
    """
    stage, root = os.environ.get("DVC_STAGE", "").rpartition(":")[2], os.environ.get("DVC_ROOT")
    if not stage or not root or (Path(root) / ".dvc/tmp").resolve() not in Path.cwd().parents:
        return
    import networkx  # Here: only experiments need it and DVC.
    from dvc.repo import Repo
    from dvc.stage import Stage

    with Repo() as repo:
        graph = repo.index.graph  # From each stage to those that it depends on.
        this = next(one for one in graph if Path(one.wdir) == Path.cwd() and getattr(one, "name", None) == stage)
        later = networkx.ancestors(graph, this)
        outdated: set[Stage] = set()
        for one in reversed(list(networkx.topological_sort(graph.subgraph(later)))):
            # What the experiment does not need is not in its copy: then the stage that writes it decides.
            changed = one.changed_stage() or any(dep.changed() for dep in one.deps if dep.exists)
            if changed or outdated.intersection(graph.successors(one)):
                outdated.add(one)
        for out in (out for one in outdated for out in one.outs if out.metric):
            Path(out.fs_path).unlink(missing_ok=True)


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
