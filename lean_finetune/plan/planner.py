"""Plan all micro-batches of a run from params.yaml and the index of its rows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import lcm

from lean_finetune.config.parallel_layout import ParallelLayout
from lean_finetune.config.schema import Bucket, Params
from lean_finetune.plan.batch_plan import Plan
from lean_finetune.plan.micro_batches import MicroBatchSettings, split_steps
from lean_finetune.plan.optimizer_steps import run_steps
from lean_finetune.plan.row_index import RowIndex, source_weights


def pad_multiple(p: Params) -> int:
    """Padded lengths are multiples of this: of bucket.pad_multiple and of the GPUs that divide each row's tokens."""
    return lcm(p.bucket.pad_multiple, ParallelLayout.from_params(p).context)


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
        bucket = {name: getattr(p.bucket, name) for name in Bucket.model_fields}
        return cls(
            micro_batches=MicroBatchSettings(
                **bucket | {"pad_multiple": pad_multiple(p)}, ranks=ParallelLayout.from_params(p).data
            ),
            seed=p.seed,
            epochs=p.train.epochs,
            tokens_per_step=p.train.tokens_per_step,
            weights=source_weights(p.data.source),
        )

    def parts(self, index: RowIndex) -> Iterator[Plan]:
        """The plan in consecutive parts; raises UserError if the longest row does not fit, or there is no row."""
        steps = run_steps(index, seed=self.seed, epochs=self.epochs, tokens_per_step=self.tokens_per_step)
        return split_steps(steps, index, self.micro_batches)

    def plan(self, index: RowIndex) -> Plan:
        """The complete plan; raises as `parts`."""
        return Plan.joined(list(self.parts(index)))
