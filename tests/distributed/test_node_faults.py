"""If one process of two machines fails, both end with one line. Two network namespaces are the machines."""

import re
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.distributed.hosts import skip_without_hosts, two_hosts
from tests.distributed.launched import errors_of, other_machine, planned, running
from tests.processes import wait_for

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

TIMEOUT_SECONDS = 30
"""run.rank_timeout_seconds of these runs: on two busy cores, one process starts so much later than the other."""
ENDS_SECONDS = 300
"""Within which both nodes have ended after the fault: the timeout, the agent's 30 s for those that are stuck."""
STEP = 2

LAUNCH = """
from lean_finetune.train import train_run
from stages.train import main

launch = train_run.launch
train_run.launch = lambda module, arguments, **options: launch("tests.distributed.failing", arguments, **options)
main()
"""

MESSAGES = {
    "killed": r"error: hardware\.num_gpus: process 1 ended by SIGKILL; .*; the same command resumes from the last "
    r"checkpoint, if there is one \(on node 1, node-b\)",
    "hangs": rf"error: run\.rank_timeout_seconds: .*; process 0 of 2 waited {TIMEOUT_SECONDS} s in phase \w+ of "
    rf"optimizer step {STEP}; .*; the one that did not come: process 1 on node 1 \(node-b\)",
    "memory": r"error: bucket\.max_tokens: this machine \(process 1\) ran out of memory allocating 2 GiB between "
    rf"phases of optimizer step {STEP}; lower it, or change the run as below \(on node 1, node-b\)",
}


@pytest.mark.parametrize("kind", MESSAGES)
def test_a_process_that_fails_ends_both_machines_with_its_name(copy: Path, kind: str):
    """The other machine would wait forever, or blame a process that only waited."""
    skip_without_hosts()
    planned(copy, 2, "zero3", run__nodes=2, run__rank_timeout_seconds=TIMEOUT_SECONDS)
    roots = (copy, other_machine(copy))
    with two_hosts() as hosts, ExitStack() as stack:
        given = {"LEAN_FINETUNE_FAULT": f"{kind} 1 {STEP}", "PET_RDZV_ENDPOINT": hosts[0].address}
        nodes = [
            stack.enter_context(running(root, "-c", LAUNCH, host=host, PET_NODE_RANK=rank, **given))
            for rank, (root, host) in enumerate(zip(roots, hosts, strict=True))
        ]
        wait_for((roots[1] / "fault-was-met").exists, nodes[1])
        code = 3 if kind == "memory" else 1
        assert [node.wait(ENDS_SECONDS) for node in nodes] == [code, code]
        output = [errors_of(root, host) for root, host in zip(roots, hosts, strict=True)]
    (line,), (other,) = ([line for line in lines if line.startswith("error: ")] for lines in output)
    assert line == other and re.fullmatch(MESSAGES[kind], line), output
    assert not [line for lines in output for line in lines if "Traceback" in line]
