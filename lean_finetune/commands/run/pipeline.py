"""Run the pipeline of the working directory by DVC, and print a line for each stage instead of DVC's own."""

import json
import logging
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from lean_finetune.commands.run.shown import Shown
from lean_finetune.core.errors import UserError, one_line
from lean_finetune.core.signals import FIRST_OF_SIGNALS, GRACE_SECONDS, Interrupted
from lean_finetune.core.stage_command import REPORT_FILE

if TYPE_CHECKING:
    from psutil import Process

RUNS, RESTORED = "Running stage '%s':", "Stage '%s' is cached - skipping run, checking out outputs"
"""DVC's messages when it starts a stage, and when it takes the outputs of an earlier run from its cache."""
ENDED_PROCESS = "had been killed"
"""Of DVC's warning when it removes the lock of a process that has ended: the usual case after a kill."""
KILLED = 9


class StageFailed(UserError):
    """A stage ended with an error, of which it has printed its own line."""

    lines: Sequence[str] = ()
    """The lines of its error; empty if it could not write them."""

    def __init__(self, stage: str, exit_code: int):
        super().__init__(f"{stage}: failed")
        self.stage, self.exit_code = stage, exit_code


class StageLog(logging.Handler):
    """Prints a line for each stage that runs, and DVC's warnings as notes."""

    def __init__(self, shown: Shown):
        super().__init__()
        self.shown = shown
        self.descriptions: Mapping[str, str] = {}
        self.ran: list[str] = []
        self._since = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        """Print what DVC says of a stage."""
        if record.levelno >= logging.WARNING:
            text = one_line(record.getMessage())
            if record.levelno == logging.WARNING and ENDED_PROCESS not in text:
                self.shown.event("note", f"note: dvc: {text}", text=text)
        elif record.msg in (RUNS, RESTORED) and isinstance(record.args, tuple):
            self._begin(str(record.args[0]), runs=record.msg == RUNS)

    def _begin(self, stage: str, *, runs: bool) -> None:
        self.end()
        text = self.descriptions.get(stage, "") if runs else "the same as in an earlier run, taken from the cache"
        number = list(self.descriptions).index(stage) + 1 if stage in self.descriptions else 0
        line = f"[{number}/{len(self.descriptions)}] {stage}: {text}"
        self.shown.event("stage", line, stage=stage, number=number, of=len(self.descriptions), cached=not runs)
        self.ran.append(stage)
        self._since = time.monotonic()

    def end(self) -> None:
        """Report that the last stage has ended."""
        if self._since:
            seconds = round(time.monotonic() - self._since, 1)
            self.shown.event("stage_end", stage=self.ran[-1], seconds=seconds)
            self._since = 0.0


def run_pipeline(shown: Shown) -> list[str]:
    """Run every stage that is not up to date; return the names of those that ran.

    Raises:
        StageFailed: a stage failed. It has printed its line.
        UserError: DVC cannot run the pipeline, or another process runs it.
    """
    use_this_python()
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    log = StageLog(shown)
    with only_logged_by(log), reported_errors() as report:
        try:
            with Repo() as repo:
                log.descriptions = {stage.addressing: stage.desc or "" for stage in repo.index.stages}
                repo.reproduce()
        except DvcException as error:
            fault = dvc_refusal(error, log.ran)
            if isinstance(fault, StageFailed):
                fault.lines = _reported_lines(report)
            raise fault from error
        except Interrupted:
            end_stages()
            raise
    log.end()
    return log.ran


def use_this_python() -> None:
    """Let stages, which are `python -m stages.…`, run in this environment, although nobody may have activated it."""
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])


@contextmanager
def reported_errors() -> Iterator[Path]:
    """Let a stage that fails in the block write the lines of its error into the file that is yielded."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "error.json"
        os.environ[REPORT_FILE] = str(report)
        try:
            yield report
        finally:
            del os.environ[REPORT_FILE]


def _reported_lines(report: Path) -> Sequence[str]:
    try:
        lines: Sequence[str] = json.loads(report.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # A stage that was killed writes none.
        return ()
    return lines


@contextmanager
def only_logged_by(handler: logging.Handler) -> Iterator[None]:
    """Give DVC's messages to one handler alone. Its bars of single files would come between those of the stages."""
    logger, bars, lock = map(logging.getLogger, ("dvc", "dvc.progress", "zc.lockfile"))
    before = logger.handlers, logger.level, logger.propagate, bars.level, lock.disabled
    logger.handlers, logger.propagate, lock.disabled = [handler], False, True
    logger.setLevel(logging.INFO)
    bars.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.handlers, level, logger.propagate, bars_level, lock.disabled = before
        logger.setLevel(level)
        bars.setLevel(bars_level)


def dvc_refusal(error: BaseException, ran: Sequence[str] = ()) -> UserError:
    """DVC's error as ours."""
    from dvc.exceptions import ReproductionError
    from dvc.lock import LockError
    from dvc.stage.exceptions import StageCmdFailedError

    if isinstance(error, ReproductionError) and error.__cause__ is not None:
        return dvc_refusal(error.__cause__, ran)
    if isinstance(error, StageCmdFailedError):
        return _stage_fault(ran[-1], str(error))
    if isinstance(error, LockError):
        processes = ", ".join(re.findall(r"PID (\d+)", str(error)))
        who = f"process {processes}" if processes else "another process"
        return UserError(f"dvc: {who} runs this project's pipeline; wait for it or end it, then rerun")
    causes = [one_line(str(error))]
    while (cause := error.__cause__) is not None:
        causes, error = [*causes, one_line(str(cause))], cause
    return UserError(f"dvc: {': '.join(text for text in causes if text)}; correct that, then rerun")


def _stage_fault(stage: str, message: str) -> UserError:
    """The fault of a stage by its exit status in DVC's message."""
    found = re.search(r"exited with (-?\d+)", message)
    status = 1 if found is None else int(found[1])
    if status in (-KILLED, FIRST_OF_SIGNALS + KILLED):
        return UserError.of_code(
            FIRST_OF_SIGNALS + KILLED,
            f"{stage}: SIGKILL ended it, as Linux does when the host has no memory left; free some, then the same "
            "command goes on",
        )
    return StageFailed(stage, FIRST_OF_SIGNALS - status if status < 0 else status)


def end_stages() -> None:
    """End the running stage before this process ends, so that its line comes before the shell's prompt."""
    import psutil

    def is_stage(process: "Process") -> bool:
        with suppress(psutil.NoSuchProcess):  # Another child may just have ended.
            return any(word.startswith("stages.") for word in process.cmdline())
        return False

    try:
        children = psutil.Process().children()
        shells = [one for one in children if not is_stage(one)]
        stages = [one for one in children if is_stage(one)]
        stages += [child for shell in shells for child in shell.children() if is_stage(child)]
        for stage in stages:
            stage.terminate()
        psutil.wait_procs(stages, timeout=GRACE_SECONDS - 2)
    except psutil.Error:  # It has ended by itself.
        pass
