"""Trackers: what each library has on disk after a run that was interrupted and resumed, offline."""

import csv
import json
import os
import re
import shutil
import struct
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState

from lean_finetune.config.field_types import TrackerName
from lean_finetune.core.errors import UserError
from lean_finetune.train.callbacks.callback import CALLBACKS, CURVE_COLUMNS, CurveRow, Tracker
from lean_finetune.train.callbacks.trackers import MEASURED, PREDICTED, TRACKERS, figures, refuse_missing_trackers
from lean_finetune.train.job import TrainJob, TrainResult
from lean_finetune.train.loop import train
from lean_finetune.train.monitor.measured_peak import make_meter
from tests.small_model import CPU
from tests.train.callbacks.test_progress import INFO, ROW
from tests.train.interrupted import STEPS, Breaking, interrupt, small_job

PREDICTED_BYTES = 3 << 20
NO_REPORTS = {"mlflow": {"MLFLOW_DISABLE_TELEMETRY": "true"}, "wandb": {"WANDB_ERROR_REPORTING": "false"}}
SLOW = pytest.mark.slow
Series = dict[str, list[tuple[int, float]]]
"""Step and value of each point, by the figure's name."""


@pytest.fixture
def job(small_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainJob:
    """A run in an empty directory, as from a checkout."""
    monkeypatch.chdir(tmp_path)
    settings = {"train.lr": 0.01, "train.lora.targets": ["all-linear"], "data.max_rows": None}
    job = small_job(small_llama, tmp_path / "tokens")
    return replace(job, settings=settings, predicted_peak_bytes=PREDICTED_BYTES)


def in_two_parts(job: TrainJob) -> TrainResult:
    """Run until a fault after three steps, and resume from the checkpoint of two."""
    interrupt(job, Path("checkpoints"), fail_after=3, every_step=True)
    if "wandb" in job.trackers:
        time.sleep(1)  # It names the files of an offline run by the second.
    shutil.rmtree(max(Path("checkpoints").glob("step-*")))
    checkpoints = Breaking(Path("checkpoints"))
    result = train(job, make_meter(CPU), checkpoints)
    checkpoints.wait()
    return result


def tensorboard_series() -> Series:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (directory,) = Path("logs/tensorboard").iterdir()
    events = EventAccumulator(str(directory)).Reload()
    assert "train.lr" in events.Tensors("parameters/text_summary")[0].tensor_proto.string_val[0].decode()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


def dvclive_series() -> Series:
    (directory,) = Path("logs/dvclive").iterdir()
    assert "train.lr: 0.01" in (directory / "params.yaml").read_text()
    root, found = directory / "plots/metrics", {}
    for path in root.rglob("*.tsv"):
        name = path.relative_to(root).with_suffix("").as_posix()
        with open(path, newline="") as file:
            rows = csv.DictReader(file, delimiter="\t")
            found[name] = [(int(row["step"]), float(row[path.stem])) for row in rows]
    return found


def mlflow_series() -> Series:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{Path.cwd()}/logs/mlflow.db")
    (experiment,) = (found for found in client.search_experiments() if found.name == "lean-finetune")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED" and run.data.params["train.lr"] == "0.01"
    return {
        name: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)] for name in run.data.metrics
    }


def log_records(content: bytes) -> Iterator[bytes]:
    """Records of a LevelDB log after a header of 7 bytes: pieces of a checksum, a size, a type and data in blocks."""
    block_bytes, header_bytes, last_types, at, data = 1 << 15, 7, (1, 4), 7, b""
    while at + header_bytes < len(content):
        if block_bytes - at % block_bytes < header_bytes:
            at += block_bytes - at % block_bytes
        size, kind = struct.unpack_from("<HB", content, at + 4)
        data += content[at + header_bytes : at + header_bytes + size]
        at += header_bytes + size
        if kind in last_types:
            yield data
            data = b""


def wandb_series() -> Series:
    messages = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    found: Series = {}
    ids = set()
    for path in sorted(Path("logs/wandb").glob("offline-run-*/run-*.wandb")):
        for data in log_records(path.read_bytes()):
            record = messages.Record.FromString(data)
            ids |= {record.run.run_id} - {""}
            values = {
                (item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item
            }
            if any(values.get("_step") == step for step, _ in found.get("_step", [])):
                continue  # The service takes the first record of a step.
            for name, value in values.items():
                found.setdefault(name, []).append((values["_step"], value))
    assert len(ids) == 1, "a resumed run has the id of its first process"
    return found


READERS: dict[str, Callable[[], Series]] = {
    "tensorboard": tensorboard_series,
    "dvclive": dvclive_series,
    "mlflow": mlflow_series,
    "wandb": wandb_series,
}


def test_tokens_a_second_are_those_of_a_step():
    """A step of 20,000 tokens in 1.5 seconds."""
    assert figures(ROW, INFO)["tokens_per_second"] == pytest.approx(13_333.3, abs=0.1)


@pytest.mark.filterwarnings("default")  # Of the libraries; each is run as users run it.
@pytest.mark.parametrize(
    "name", ["tensorboard", "dvclive", *(pytest.param(name, marks=SLOW) for name in ("mlflow", "wandb"))]
)
def test_a_tracker_has_the_figures_of_every_step_once(job: TrainJob, name: str, monkeypatch, capfd):
    """A run that was resumed shows steps twice or not at all, in two runs, or without its memory."""
    pytest.importorskip(TRACKERS[name].package, reason=f"{name} is not installed")
    if name == "mlflow":
        pytest.importorskip("sqlalchemy", reason="the local store of MLflow needs it")
    monkeypatch.setenv("WANDB_MODE", "offline")
    curves = in_two_parts(replace(job, trackers=[name])).curves
    assert "is off" not in capfd.readouterr().err
    assert os.environ.items() >= NO_REPORTS.get(name, {}).items(), "the library's makers are sent reports of its use"
    found = READERS[name]()
    near = lambda values: [pytest.approx(value, rel=1e-6) for value in values]  # noqa: E731
    assert [step for step, _ in found["loss"]] == list(range(STEPS))
    assert [value for _, value in found["loss"]] == near(row["loss"] for row in curves)
    held = [(row["step"], row["heldout_loss"]) for row in curves if "heldout_loss" in row]
    assert [step for step, _ in found["heldout_loss"]] == [step for step, _ in held]
    measured = [(row["step"], row["allocated_bytes"] / 2**30) for row in curves if row["allocated_bytes"] is not None]
    assert [step for step, _ in found[MEASURED]] == [step for step, _ in measured]
    assert [value for _, value in found[MEASURED]] == near(value for _, value in measured)
    assert [value for _, value in found[PREDICTED]] == near([PREDICTED_BYTES / 2**30] * STEPS)


class Failing(Tracker):
    """Fails in the hook that `fails` names."""

    name = package = install = "failing"
    fails = ""
    calls: list[str] = []

    def __getattribute__(self, hook: str) -> Any:
        if hook not in ("open", "log", "flush", "close"):
            return super().__getattribute__(hook)

        def call(*_: Any, **__: Any) -> None:
            self.calls.append(hook)
            if hook == type(self).fails:
                raise ConnectionError("no route\nto host")

        return call


@pytest.mark.parametrize("fails", ["open", "log", "flush", "close"])
def test_a_tracker_that_fails_is_off_and_training_continues(fails: str, monkeypatch, capsys):
    monkeypatch.setattr(Failing, "fails", fails)
    monkeypatch.setattr(Failing, "calls", [])
    tracker = Failing(INFO)
    tracker.on_start()
    for step in range(2):
        tracker.on_step(ROW | {"step": step})
        tracker.on_checkpoint(step + 1)
    tracker.on_end(None)
    assert Failing.calls.index(fails) == len(Failing.calls) - 1, "called again after it failed"
    warning = "warning: failing is off from here on, training continues: ConnectionError: no route to host\n"
    assert capsys.readouterr().err == warning


def test_a_tracker_of_one_of_several_processes_joins_none_of_them(monkeypatch, tmp_path: Path):
    """The state of accelerate starts communication, or waits, where the environment names several processes."""
    monkeypatch.chdir(tmp_path)
    PartialState._reset_state()
    launched = {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: pytest.fail("it joins them"))
    threads = torch.get_num_threads()
    tracker = TRACKERS["tensorboard"](INFO)
    tracker.open()
    tracker.log(ROW)
    tracker.close(failed=False)
    assert list(tmp_path.glob("logs/tensorboard/*/events.*"))
    assert torch.get_num_threads() == threads
    assert {name: os.environ[name] for name in launched} == launched


def test_all_trackers_of_a_run_and_of_its_resumption_use_one_name(tmp_path: Path):
    """A resumed run would continue another tracker's run, or start one."""
    resumed, other = tmp_path / "resumed", tmp_path / "other"
    for directory in (resumed, other):
        directory.mkdir()
    first = replace(INFO, directories=[resumed])
    names = {tracker.info.run_name for tracker in [kind(first) for kind in (*CALLBACKS, *TRACKERS.values())]}
    assert len(names) == 1
    for directories in ([resumed], [other, resumed]):
        assert replace(INFO, directories=directories, first_step=2).run_name in names
    assert replace(INFO, directories=[resumed]).run_name not in names, "a run that starts anew has another name"


def read_csv(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_curves_are_on_disk_while_training_runs(job: TrainJob, monkeypatch):
    """Curves that appear at the end only, or a resumed run whose file has a step twice."""
    seen: list[int] = []

    class Watching(Tracker):
        name = "watching"

        def open(self) -> None: ...

        def log(self, row: CurveRow) -> None:
            seen.append(len(read_csv(Path("checkpoints/curves.csv"))))

    monkeypatch.setitem(TRACKERS, "watching", Watching)
    job = replace(job, trackers=["watching"])
    result = in_two_parts(job)
    assert seen == [1, 2, 3, 3, 4, 5]
    rows = read_csv(Path("checkpoints/curves.csv"))
    assert list(rows[0]) == list(CURVE_COLUMNS)
    assert [float(row["loss"]) for row in rows] == [row["loss"] for row in result.curves]


def test_a_tracker_without_its_package_is_refused_with_the_command_that_installs_it(monkeypatch, tmp_path: Path):
    """A directory named as the package, such as that of wandb's files, is no package."""
    (tmp_path / "no_such_package").mkdir()
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    for package in ("no_such_package", "nor_this_one"):
        monkeypatch.setattr(TRACKERS["wandb"], "package", package)
        with pytest.raises(UserError, match=re.escape('; run `pip install "lean-finetune[wandb]"` or remove it from')):
            refuse_missing_trackers(["wandb"])


def test_params_take_the_names_of_all_trackers():
    assert set(get_args(TrackerName)) == set(TRACKERS)
