"""DVCLive: files below logs/dvclive, and DVC Studio where it is set up."""

from lean_finetune.train.callbacks.callback import Row
from lean_finetune.train.callbacks.tracker import Tracker, figures, logs_root


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
