"""The whole run cut into micro-batches, from the parameters and the index of its rows."""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lean_finetune.config.schema import Params
from lean_finetune.plan.batch_plan import Plan, read_plan, write_plan
from lean_finetune.plan.micro_batches import MicroBatchSettings, split_steps
from lean_finetune.plan.optimizer_steps import run_steps
from lean_finetune.plan.row_index import RowIndex, source_weights


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """The parameters from which a plan follows."""

    cutting: MicroBatchSettings
    seed: int
    epochs: int
    tokens_per_step: int
    weights: Sequence[float]
    """Of the sources of rows."""

    @classmethod
    def from_params(cls, p: Params) -> "PlanSettings":
        """Read section `bucket`, the number of GPUs, the sources, and what decides the rows of a step."""
        cutting = MicroBatchSettings(
            mode=p.bucket.mode,
            max_tokens=p.bucket.max_tokens,
            pad_multiple=p.bucket.pad_multiple,
            constant_shape=p.bucket.constant_shape,
            fixed_rows=p.bucket.fixed_rows,
            ranks=p.hardware.num_gpus,
        )
        return cls(
            cutting=cutting,
            seed=p.seed,
            epochs=p.train.epochs,
            tokens_per_step=p.train.tokens_per_step,
            weights=source_weights(p.data.source),
        )

    def parts(self, index: RowIndex) -> Iterator[Plan]:
        """The plan, part by part.

        Raises:
            UserError: the longest row does not fit in a micro-batch, or there is no row.
        """
        steps = run_steps(index, seed=self.seed, epochs=self.epochs, tokens_per_step=self.tokens_per_step)
        return split_steps(steps, index, self.cutting)

    def plan(self, index: RowIndex) -> Plan:
        """The plan as a whole; errors as for `parts`."""
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "plan.arrow"
            write_plan(path, self.parts(index))
            return read_plan(path)
