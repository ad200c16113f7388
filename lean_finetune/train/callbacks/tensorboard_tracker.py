"""TensorBoard: event files below logs/tensorboard."""

import json

from lean_finetune.train.callbacks.callback import Row
from lean_finetune.train.callbacks.tracker import Tracker, figures, logs_root


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
