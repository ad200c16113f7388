"""The trackers that `run.trackers` may name: they send the figures of each step to a library."""

import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tqdm import tqdm

from cuda_memory.units import GIB
from lean_finetune.core.atomic_files import repo_root
from lean_finetune.core.errors import UserError
from lean_finetune.train.callbacks.callback import EXPERT_COLUMNS, Row, RunInfo, Tracker

PROJECT = "lean-finetune"
"""Name under which services group the runs, unless the service's own environment variable names another."""
MEASURED, PREDICTED, RESERVED = "memory/measured_gib", "memory/predicted_gib", "memory/reserved_gib"


def figures(row: Row, info: RunInfo) -> dict[str, float]:
    """Return the figures of one optimizer step by name; those that are not known are left out."""
    in_bytes = {
        MEASURED: row["allocated_bytes"],
        PREDICTED: info.predicted_peak_bytes,
        RESERVED: row["reserved_bytes"],
        "memory/process_gib": row["rss_bytes"],
    }
    known = {
        **{name: row.get(name) for name in ("loss", "heldout_loss", "lr", "grad_norm", "epoch", *EXPERT_COLUMNS)},
        "tokens_per_second": row["tokens"] / row["seconds"],
        **{name: size / GIB for name, size in in_bytes.items() if size is not None},
    }
    return {name: value for name, value in known.items() if value is not None}


def logs_root() -> Path:
    """Return the directory of the trackers' files; runs in temporary copies share the checkout's."""
    return repo_root() / "logs"


class TensorBoardTracker(Tracker):
    """One directory per run. A resumed run adds a file that replaces the steps after its checkpoint."""

    name = package = install = "tensorboard"

    def open(self) -> None:
        """See the base class."""
        from torch.utils.tensorboard import SummaryWriter

        resumed_step = self.info.first_step or None
        directory = logs_root() / "tensorboard" / self.info.run_name
        self._writer = SummaryWriter(str(directory), purge_step=resumed_step)
        if resumed_step is None:
            shown = json.dumps(dict(self.info.parameters), indent=4, ensure_ascii=False)
            self._writer.add_text("parameters", "".join(f"    {line}\n" for line in shown.splitlines()))

    def log(self, row: Row) -> None:
        """See the base class."""
        for name, value in figures(row, self.info).items():
            self._writer.add_scalar(name, value, row["step"])

    def flush(self) -> None:
        """See the base class."""
        self._writer.flush()

    def close(self, *, failed: bool) -> None:
        """See the base class."""
        self._writer.close()


# DVCLive: files below logs/dvclive, and DVC Studio where it is set up.


class DvcLiveTracker(Tracker):
    """One directory per run. It makes no experiment and no dvc.yaml: the pipeline has both."""

    name = package = install = "dvclive"

    def open(self) -> None:
        """See the base class."""
        from dvclive import Live

        directory = logs_root() / "dvclive" / self.info.run_name
        resumed = directory.exists()
        self._live = Live(str(directory), resume=resumed, save_dvc_exp=False, dvcyaml=False)
        self._first_step = self._live.step if resumed else 0
        if not resumed:
            given = {name: value for name, value in self.info.parameters.items() if value is not None}
            self._live.log_params(given)

    def log(self, row: Row) -> None:
        """Log a step, unless an earlier process of the run did."""
        if row["step"] < self._first_step:
            return
        self._live.step = row["step"]
        for name, value in figures(row, self.info).items():
            self._live.log_metric(name, value)
        self._live.next_step()

    def close(self, *, failed: bool) -> None:
        """See the base class."""
        self._live.end()


# Weights & Biases. Its environment variables apply: WANDB_MODE=offline, WANDB_PROJECT, WANDB_DIR, WANDB_API_KEY.

MOST_WAIT_SECONDS = 30
"""Before training, for the service or for a login."""


class WandbTracker(Tracker):
    """One run per training. Offline, a resumed training writes another file with the same run id."""

    name = package = install = "wandb"

    def open(self) -> None:
        """See the base class."""
        import wandb

        root = logs_root()
        root.mkdir(exist_ok=True)
        name = self.info.run_name
        offline = os.environ.get("WANDB_MODE") == "offline"
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            dir=os.environ.get("WANDB_DIR", str(root)),
            id=name,
            name=name,
            resume=None if offline else "allow",
            config=dict(self.info.parameters),
            settings=wandb.Settings(
                console="off", init_timeout=MOST_WAIT_SECONDS, login_timeout=MOST_WAIT_SECONDS, silent=True
            ),
        )

        if self._run.url:
            tqdm.write(f"wandb: {self._run.url}", file=sys.stderr)

    def log(self, row: Row) -> None:
        """See the base class; the service drops a step that it has."""
        self._run.log(figures(row, self.info), step=row["step"])

    def close(self, *, failed: bool) -> None:
        """See the base class."""
        self._run.finish(exit_code=int(failed))


# MLflow: the server that MLFLOW_TRACKING_URI names, or the local store logs/mlflow.db.

MOST_PARAMETERS, MOST_METRICS, MOST_VALUE_LENGTH = 100, 1000, 500
"""That MLflow takes in one request, and characters of a parameter's value in any of its stores."""
SEND_SECONDS = 1.0
"""Steps are sent together, at most this long after the first of them."""
LIMITS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
"""MLflow's own: 7 retries of 120 s, while training would wait."""


class MlflowTracker(Tracker):
    """One run per training, of the experiment in MLFLOW_EXPERIMENT_NAME. A resumed training continues it."""

    name = package = "mlflow"
    install = "mlflow-skinny sqlalchemy alembic"

    def open(self) -> None:
        """See the base class."""
        for variable, value in LIMITS.items():
            os.environ.setdefault(variable, value)
        for logger in ("mlflow", "alembic"):
            logging.getLogger(logger).setLevel(logging.WARNING)
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        root = logs_root().absolute()
        root.mkdir(exist_ok=True)
        self._metric = Metric
        self._waiting: list[Any] = []
        self._sent = time.monotonic()
        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{root}/mlflow.db")
        experiment, name = self._experiment(str(root / "mlflow")), self.info.run_name
        found = (
            self._client.search_runs([experiment], f"attributes.run_name = '{name}'") if self.info.first_step else []
        )
        if found:
            self._run = found[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            self._first_step = 1 + max(
                (one.step for one in self._client.get_metric_history(self._run, "loss")), default=-1
            )
            return
        self._run, self._first_step = self._client.create_run(experiment, run_name=name).info.run_id, 0
        params = [Param(key, str(value)[:MOST_VALUE_LENGTH]) for key, value in self.info.parameters.items()]
        for start in range(0, len(params), MOST_PARAMETERS):
            self._client.log_batch(self._run, params=params[start : start + MOST_PARAMETERS])

    def _experiment(self, artifacts: str) -> str:
        """Return the experiment's id; create it if there is none."""
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = self._client.get_experiment_by_name(name)
        local = "MLFLOW_TRACKING_URI" not in os.environ
        return found.experiment_id if found else self._client.create_experiment(name, artifacts if local else None)

    def log(self, row: Row) -> None:
        """Log a step, unless an earlier process of the run did."""
        if row["step"] < self._first_step:
            return
        now = int(time.time() * 1000)
        self._waiting += [
            self._metric(name, value, now, row["step"]) for name, value in figures(row, self.info).items()
        ]
        if time.monotonic() - self._sent >= SEND_SECONDS:
            self.flush()

    def flush(self) -> None:
        """See the base class."""
        waiting, self._waiting, self._sent = self._waiting, [], time.monotonic()
        for start in range(0, len(waiting), MOST_METRICS):
            self._client.log_batch(self._run, metrics=waiting[start : start + MOST_METRICS])

    def close(self, *, failed: bool) -> None:
        """See the base class."""
        self.flush()
        self._client.set_terminated(self._run, "FAILED" if failed else "FINISHED")


TRACKERS: dict[str, type[Tracker]] = {
    tracker.name: tracker for tracker in (DvcLiveTracker, TensorBoardTracker, WandbTracker, MlflowTracker)
}
"""By their name in `run.trackers`; `config.field_types.TrackerName` lists the names."""


def refuse_missing_trackers(trackers: Sequence[str]) -> None:
    """Refuse trackers whose packages are not installed.

    Raises:
        UserError: with the command that installs the first one.
    """
    for tracker in (TRACKERS[name] for name in trackers):
        spec = find_spec(tracker.package)
        if spec is None or spec.origin is None:  # A directory of that name in the working directory has no origin.
            raise UserError(
                f"run.trackers: {tracker.name} needs a package that is not installed; run `pip install "
                f"{tracker.install}` or remove it from run.trackers"
            )
