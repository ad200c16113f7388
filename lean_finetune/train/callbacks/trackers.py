"""The trackers that `run.trackers` may name. Each sends a run's figures through a class of `accelerate.tracking`."""

import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from accelerate import PartialState, tracking
from accelerate.utils import patch_environment

from cuda_memory.units import GIB
from lean_finetune.core.atomic_files import repo_root
from lean_finetune.core.errors import UserError
from lean_finetune.core.progress import write_line
from lean_finetune.core.versions import install_extra
from lean_finetune.train.callbacks.callback import EXPERT_COLUMNS, PREFERENCE_COLUMNS, CurveRow, RunInfo, Tracker

PROJECT = "lean-finetune"
"""Name under which services group the runs, unless the service's own environment variable names another."""
ALWAYS = ("loss", "heldout_loss", "lr", "grad_norm", "epoch")
"""Figures of every run."""
MEASURED, PREDICTED, RESERVED = "memory/measured_gib", "memory/predicted_gib", "memory/reserved_gib"


def figures(row: CurveRow, info: RunInfo) -> dict[str, float]:
    """Return the figures of one optimizer step by name; those that are not known are left out."""
    in_bytes = {
        MEASURED: row["allocated_bytes"],
        PREDICTED: info.predicted_peak_bytes,
        RESERVED: row["reserved_bytes"],
        "memory/process_gib": row["rss_bytes"],
    }
    known = {
        **{name: row.get(name) for name in (*ALWAYS, *EXPERT_COLUMNS, *PREFERENCE_COLUMNS)},
        "tokens_per_second": row["tokens"] / row["seconds"],
        **{name: size / GIB for name, size in in_bytes.items() if size is not None},
    }
    return {name: value for name, value in known.items() if value is not None}


def logs_root() -> Path:
    """Return the directory of the trackers' files; runs in temporary copies share the checkout's."""
    return repo_root() / "logs"


class AccelerateTracker(Tracker):
    """Sends every step to a tracker of accelerate."""

    library: Any
    """The started `tracking.GeneralTracker`. (Any: the methods of its subclasses differ.)"""
    first_step = 0
    """Steps before it are not sent, because an earlier process of the run sent them."""

    def start(self, library: tracking.GeneralTracker, parameters: Mapping[str, Any] | None = None) -> None:
        """Start a tracker of accelerate; send the parameters of a new run."""
        # accelerate's loggers need its state. As one process on a CPU it joins no process group and takes no GPU.
        with patch_environment(local_rank=-1, pmi_size=1):
            PartialState(cpu=True)
        self.library = library
        library.start()
        if parameters is not None:
            library.store_init_configuration(dict(parameters))

    def log(self, row: CurveRow) -> None:
        """See the base class."""
        if row["step"] >= self.first_step:
            self.library.log(figures(row, self.info), step=row["step"])

    def close(self, *, failed: bool) -> None:
        """See the base class."""
        self.library.finish()


class TensorBoardTracker(AccelerateTracker):
    """Event files in `logs/tensorboard/<run>`. A resumed run's file replaces the steps after its checkpoint."""

    name = package = "tensorboard"

    def open(self) -> None:
        """See the base class."""
        resumed_step = self.info.first_step or None
        directory = logs_root() / "tensorboard"
        self.start(tracking.TensorBoardTracker(self.info.run_name, directory, purge_step=resumed_step))
        if resumed_step is None:  # As text: hyperparameters of TensorBoard may be neither lists nor None.
            shown = json.dumps(dict(self.info.parameters), indent=4, ensure_ascii=False)
            self.library.log({"parameters": "".join(f"    {line}\n" for line in shown.splitlines())})


class DvcLiveTracker(AccelerateTracker):
    """Files in `logs/dvclive/<run>`. It makes no experiment and no dvc.yaml: the pipeline has both."""

    name = package = "dvclive"

    def open(self) -> None:
        """See the base class."""
        directory = logs_root() / "dvclive" / self.info.run_name
        resumed = directory.exists()
        given = {name: value for name, value in self.info.parameters.items() if value is not None}
        live = tracking.DVCLiveTracker(dir=str(directory), resume=resumed, save_dvc_exp=False, dvcyaml=False)
        self.start(live, None if resumed else given)
        if resumed:
            self.first_step = self.library.tracker.step


class WandbTracker(AccelerateTracker):
    """One run of Weights & Biases. Offline, a resumed training writes another file with the same run id.

    The library's variables apply: WANDB_MODE=offline, WANDB_PROJECT, WANDB_DIR, WANDB_API_KEY. The service drops a step
    that it has.
    """

    name = package = "wandb"
    MOST_WAIT_SECONDS = 30
    """Before training, for the service or for a login."""

    def open(self) -> None:
        """See the base class."""
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # To its makers, also of an offline run.
        import wandb

        root, name = logs_root(), self.info.run_name
        root.mkdir(exist_ok=True)
        offline = os.environ.get("WANDB_MODE") == "offline"
        wait = self.MOST_WAIT_SECONDS
        self.start(
            tracking.WandBTracker(
                os.environ.get("WANDB_PROJECT", PROJECT),
                dir=os.environ.get("WANDB_DIR", str(root)),
                id=name,
                name=name,
                resume=None if offline else "allow",
                config=dict(self.info.parameters),
                settings=wandb.Settings(console="off", init_timeout=wait, login_timeout=wait, silent=True),
            )
        )
        if self.library.tracker.url:
            write_line(f"wandb: {self.library.tracker.url}")

    def close(self, *, failed: bool) -> None:
        """End the run; `finish` of accelerate cannot say that it failed."""
        self.library.tracker.finish(exit_code=int(failed))


class MlflowTracker(AccelerateTracker):
    """One run of the experiment MLFLOW_EXPERIMENT_NAME, on the server MLFLOW_TRACKING_URI or in `logs/mlflow.db`.

    accelerate starts or continues the run. Figures are sent here: accelerate sends each step in a request of its own
    (44 ms into a local file, and training waits), and its `finish` cannot say that a run failed.
    """

    name = package = "mlflow"
    MOST_METRICS, MOST_VALUE_LENGTH = 1000, 500
    """That MLflow takes in one request, and characters of a parameter's value in any of its stores."""
    SEND_SECONDS = 1.0
    """Steps are sent together, at most this long after the first of them."""
    ENVIRONMENT = {
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    """Unless set. MLflow's own: 7 retries of 120 s, while training would wait; and counts of its use to its makers."""

    def open(self) -> None:
        """See the base class."""
        for variable, value in self.ENVIRONMENT.items():
            os.environ.setdefault(variable, value)
        for logger in ("mlflow", "alembic"):
            logging.getLogger(logger).setLevel(logging.WARNING)
        import mlflow

        root = logs_root().absolute()
        root.mkdir(exist_ok=True)
        server = os.environ.get("MLFLOW_TRACKING_URI")
        mlflow.set_tracking_uri(server or f"sqlite:///{root}/mlflow.db")
        self._client = mlflow.MlflowClient()
        self._waiting: list[Any] = []
        self._sent = time.monotonic()
        found = self._earlier_run() if self.info.first_step else None
        given = {name: str(value)[: self.MOST_VALUE_LENGTH] for name, value in self.info.parameters.items()}
        artifacts = None if server else str(root / "mlflow")
        self.start(
            tracking.MLflowTracker(PROJECT, artifacts, run_id=found, run_name=self.info.run_name),
            None if found else given,
        )
        self._run = self.library.tracker.info.run_id
        mlflow.end_run("RUNNING")  # MLflow would end its active run at exit, and wait again for a server that is away.
        if found:
            history = self._client.get_metric_history(self._run, "loss")
            self.first_step = 1 + max((one.step for one in history), default=-1)

    def _earlier_run(self) -> str | None:
        """Return the id that the first process's run has on the server."""
        experiment = self._client.get_experiment_by_name(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
        named = f"attributes.run_name = '{self.info.run_name}'"
        found = self._client.search_runs([experiment.experiment_id], named) if experiment else []
        return found[0].info.run_id if found else None

    def log(self, row: CurveRow) -> None:
        """See the base class."""
        from mlflow.entities import Metric

        if row["step"] < self.first_step:
            return
        now = int(time.time() * 1000)
        self._waiting += [Metric(name, value, now, row["step"]) for name, value in figures(row, self.info).items()]
        if time.monotonic() - self._sent >= self.SEND_SECONDS:
            self.flush()

    def flush(self) -> None:
        """See the base class."""
        waiting, self._waiting, self._sent = self._waiting, [], time.monotonic()
        for start in range(0, len(waiting), self.MOST_METRICS):
            self._client.log_batch(self._run, metrics=waiting[start : start + self.MOST_METRICS])

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
                f"run.trackers: {tracker.name} needs a package that is not installed; run "
                f"{install_extra(tracker.name)} or remove it from run.trackers"
            )
