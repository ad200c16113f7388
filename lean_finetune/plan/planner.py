"""Plan all micro-batches of a run from params.yaml and the index of its rows."""

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
    """The settings that determine a plan."""

    micro_batches: MicroBatchSettings
    seed: int
    epochs: int
    tokens_per_step: int
    weights: Sequence[float]
    """Of the data sources."""

    @classmethod
    def from_params(cls, p: Params) -> "PlanSettings":
        """Read section `bucket`, the data sources, and the settings that decide the rows of a step."""
        micro_batches = MicroBatchSettings(
            mode=p.bucket.mode,
            max_tokens=p.bucket.max_tokens,
            pad_multiple=p.bucket.pad_multiple,
            constant_shape=p.bucket.constant_shape,
            fixed_rows=p.bucket.fixed_rows,
            ranks=p.hardware.num_gpus,
        )
        return cls(
            micro_batches=micro_batches,
            seed=p.seed,
            epochs=p.train.epochs,
            tokens_per_step=p.train.tokens_per_step,
            weights=source_weights(p.data.source),
        )

    def parts(self, index: RowIndex) -> Iterator[Plan]:
        """The plan in consecutive parts.

        Raises:
            UserError: the longest row does not fit in a micro-batch, or there is no row.
        """
        steps = run_steps(index, seed=self.seed, epochs=self.epochs, tokens_per_step=self.tokens_per_step)
        return split_steps(steps, index, self.micro_batches)

    def plan(self, index: RowIndex) -> Plan:
        """The complete plan; raises as `parts`."""
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "plan.arrow"
            write_plan(path, self.parts(index))
            return read_plan(path)
