"""MLflow: the server that MLFLOW_TRACKING_URI names, or the local store logs/mlflow.db."""

import logging
import os
import time
from typing import Any

from lean_finetune.train.callbacks.callback import Row
from lean_finetune.train.callbacks.tracker import PROJECT, Tracker, figures, logs_root

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
