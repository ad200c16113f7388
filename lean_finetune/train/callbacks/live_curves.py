"""Write the curves while training runs."""

import csv

from lean_finetune.core.atomic_files import write_csv
from lean_finetune.train.callbacks.callback import Row, curve_columns
from lean_finetune.train.callbacks.tracker import Tracker

CURVES = "curves.csv"


class LiveCurves(Tracker):
    """Appends each step to `curves.csv` in the directory of the unfinished run, below scratch/train.

    The rows are those of `data/train/curves.csv`, which is written when training ends: DVC removes a stage's outputs
    before it runs. A resumed run starts with the checkpoint's rows, so no step is in the file twice.
    """

    name = CURVES

    def open(self) -> None:
        """See the base class."""
        self.active = bool(self.info.directories)
        if self.active:
            self._path, self._started = self.info.directories[0] / CURVES, False

    def log(self, row: Row) -> None:
        """Append a row; the first time, write those of all finished steps."""
        if not self._started:
            write_csv(self._path, curve_columns(self.info.curves), self.info.curves)
            self._started = True
            return
        with open(self._path, "a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, fieldnames=curve_columns([row]), lineterminator="\n").writerow(row)
