"""Which machine of a run this is, and what is refused before anything starts."""

import platform
import shutil
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from lean_finetune.config.load import load_params, with_flags
from lean_finetune.config.schema import Params
from lean_finetune.core.errors import UserError
from lean_finetune.distributed.faults import Ending, fault_of
from lean_finetune.distributed.launch import Node
from lean_finetune.distributed.processes import World
from lean_finetune.pinning.hub import list_files
from lean_finetune.pinning.locate import TINY_DIRECTORY, model_directory, verify_files
from lean_finetune.train.make_job import Paths, refuse_missing_inputs, remedies_of_node
from tests.conftest import ROOT
from tests.pinning.hub_server import serve, use_hub

SLURM = {"SLURM_NODEID": "1", "SLURM_JOB_ID": "54321", "SLURM_JOB_NODELIST": "gpu[03-05,9]-ib,login"}


@cache
def shipped() -> Params:
    return load_params(ROOT / "params.yaml")


def run_of(*flags: str) -> Params:
    gpus = ["hardware.num_gpus=4", "train.sharding=ddp"]
    return with_flags(shipped(), [*gpus, *flags])


@pytest.mark.parametrize(
    ("flags", "environment", "found"),
    [
        ([], {}, (0, 1, "127.0.0.1", 0)),
        (["run.nodes=2", "run.node_rank=0"], {}, (0, 2, "127.0.0.1", 29500)),
        (["run.nodes=2", "run.node_rank=1", "run.rendezvous=a.b:7"], SLURM, (1, 2, "a.b", 7)),
        (["run.nodes=2", "run.node_rank=1", "run.rendezvous='[fe80::1]:7'"], {}, (1, 2, "fe80::1", 7)),
        (["run.nodes=2"], {"PET_NODE_RANK": "1", "PET_RDZV_ENDPOINT": "a"} | SLURM, (1, 2, "a", 29500)),
        (["run.nodes=2"], SLURM, (1, 2, "gpu03-ib", 24321)),
        (["run.nodes=2"], SLURM | {"SLURM_JOB_NODELIST": "a,b"}, (1, 2, "a", 24321)),
        (["run.nodes=2"], SLURM | {"SLURM_JOB_NODELIST": "rack[1-2]n[03-05,9],b"}, (1, 2, "rack1n03", 24321)),
        (["run.nodes=2"], SLURM | {"PET_NODE_RANK": "", "PET_RDZV_ENDPOINT": ""}, (1, 2, "gpu03-ib", 24321)),
    ],
    ids=["one", "first", "params", "ipv6", "torchrun", "slurm", "slurm-list", "slurm-racks", "blank"],
)
def test_a_machine_knows_its_number_and_node_0(
    flags: list[str], environment: dict[str, str], found: tuple[object, ...]
):
    """Two machines with the same number, or one that waits for itself."""
    node = Node.here(run_of(*flags), environment)
    assert (node.rank, node.count, node.host, node.port) == found


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        (["run.nodes=2"], "run.node_rank: must be the number of this machine, from 0 to 1, .*; got nothing, and "),
        (["run.nodes=2", "run.node_rank=2"], "run.node_rank: .*; got 2; set it"),
        (["run.nodes=2", "run.node_rank=1"], "run.rendezvous: must be the address of node 0 .*; got nothing on node 1"),
        (
            ["run.nodes=2", "run.node_rank=1", "run.rendezvous=a:b"],
            "run.rendezvous: must be HOST or HOST:PORT, .*'a:b'",
        ),
        (["run.nodes=3"], "run.nodes: must be a divisor of hardware.num_gpus=4, .*; got 3; "),
        (["run.rendezvous=a"], "run.node_rank: and run.rendezvous have an effect only with run.nodes above 1; "),
        (["hardware.num_gpus=1", "train.sharding=none", "run.max_restarts=1"], "run.max_restarts: .*; got 1 with "),
    ],
    ids=["no-number", "number", "no-address", "address", "divisor", "one-machine", "restarts"],
)
def test_settings_without_a_meaning_are_refused(flags: list[str], shown: str):
    with pytest.raises(UserError, match=f"^{shown}"):
        Node.here(run_of(*flags), {})


@pytest.mark.parametrize(
    ("environment", "shown"),
    [
        ({"PET_NODE_RANK": "one"}, "run.node_rank: .*; got one; set it"),
        ({"PET_NODE_RANK": "1", "PET_RDZV_ENDPOINT": "a b"}, "run.rendezvous: must be HOST .* got 'a b'; correct it"),
        (SLURM | {"SLURM_JOB_ID": "x"}, "run.rendezvous: SLURM_JOB_ID must be a number; got 'x'; set run.rendezvous"),
    ],
    ids=["number", "address", "job"],
)
def test_an_environment_without_a_meaning_is_refused(environment: dict[str, str], shown: str):
    """A traceback of int()."""
    with pytest.raises(UserError, match=f"^{shown}"):
        Node.here(run_of("run.nodes=2"), environment)


def test_a_machine_without_the_data_names_the_command(tmp_path: Path):
    """It was told to run `dvc repro`, which trains there."""
    paths = Paths(**{field.name: tmp_path / field.name for field in fields(Paths)})
    refuse_missing_inputs(paths, of_node(0))
    with pytest.raises(UserError, match="tokens: is not on node 1 .*; run `dvc pull tokenize bucket estimate` there"):
        refuse_missing_inputs(paths, of_node(1))


def of_node(node: int) -> World:
    return World(rank=node, size=2, local_rank=0, local_size=1)


def test_a_machine_without_the_model_is_told_to_copy_it(tmp_path: Path):
    """It was told to put it back, or to run `dvc repro`, which trains there."""
    files = {"config.json": 64 * "0"}
    lock = {"kind": "directory", "name": f"{tmp_path}/model", "files": files, "tokenizer_files": ["tokenizer.json"]}
    copied = rf"^model\.name: on node 1 \({platform.node()}\) .*{{}}.*; copy it there from node 0$"
    with pytest.raises(UserError, match="model' is gone; put it back"), remedies_of_node(of_node(0)):
        model_directory(lock)
    with pytest.raises(UserError, match=copied.format("model' is gone")), remedies_of_node(of_node(1)):
        model_directory(lock)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").touch()
    with pytest.raises(UserError, match=copied.format("tokenizer.json is gone")), remedies_of_node(of_node(1)):
        model_directory(lock)
    with pytest.raises(UserError, match=copied.format("config.json changed")), remedies_of_node(of_node(1)):
        verify_files(tmp_path / "model", files)


def test_a_machine_that_does_not_reach_the_hub_uses_a_copy_of_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    files = {path.name: path.read_bytes() for path in TINY_DIRECTORY.iterdir() if path.is_file()}
    lock: dict[str, Any] = {"kind": "hub", "name": "org/model", "files": ["config.json"], "tokenizer_files": []}
    with serve({"models/org/model": files}) as hub:
        use_hub(monkeypatch, hub, tmp_path / "node-0")
        lock["revision"], _ = list_files("model.name", "org/model", "model", None)
        model_directory(lock)
        use_hub(monkeypatch, hub, tmp_path / "node-1")
    with (
        pytest.raises(UserError, match="; or copy the hub's cache from node 0 to node 1 "),
        remedies_of_node(of_node(1)),
    ):
        model_directory(lock)
    shutil.copytree(tmp_path / "node-0", tmp_path / "node-1", symlinks=True, dirs_exist_ok=True)
    assert model_directory(lock).is_relative_to(tmp_path / "node-1")


@pytest.mark.parametrize(
    ("endings", "shown"),
    [
        ({0: "lost", 1: "lost", 2: ("crash", "killed"), 3: "lost"}, "killed (on node 1, b)"),
        ({0: ("error", "bad"), 2: ("error", "bad")}, "bad"),
        ({0: "lost", 1: "lost", 2: ("error", "bad on node 1 (b)")}, "bad on node 1 (b)"),
        ({0: "waited", 1: "lost", 3: "waited"}, "late; the one that did not come: process 2 on node 1 (b)"),
        ({0: "waited", 1: "lost"}, "late; the one that did not come: process 2, 3 on node 1 (b)"),
        ({0: "lost", 1: "waited", 2: "lost", 3: "ended"}, "late; the one that did not come: process 3 on node 1 (b)"),
        ({0: "waited", 2: "ended", 3: "ended"}, "late; the one that did not come: process 1 on node 0 (a)"),
        ({0: "lost", 1: "lost", 2: "lost", 3: "ended"}, "broke"),
    ],
    ids=["killed", "all", "named", "hangs", "silent", "ended-in-its-hang", "ended-while-waiting", "broken"],
)
def test_the_line_of_all_nodes_blames_the_one_at_fault(endings: dict[int, Any], shown: str):
    """Those that waited were blamed, or nobody."""
    messages = {"waited": "late", "lost": "broke", "ended": "broke"}
    found = {}
    for rank, how in endings.items():
        kind, message = how if isinstance(how, tuple) else (how, messages[how])
        found[rank] = Ending(kind=kind, message=message)
    assert str(fault_of(found, ["a", "b"], 2)) == shown
