"""If one process of a run fails, all end in bounded time with one error line, and the same command resumes."""

import re
import signal
import socket
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from lean_finetune.train.process.stop_signals import SAME_REQUEST_SECONDS
from tests.distributed.launched import change, curve, errors_of, planned, running
from tests.processes import wait_for
from tests.workspace import write_verdict

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

TIMEOUT_SECONDS = 10
"""run.rank_timeout_seconds of these runs."""
ENDS_SECONDS = 60
"""Within which all is over after a fault: the timeout, the agent's 30 s for those that are stuck, a busy machine.

Four processes have twice as long.
"""
STEP = 4
NO_FAULT = "none -1 0"

LAUNCH = """
import sys
from pathlib import Path
from lean_finetune.core.stage_command import StageCommand
from lean_finetune.distributed.launch import launch
import click

@click.command(cls=StageCommand)
@click.argument("processes", type=int)
def main(processes):
    ranks = Path("scratch/train/ranks")
    launch("tests.distributed.failing", [], processes=processes, directory=ranks, grace_seconds=600)

main()
"""


def run_with(fault: str, root: Path, processes: int) -> tuple[int, list[str], float]:
    """Run with a fault: exit status, lines on standard error, seconds since the fault.

    The port that the environment names is in use, as by another run on the same machine.
    """
    known: set[int] = set()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with running(
            root, "-c", LAUNCH, str(processes), LEAN_FINETUNE_FAULT=fault, MASTER_ADDR="127.0.0.1", MASTER_PORT=port
        ) as process:
            while process.poll() is None:
                known |= {child.pid for child in psutil.Process(process.pid).children(recursive=True)}
                time.sleep(0.2)
            ended = time.time()
    assert len(known) >= processes
    assert not [pid for pid in known if psutil.pid_exists(pid)], "a process outlived its run"
    met = root / "fault-was-met"
    return process.returncode, errors_of(root), ended - met.stat().st_mtime if met.exists() else 0.0


WAITED = r"error: run\.rank_timeout_seconds: .* process \d of GPUS waited "
ABSENT = "; .*; the one that did not come: process LAST"
IN_STEP = rf" in phase \w+ of optimizer step {STEP}{ABSENT}"
MESSAGES = {
    "memory": r"error: .*(memory|max_tokens).*",
    "killed": r"error: hardware\.num_gpus: process LAST ended by SIGKILL; .*the same command resumes from the last .*",
    "disk": r"error: .*File too large.*free space, then rerun.*",
    "hangs": f"{WAITED}{TIMEOUT_SECONDS} s{IN_STEP}",
    "nccl": f"{WAITED}600 s{IN_STEP}",
    "absent": f"{WAITED}{TIMEOUT_SECONDS} s before or after its steps{ABSENT}",
    "refused": "error: model.name: refused",
}
"""By kind of fault; GPUS is the number of processes, LAST the one that fails."""
MODES: dict[str, dict[str, Any]] = {
    "zero3": {"sharding": "zero3"},
    "ddp": {"sharding": "ddp"},
    "zero1": {"sharding": "zero1"},
    "zero2": {"sharding": "zero2"},
    "hsdp": {"gpus": 4, "sharding": "hsdp", "train__shard_group_gpus": 2},
    "context": {"sharding": "zero3", "train__context_parallel": 2},
    "context x ddp": {"sharding": "ddp", "train__context_parallel": 2},
    "tensor": {"sharding": "none", "train__tensor_parallel": 2},
    "tensor x zero3": {"gpus": 4, "sharding": "zero3", "train__tensor_parallel": 2},
    "pipeline": {"sharding": "none", "train__pipeline_stages": 2},
}
"""Parameters; 2 GPUs unless they say otherwise."""
KINDS = {
    "zero3": [kind for kind in MESSAGES if kind != "refused"],
    "ddp": ["hangs"],
    "context": ["killed", "hangs", "refused"],
}


@pytest.fixture(scope="module")
def learnt() -> dict[str, bytes]:
    """The adapter that a mode learns without a fault."""
    return {}


@pytest.mark.parametrize(
    ("mode", "kind"), [(mode, kind) for mode in MODES for kind in KINDS.get(mode, ["killed", "hangs"])]
)
def test_one_process_fails_and_the_same_command_resumes(copy: Path, learnt: dict[str, bytes], mode: str, kind: str):
    """The others would wait forever, or print a traceback each; or the fault would change what is learnt."""
    # `nccl` imitates NCCL's watchdog, which reports a timeout to a thread: gloo's comes after 10 minutes.
    timeout = 600 if kind == "nccl" else TIMEOUT_SECONDS
    values = {"gpus": 2, **MODES[mode]}
    gpus = values["gpus"]
    fault = f"{kind} {0 if kind == 'disk' else gpus - 1} {STEP}"
    message = MESSAGES[kind].replace("GPUS", str(gpus)).replace("LAST", str(gpus - 1))
    write_verdict(copy, stage_layers=[1, 3])
    planned(copy, **values, run__checkpoint_seconds=1e-6)
    adapter = copy / "data/tuned/adapter_model.safetensors"
    if mode not in learnt:
        assert run_with(NO_FAULT, copy, gpus)[0] == 0
        learnt[mode] = adapter.read_bytes()
    change(copy, run__rank_timeout_seconds=timeout)
    status, output, seconds = run_with(fault, copy, gpus)
    assert status == (3 if kind == "memory" else 1) and seconds < ENDS_SECONDS * gpus / 2
    faults = [line for line in output if line.startswith("error: ")]
    assert len(faults) == 1 and re.fullmatch(message, faults[0]), output
    assert not [line for line in output if "Traceback" in line]
    status, output, _ = run_with(fault, copy, gpus)
    assert status == 0, output
    assert kind in ("absent", "refused") or any(line.startswith("train: resumed at optimizer step ") for line in output)
    assert adapter.read_bytes() == learnt[mode]
    assert [int(row["step"]) for row in curve(copy)] == list(range(len(curve(copy))))
    assert not list((copy / "scratch/train").glob("*/step-*"))


def test_a_second_signal_ends_all_processes_at_once(copy: Path):
    """They wait for a step of an hour, after they said that a second signal stops them now."""
    planned(copy, 2, "ddp", train__epochs=200)
    with running(copy, "-c", LAUNCH, "2", LEAN_FINETUNE_FAULT=f"hangs 1 {STEP}") as launcher:
        wait_for((copy / "fault-was-met").exists, launcher)
        ranks = psutil.Process(launcher.pid).children(recursive=True)
        launcher.send_signal(signal.SIGTERM)
        wait_for(lambda: any("after this step" in line for line in errors_of(copy)), launcher)
        time.sleep(SAME_REQUEST_SECONDS)
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(TIMEOUT_SECONDS) == 128 + signal.SIGTERM
        assert not psutil.wait_procs(ranks, timeout=TIMEOUT_SECONDS)[1]
    (line,) = (line for line in errors_of(copy) if "again to stop now" in line)
    assert line.startswith("train: SIGTERM: stopping after this step, ")
