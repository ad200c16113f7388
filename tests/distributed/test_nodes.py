"""Training on two machines, as a user starts it: two network namespaces are the machines."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from lean_finetune.core.atomic_files import read_sealed, write_sealed
from tests.conftest import ROOT
from tests.distributed.hosts import Host, skip_without_hosts, two_hosts
from tests.distributed.launched import change, errors_of, made_a_step, other_machine, planned, running, script
from tests.processes import wait_for
from tests.workspace import run_module

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

TIMEOUT_SECONDS = 8
ENDS_SECONDS = 60
"""Within which both nodes have ended after the link is down: the timeout, their wait for each other, a busy CPU."""


@pytest.fixture(autouse=True)
def hosts_are_possible() -> None:
    skip_without_hosts()


def on_nodes(stack: ExitStack, hosts: tuple[Host, Host], roots: tuple[Path, Path]) -> Iterator[subprocess.Popen[bytes]]:
    """Start the run's nodes one by one."""
    for rank, (host, root) in enumerate(zip(hosts, roots, strict=True)):
        rendezvous = {} if rank == 0 else {"PET_RDZV_ENDPOINT": hosts[0].address}
        yield stack.enter_context(running(root, host=host, PET_NODE_RANK=rank, **rendezvous))


def weights(root: Path) -> bytes:
    return (root / "data/tuned/adapter_model.safetensors").read_bytes()


class Alone:
    """The weights of runs on one machine, each made once."""

    def __init__(self) -> None:
        self._known: dict[str, bytes] = {}

    def __call__(self, root: Path, gpus: int, sharding: str, **values: object) -> bytes:
        """Plan the run, and return its weights; its outputs are removed."""
        planned(root, gpus, sharding, **values)
        name = f"{gpus} {sharding} {values}"
        if name not in self._known:
            run_module("stages.train", cwd=root, check=True)
            self._known[name] = weights(root)
            for output in ("data/tuned", "data/train", "metrics"):
                shutil.rmtree(root / output)
        return self._known[name]


@pytest.fixture(scope="module")
def alone() -> Alone:
    return Alone()


@pytest.mark.parametrize(
    ("sharding", "gpus", "slow", "values"),
    [
        ("ddp", 2, True, {}),
        ("zero3", 2, False, {}),
        ("hsdp", 4, False, {"train__shard_group_gpus": 2}),
        ("zero3", 2, False, {"train__context_parallel": 2}),
        ("none", 2, False, {"train__pipeline_stages": 2}),
    ],
    ids=["ddp-slow-link", "zero3", "hsdp", "context", "pipeline"],
)
def test_two_machines_train_what_one_trains(
    copy: Path, alone: Alone, sharding: str, gpus: int, slow: bool, values: dict[str, object]
):
    """Other weights, outputs of both machines, or a hang."""
    verdict = copy / "data/estimate/verdict.json"
    write_sealed(verdict, {**read_sealed(verdict), "stage_layers": [1, 3]})
    expected = alone(copy, gpus, sharding, **values)
    change(copy, run__nodes=2, run__rank_timeout_seconds=60)
    other = other_machine(copy)
    with two_hosts(slow=slow) as hosts, ExitStack() as stack:
        nodes = list(on_nodes(stack, hosts, (copy, other)))
        assert [node.wait() for node in nodes] == [0, 0], (errors_of(copy, hosts[0]), errors_of(other, hosts[1]))
    assert weights(copy) == expected
    assert not (other / "data/tuned").exists() and not (other / "metrics").exists()
    files = [log for root in (copy, other) for log in root.glob("scratch/train/ranks/*/*.log")]
    half = gpus // 2
    names = {f"{log.parent.name[:6]}{log.name}" for log in files}
    assert names == {f"node{rank // half}-{rank}.log" for rank in range(1, gpus)}


LONG: dict[str, object] = {"train__epochs": 8}
"""Enough steps to interrupt the run."""


def test_a_machine_that_disappears_is_named_and_the_same_command_resumes(copy: Path, alone: Alone):
    """The other would wait forever. The machines share the disk of checkpoints; the second comes late."""
    expected = alone(copy, 2, "zero3", **LONG)
    change(copy, run__nodes=2, run__rank_timeout_seconds=TIMEOUT_SECONDS, run__checkpoint_seconds=1e-6)
    with two_hosts() as hosts:
        with ExitStack() as stack:
            nodes = list(on_nodes(stack, hosts, (copy, copy)))
            wait_for(lambda: list(copy.glob("scratch/train/*/step-*")), nodes[0])
            hosts[1].set_link("down")
            assert [node.wait(ENDS_SECONDS) for node in nodes] == [1, 1]
        for host, absent in zip(hosts, ("1 on node 1 (node-b)", "0 on node 0 (node-a)"), strict=True):
            faults = [line for line in errors_of(copy, host) if line.startswith("error: ")]
            assert len(faults) == 1 and faults[0].startswith("error: run.rank_timeout_seconds: ")
            assert faults[0].endswith(f"; the one that did not come: process {absent}")
        hosts[1].set_link("up")
        with ExitStack() as stack:
            nodes = []
            for node in on_nodes(stack, hosts, (copy, copy)):
                nodes.append(node)
                time.sleep(3)
            assert [node.wait() for node in nodes] == [0, 0], errors_of(copy, hosts[0])
        assert any(line.startswith("train: resumed at optimizer step ") for line in errors_of(copy, hosts[0]))
    assert weights(copy) == expected


def test_machines_with_disks_of_their_own_resume(copy: Path, alone: Alone):
    """In ddp each tensor is written by one process, so that none has all of a checkpoint. Node 0 loses its disk."""
    expected = alone(copy, 2, "ddp", **LONG)
    change(copy, run__nodes=2, run__rank_timeout_seconds=60)
    other = other_machine(copy)
    with two_hosts() as hosts:
        with ExitStack() as stack:
            nodes = list(on_nodes(stack, hosts, (copy, other)))
            wait_for(lambda: made_a_step(copy) and made_a_step(other), nodes[0])
            nodes[1].send_signal(signal.SIGTERM)
            assert [node.wait(ENDS_SECONDS) for node in nodes] == [128 + signal.SIGTERM] * 2
        assert any(line.startswith("train: stopped by SIGTERM; the checkpoint ") for line in errors_of(copy, hosts[0]))
        change(copy, run__nodes=1)
        refused = run_module("stages.train", cwd=copy)
        assert "lacks what process 1 wrote to the disk of node-b; start that machine" in refused.stderr
        change(copy, run__nodes=2)
        runs, backup = copy / "scratch/train", copy / "backup"
        runs.rename(backup)
        with ExitStack() as stack:
            nodes = list(on_nodes(stack, hosts, (copy, other)))
            assert [node.wait() for node in nodes] == [1, 1]
        for root, host in ((copy, hosts[0]), (other, hosts[1])):
            (line,) = (line for line in errors_of(root, host) if line.startswith("error: "))
            assert "lacks what process 0 wrote to the disk of node-a; copy those files to it on any machine" in line
        shutil.rmtree(runs)
        backup.rename(runs)
        with ExitStack() as stack:
            nodes = list(on_nodes(stack, hosts, (copy, other)))
            assert [node.wait() for node in nodes] == [0, 0], (errors_of(copy, hosts[0]), errors_of(other, hosts[1]))
        assert any(line.startswith("train: resumed at optimizer step ") for line in errors_of(copy, hosts[0]))
    assert weights(copy) == expected
    assert not list(other.glob("scratch/train/*/step-*"))


def test_a_run_of_one_machine_goes_on_on_two(copy: Path, alone: Alone):
    """The second machine's disk has no part of the checkpoint."""
    expected = alone(copy, 2, "ddp", **LONG)
    other = other_machine(copy)
    with running(copy) as launcher:
        wait_for(lambda: made_a_step(copy), launcher)
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(ENDS_SECONDS) == 128 + signal.SIGTERM
    for root in (copy, other):
        change(root, run__nodes=2)
    with two_hosts() as hosts, ExitStack() as stack:
        nodes = list(on_nodes(stack, hosts, (copy, other)))
        assert [node.wait() for node in nodes] == [0, 0], (errors_of(copy, hosts[0]), errors_of(other, hosts[1]))
        assert any(line.startswith("train: resumed at optimizer step ") for line in errors_of(copy, hosts[0]))
    assert weights(copy) == expected


def test_a_run_of_two_machines_goes_on_on_one(copy: Path, alone: Alone):
    """Each process wrote its part of the checkpoint on another machine; they share the disk."""
    expected = alone(copy, 2, "zero3", **LONG)
    change(copy, run__nodes=2, run__rank_timeout_seconds=60)
    with two_hosts() as hosts, ExitStack() as stack:
        nodes = list(on_nodes(stack, hosts, (copy, copy)))
        wait_for(lambda: made_a_step(copy), nodes[0])
        nodes[1].send_signal(signal.SIGTERM)
        assert [node.wait(ENDS_SECONDS) for node in nodes] == [128 + signal.SIGTERM] * 2
    change(copy, run__nodes=1)
    with running(copy) as launcher:
        assert launcher.wait() == 0, errors_of(copy)
    assert any(line.startswith("train: resumed at optimizer step ") for line in errors_of(copy))
    assert weights(copy) == expected


LAUNCH = """
import sys
from pathlib import Path
from lean_finetune.config.load import load_params
from lean_finetune.distributed.launch import Node, launch

ranks = Path("scratch/train/ranks")
node = Node.here(load_params())
processes = int(sys.argv[1])
launch(
    "tests.distributed.failing", [], processes=processes, directory=ranks, grace_seconds=60, node=node, max_restarts=1
)
"""


@pytest.mark.parametrize(
    ("fault", "gpus", "sharding", "values"),
    [
        ("killed 1 4", 2, "zero3", {}),
        ("killed 3 4", 4, "zero2", {"train__tensor_parallel": 2}),
        ("unsaved 1 -1", 2, "ddp", {}),
    ],
    ids=["killed", "tensor-parallel", "between-saves"],
)
def test_a_killed_process_is_started_again_on_all_machines(
    copy: Path, alone: Alone, fault: str, gpus: int, sharding: str, values: dict[str, object]
):
    """run.max_restarts: the processes of the other machine must come back too, from a checkpoint that both have."""
    expected = alone(copy, gpus, sharding, **values)
    change(copy, run__nodes=2, run__checkpoint_seconds=1e-6)
    other = other_machine(copy) if fault.startswith("unsaved") else copy
    with two_hosts() as hosts, ExitStack() as stack:
        shared = {"LEAN_FINETUNE_FAULT": fault, "PET_RDZV_ENDPOINT": hosts[0].address}
        nodes = [
            stack.enter_context(running(root, "-c", LAUNCH, str(gpus // 2), host=host, PET_NODE_RANK=rank, **shared))
            for rank, (root, host) in enumerate(zip((copy, other), hosts, strict=True))
        ]
        assert [node.wait() for node in nodes] == [0, 0], (errors_of(copy, hosts[0]), errors_of(other, hosts[1]))
        lines = errors_of(copy, hosts[0])
        assert any(line.startswith("train: resumed at optimizer step ") for line in lines)
        dropped = [line for line in lines if line.endswith("using the one before it")]
        assert len(dropped) == (other != copy) and all(
            "process 1 had not finished writing it" in line for line in dropped
        )
    assert (other / "fault-was-met").exists() and weights(copy) == expected


DVC = """#!/bin/sh
test "$*" = "repro estimate" || exec python -m stages.train
"""
SRUN = """#!/bin/sh
test "$1" != --kill-on-bad-exit=1 || shift
export SLURM_JOB_ID=7 SLURM_JOB_NODELIST=node-[a,b]
set -m
{first} env SLURM_NODEID=0 "$@" &
{second} env SLURM_NODEID=1 "$@" &
wait %1 && wait %2
"""


def recipe(language: str, name: str) -> str:
    """A block of docs/several-machines.md."""
    return (ROOT / "docs/several-machines.md").read_text().split(f"```{language} {name}\n")[1].split("```")[0]


def programs(root: Path, **content: str) -> str:
    """A PATH that begins with these programs and this Python."""
    directory = root / "bin"
    directory.mkdir()
    for name, text in {"python": f'#!/bin/sh\nexec {sys.executable} "$@"\n', **content}.items():
        (directory / name).write_text(text)
        (directory / name).chmod(0o755)
    (root / ".venv/bin").mkdir(parents=True)
    (root / ".venv/bin/activate").touch()
    return f"{directory}:{os.environ['PATH']}"


@pytest.mark.parametrize("how", ["by-hand", "slurm", "skypilot"])
def test_the_recipes_of_the_documentation_run(copy: Path, how: str):
    """A user copies them. SLURM, SkyPilot and DVC are scripts that set what those set."""
    planned(copy, 2, "ddp", run__nodes=2)
    with two_hosts() as (a, b), ExitStack() as stack:
        first, second = (" ".join(map(shlex.quote, host.command())) for host in (a, b))
        path = programs(copy, dvc=DVC, srun=SRUN.format(first=first, second=second))
        if how == "slurm":
            nodes = [stack.enter_context(script(copy, recipe("sh", "sbatch"), PATH=path))]
        elif how == "by-hand":
            texts = [recipe("sh", f"node-{number}") for number in (0, 1)]
            nodes = [
                stack.enter_context(script(copy, text, h, PATH=path)) for h, text in zip((a, b), texts, strict=True)
            ]
        else:
            text = YAML(typ="safe").load(recipe("yaml", "skypilot"))["run"]
            sky = {"SKYPILOT_NODE_IPS": f"{a.address}\n{b.address}", "PATH": path}
            nodes = [
                stack.enter_context(script(copy, text, host, SKYPILOT_NODE_RANK=number, **sky))
                for number, host in enumerate((a, b))
            ]
        assert [node.wait() for node in nodes] == [0] * len(nodes), (errors_of(copy, a), errors_of(copy, b))
    assert (copy / "data/tuned/adapter_model.safetensors").exists()
    assert {log.parent.name[:5] for log in (copy / "scratch/train/ranks").glob("*/*.log")} == {"node1"}
