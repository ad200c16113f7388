"""Measure on a CUDA machine what a CPU cannot show, in order of worth, in sessions of a few minutes.

`python -m benchmarks.gpu --out DIR` writes DIR/gpu.json after each case, and the allocator's history of each memory
case to DIR/snapshots-N.zip. `--resume` continues an earlier session. It needs no network, data, weights, git or DVC:
only PyTorch, transformers, peft, bitsandbytes and pyarrow; pytest for the tests that need a GPU, TRL for its figures.
Every case has its own process; while a step is timed, no other process runs. A case that failed, or that ended the
session, is tried once more. `--device fake` runs small cases on a CPU with PyTorch's CUDA functions replaced.
"""

import io
import json
import os
import subprocess
import sys
import time
import zipfile
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch

from benchmarks.gpu import memory, speed
from benchmarks.gpu.cases import (
    FIRST,
    Case,
    KernelsCase,
    MemoryCase,
    ProfileCase,
    SpeedCase,
    SwitchesCase,
    TrlCase,
    UnslothCase,
    fake_cases,
    gpu_cases,
)
from benchmarks.gpu.fake_cuda import FAKE_GPU, NOT_PROVEN
from benchmarks.harness import RESULTS, Row, commit, format_table, machine, versions
from cuda_memory.gpus import Device
from cuda_memory.units import MIB
from lean_finetune.core.atomic_files import atomic_path, read_json, write_json
from lean_finetune.memory.devices import resolve_gpu

RESULTS_FILE = "gpu.json"
PREDICTORS = 4
"""Predictions at a time, each on one core, while the GPU measures earlier cases."""
MOST_READY = 16
"""Processes of timed cases that import before the first is measured."""
TIMED = (KernelsCase, ProfileCase, SpeedCase, SwitchesCase, TrlCase, UnslothCase)
MOST_TRIES = 2
TIMES_ESTIMATE = 4
"""A case is stopped after this many times its estimate."""
MOST_LINES = 30
"""Of what a failed process printed on stderr."""
GRACE_SECONDS = 60
"""Time after the session's minutes to finish the case that is running."""
MOST_SNAPSHOTS, SNAPSHOTS_OF_ARCHIVE = len(FIRST), 4
"""The first cases have a snapshot, several in one archive."""
ARCHIVE_BYTES = 15 * MIB
"""Limit of an archive; a snapshot that does not fit is left out, and its row says so.

100,000 events made up as PyTorch writes them: 12 MiB; bzip2 packs them into 2 MiB in 1 s, LZMA into 0.7 MiB in 7 s.
"""


@dataclass(kw_only=True)
class Session:
    """The cases, what is known of them, and where it is written."""

    cases: Sequence[Case]
    device: Literal["cuda", "fake"]
    gpu: Device
    out: Path
    ends: float
    """time.monotonic after which no case starts."""
    trl_python: str
    unsloth_python: str
    commit: str | None
    rows: dict[str, Row] = field(default_factory=dict)
    """By name of the case."""
    waiting: dict[tuple[str, ...], subprocess.Popen[str]] = field(default_factory=dict)
    """Processes that import ahead, by command."""

    def run(self) -> None:
        """Run the cases that are not done, until the time is over."""
        left = [case for case in self.cases if not self.is_done(case)]
        predictions: dict[str, Future[Row]] = {}
        timed = [case for case in left[:MOST_READY] if isinstance(case, TIMED) and time.monotonic() < self.ends]
        self.prepare_together(timed)
        with ThreadPoolExecutor(PREDICTORS) as pool:
            for number, case in enumerate(left):
                if time.monotonic() + case.seconds > self.ends:
                    break
                if case not in timed:  # Else the host has nothing else to do: it may be what limits a step.
                    for ahead in left[number : number + PREDICTORS]:
                        if isinstance(ahead, MemoryCase) and ahead.name not in predictions:
                            predictions[ahead.name] = pool.submit(self.predict, ahead)
                    for soon in left[number : number + 2]:
                        self.prepare(soon)
                self.try_case(case, predictions.get(case.name))
            pool.shutdown(cancel_futures=True)
        for process in self.waiting.values():
            process.kill()
            process.communicate()

    def is_done(self, case: Case) -> bool:
        """Whether a case has figures, or has failed too often."""
        row = self.rows.get(case.name)
        return row is not None and ("failed" not in row or row["tries"] >= MOST_TRIES)

    def try_case(self, case: Case, prediction: Future[Row] | None) -> None:
        """Measure a case and write its row; before that a row that stays if this process is killed."""
        tries = self.rows.get(case.name, {}).get("tries", 0) + 1
        about = {"name": case.name, "gpu": self.gpu.name, "commit": self.commit, "tries": tries}
        self.rows[case.name] = {**about, "failed": "the session ended during this case"}
        self.write()
        print(f"{case.name} ...", flush=True)
        start = time.monotonic()
        row = self.measure(case, prediction.result() if prediction is not None else {})
        self.rows[case.name] = {**about, **row, "wall_s": round(time.monotonic() - start, 1)}
        self.write()
        columns = {key: value for key, value in self.rows[case.name].items() if not isinstance(value, dict | list)}
        print(format_table([columns]), flush=True)

    def predict(self, case: MemoryCase) -> Row:
        """Predict a case where no GPU is visible."""
        gpu = {
            name: getattr(self.gpu, name) for name in ("name", "memory_bytes", "compute_capability", "multiprocessors")
        }
        command = [*self.command("predict", case), "--gpu", json.dumps(gpu)]
        return self.last_line(command, case, {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})

    def measure(self, case: Case, predicted: Row) -> Row:
        """Measure a case in a new process."""
        command = self.measuring(case)
        if not isinstance(case, MemoryCase):
            return self.last_line(command, case)
        if "skipped" in predicted:
            return predicted
        if "failed" in predicted:
            predicted = {"prediction": predicted["failed"]}
        return {**memory.compared(predicted, self.last_line(command, case)), **self.archive(case)}

    def command(self, work: str, case: Case) -> list[str]:
        """The command of a process for a case."""
        return [sys.executable, "-m", "benchmarks.gpu.case_process", work, case.name, "--device", self.device]

    def measuring(self, case: Case) -> list[str]:
        """The command that measures a case as soon as it reads a line."""
        command = self.command("measure", case)
        if isinstance(case, TrlCase):
            command = [self.trl_python, "-m", "benchmarks.gpu.trl_steps", case.speed.name, self.device]
        if isinstance(case, UnslothCase):  # Unsloth is imported before all else.
            return [self.unsloth_python, "-m", "benchmarks.gpu.unsloth_steps", case.speed.name, self.device]
        if isinstance(case, MemoryCase) and self.number(case) < MOST_SNAPSHOTS:
            command += ["--snapshot", str(self.snapshot(case))]
        python, m, *module = command
        return [python, m, "benchmarks.gpu.ahead", *module]

    def prepare(self, case: Case) -> None:
        """Start the process of a case, which imports and waits."""
        command = self.measuring(case)
        if tuple(command) not in self.waiting and not isinstance(case, UnslothCase):
            self.waiting[tuple(command)] = started(command)

    def prepare_together(self, cases: Sequence[Case]) -> None:
        """Start the processes of cases, and wait until all have imported."""
        for case in cases:
            self.prepare(case)
        for process in self.waiting.values():
            assert process.stdout is not None
            process.stdout.readline()

    def number(self, case: MemoryCase) -> int:
        """The index of a case among the memory cases."""
        return [each for each in self.cases if isinstance(each, MemoryCase)].index(case)

    def snapshot(self, case: MemoryCase) -> Path:
        """The file for the history of the allocator."""
        return self.out / f"{self.number(case) + 1:02}.pickle"

    def last_line(self, command: Sequence[str], case: Case, changes: Mapping[str, str] = MappingProxyType({})) -> Row:
        """Run a process, with changes of its environment, and return the row that it printed, or why there is none.

        If a process waits for this command, it goes on.
        """
        limit = self.ends + GRACE_SECONDS - time.monotonic()
        if self.device == "cuda":  # A CPU takes other times than those estimated.
            limit = min(limit, TIMES_ESTIMATE * case.seconds)
        process = self.waiting.pop(tuple(command), None) or started(command, changes)
        try:
            out, errors = process.communicate("go\n", timeout=limit)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return {"failed": f"no end after {limit:.0f} s"}
        if process.returncode < 0:
            return {"failed": f"ended by signal {-process.returncode}"}
        if process.returncode:
            lines = errors.strip().splitlines() or ["no output"]
            return {"failed": lines[-1], "stderr": lines[-MOST_LINES:]}
        row: Row = json.loads(out.strip().rpartition("\n")[2])
        return row

    def archive(self, case: MemoryCase) -> Row:
        """Move a case's snapshot into its archive, and return the column that says where."""
        number, snapshot = self.number(case), self.snapshot(case)
        if not snapshot.exists():
            return {}
        path = self.out / f"snapshots-{number // SNAPSHOTS_OF_ARCHIVE + 1}.zip"
        packed = io.BytesIO(path.read_bytes() if path.exists() else b"")
        with zipfile.ZipFile(packed, "a", zipfile.ZIP_BZIP2) as archive:
            archive.write(snapshot, snapshot.name)
        snapshot.unlink()
        if len(packed.getvalue()) > ARCHIVE_BYTES:
            return {"snapshot": f"left out: {path.name} is full"}
        with atomic_path(path) as temporary:
            temporary.write_bytes(packed.getvalue())
        return {"snapshot": f"{path.name}: {snapshot.name}"}

    def bars(self) -> list[Row]:
        """The bars of what was measured; none with replaced functions, which measure no GPU."""
        if self.device == "fake":
            return []
        return [bar.as_json() for bar in (*memory.bars(self.rows), *speed.bars(self.rows))]

    def write(self) -> None:
        """Write all rows."""
        content: dict[str, Any] = {
            "name": "gpu",
            "date": datetime.now(UTC).date().isoformat(),
            "commit": self.commit,
            "machine": machine(),
            "versions": versions(),
            "rows": list(self.rows.values()),
            "bars": self.bars(),
        }
        if self.device == "fake":
            content["not_proven"] = NOT_PROVEN
        write_json(self.out / RESULTS_FILE, content)


def started(command: Sequence[str], changes: Mapping[str, str] = MappingProxyType({})) -> subprocess.Popen[str]:
    """Start a process whose streams are pipes."""
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env={**os.environ, **changes})


def rows_of(path: Path, gpu: str) -> dict[str, Row]:
    """Rows of an earlier session by name: those of this kind of GPU and these library versions."""
    before = read_json(path) if path.exists() else {}
    if before.get("versions") != versions():
        return {}
    return {row["name"]: row for row in before["rows"] if row["gpu"] == gpu}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a session; return 1 if a bar fails."""
    parser = ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--minutes", type=float, default=8.0, help="start no case that would end later (default: 8)")
    parser.add_argument("--resume", action="store_true", help="continue DIR/gpu.json, or the published results")
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"default: {RESULTS}")
    parser.add_argument("--device", choices=["cuda", "fake"], default="cuda")
    parser.add_argument("--only", action="append", metavar="PATTERN", help="run cases of these names, as 'TRL: *'")
    parser.add_argument("--trl-python", default=sys.executable, help="Python that has TRL (default: this one)")
    parser.add_argument("--unsloth-python", default=sys.executable, help="that has Unsloth (default: this one)")
    parser.add_argument("--commit", help="commit of the code, for a machine without git")
    given = parser.parse_args(arguments)
    ends = time.monotonic() + 60 * given.minutes
    if given.device == "fake" and given.out is None:
        parser.error("--out: name a directory; figures of --device fake are not published")
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: no CUDA device here; run on a machine with one, or try --device fake")
    out, gpu = given.out or RESULTS, FAKE_GPU if given.device == "fake" else resolve_gpu("auto")[0]
    out.mkdir(parents=True, exist_ok=True)
    cases = fake_cases() if given.device == "fake" else gpu_cases()
    if given.only:
        cases = [case for case in cases if any(fnmatchcase(case.name, pattern) for pattern in given.only)]
    session = Session(
        cases=cases,
        device=given.device,
        gpu=gpu,
        out=out,
        ends=ends,
        trl_python=given.trl_python,
        unsloth_python=given.unsloth_python,
        commit=given.commit or commit(),
    )
    if given.resume:
        earlier = next((path for path in (out / RESULTS_FILE, RESULTS / RESULTS_FILE) if path.exists()), None)
        session.rows = rows_of(earlier, gpu.name) if earlier else {}
    else:
        for path in out.glob("snapshots-*.zip"):
            path.unlink()
    session.run()
    session.write()
    left = [case.name for case in session.cases if not session.is_done(case)]
    if bars := session.bars():
        print(format_table(bars))
    for text in NOT_PROVEN if given.device == "fake" else ():
        print(f"not proven: {text}")
    print(f"{out / RESULTS_FILE}: {len(session.cases) - len(left)} of {len(session.cases)} cases done")
    if left:
        print("continue with --resume")
    return 0 if all(bar["holds"] for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
