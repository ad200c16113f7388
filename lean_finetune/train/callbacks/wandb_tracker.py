"""Weights & Biases. Its environment variables apply: WANDB_MODE=offline, WANDB_PROJECT, WANDB_DIR, WANDB_API_KEY."""

import os
import sys

from tqdm import tqdm

from lean_finetune.train.callbacks.callback import Row
from lean_finetune.train.callbacks.tracker import PROJECT, Tracker, figures, logs_root

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
