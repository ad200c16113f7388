"""The click command of every stage: errors in one line, signals, and what DVC leaves after a failure undone."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import FrameType
from typing import Any

import click

from cuda_memory.errors import OneLineCommand, Report
from cuda_memory.terminal import echo, json_text
from lean_finetune.core import signals
from lean_finetune.core.errors import one_line
from lean_finetune.core.versions import wrong_library

REPORT_FILE = "LEAN_FINETUNE_REPORT_FILE"
"""Environment variable: the file into which a stage that fails writes the lines of its error as JSON."""


@contextmanager
def exit_on_signal() -> Iterator[None]:
    """Exit at once at a stop signal, with the line of a stopped stage. The block must not need any cleanup.

    For imports of PyTorch: an exception in a module that C++ code imports can abort the process.
    """

    def end(number: int, _: FrameType | None) -> None:
        restore_metrics()
        ending = signals.Interrupted(number)
        os.write(2, f"{stopped_line(ending)}\n".encode())
        os._exit(ending.exit_code)

    with signals.handled_by(end):
        yield


def stopped_line(ending: signals.Interrupted) -> str:
    """The line of a stage that a signal stopped."""
    return f"stopped by {ending.name}: no output is half-written; the same command starts again"


@contextmanager
def one_line_after_signals(report: Report | None = None) -> Iterator[None]:
    """Print one line and exit with 128 + its number after a signal that stops this process."""
    try:
        with signals.raised():
            yield
    except signals.Interrupted as ending:
        echo(stopped_line(ending), err=True)
        if report is not None:
            report(ending.exit_code, stopped_line(ending))
        sys.exit(ending.exit_code)


@contextmanager
def one_line_for_wrong_library(report: Report | None = None) -> Iterator[None]:
    """Name a library that is missing or has another version than needed, where a name of it is not found."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        try:
            wrong = wrong_library()
        except PackageNotFoundError:
            wrong = None
        if wrong is None:
            raise
        message = f"{wrong.fault} ({one_line(str(error))}); run `{wrong.remedy}`"
        echo(f"error: {message}", err=True)
        if report is not None:
            report(1, message)
        sys.exit(1)


class StageCommand(OneLineCommand):
    """A click command that prints a `UserError` as one line on standard error and exits with its code."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command and exit, without tearing modules down. A failed one restores the metrics.

        One that succeeded removes metrics that its results made outdated, where DVC would commit them.
        """
        try:
            return super().main(*args, **kwargs)
        except BaseException as error:
            code = error.code if isinstance(error, SystemExit) else 1
            if code:
                restore_metrics()
            else:
                remove_outdated_metrics()
            if isinstance(error, SystemExit) and isinstance(code, int | None):
                signals.end_soon(code or 0)
            raise

    def remedy(self, message: str) -> str:
        """How to undo overrides that DVC left in params.yaml."""
        return override_remedy(message)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. Exit with the code of a `UserError`, and with 128 + its number after a signal."""
        with one_line_after_signals(self.report), one_line_for_wrong_library(self.report):
            return super().invoke(ctx)

    def report(
        self, exit_code: int, message: str, details: Sequence[str] = (), answer: Mapping[str, Any] | None = None
    ) -> None:
        """Print an error as JSON if this run prints JSON, and write it into the file that `run` reads, if it asks."""
        super().report(exit_code, message, details, answer)
        if path := os.environ.get(REPORT_FILE):
            with suppress(OSError):  # The line on standard error says the same.
                Path(path).write_text(json_text([message, *details]), encoding="utf-8")


# Undo what DVC leaves in a checkout: deleted metrics, overridden parameters, metrics of earlier runs.


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
        if this.always_changed:  # It runs first in every experiment: the stages that run after it decide.
            return
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
        return subprocess.run(
            ["git", *arguments], capture_output=True, encoding="utf-8", errors="surrogateescape"
        ).stdout
    except OSError:
        return ""
