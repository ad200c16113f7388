"""The plain run that `lean-finetune plan` starts from: no memory switch, and the largest micro-batches."""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import count

from transformers import PretrainedConfig

from cuda_memory.gpus import Device
from cuda_memory.units import round_up
from lean_finetune.config.field_types import Method
from lean_finetune.config.load import with_flags
from lean_finetune.config.rule import OFF, SWITCHED_OFF
from lean_finetune.config.schema import Params
from lean_finetune.core.errors import UserError
from lean_finetune.islands.tower import TOWER
from lean_finetune.memory.advice.full_rows import full_rows_run, remade
from lean_finetune.memory.advice.run import Run
from lean_finetune.memory.advice.search_space import Option
from lean_finetune.memory.advice.step_cost import tokens_per_second
from lean_finetune.memory.devices import precision_on
from lean_finetune.memory.predict.assumed_rows import TEXT_ROWS, AssumedRows
from lean_finetune.memory.switches.activations import LOSS_CHUNK_TOKENS
from lean_finetune.memory.switches.all_switches import with_method
from lean_finetune.memory.switches.switch import SAME, flags_of
from lean_finetune.model.attention.kernels import FLASH_CAPABILITY
from lean_finetune.model.beside.whole_config import is_whole
from lean_finetune.model.model_config import refuse_packed_rows
from lean_finetune.plan.optimizer_steps import RowIndex
from lean_finetune.plan.planner import PlanSettings, pad_multiple

WORTH_PACKING = 0.01
"""Share of padding from which rows are packed."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """A plain run, and the sizes of micro-batches to try."""

    run: Run
    sizes: tuple[Option, ...]
    """Smaller micro-batches, descending."""
    flags: tuple[str, ...]
    """What makes it plain, as overrides of the user's parameters."""
    mode: str
    """Why rows are packed, or padded in buckets."""
    filled: float
    """Share of the run's tokens that are not padding."""

    def tokens_per_second(self, slowdown: float) -> tuple[float, float] | None:
        """Lowest and highest tokens per second of all GPUs, without padding; None if the device's speed is not known.

        `slowdown`: time per row of a set of switches relative to the plain run.
        """
        if (speed := tokens_per_second(self.run)) is None:
            return None
        factor = self.run.setting.gpus * self.filled / slowdown
        return speed[0] * factor, speed[1] * factor


def plain_start(
    p: Params,
    config: PretrainedConfig,
    device: Device,
    method: Method,
    fixed: Collection[str],
    index: RowIndex | None,
    assumed: AssumedRows = TEXT_ROWS,
) -> Start:
    """The plain run of a method. Parameters in `fixed` keep their values. `index`: the rows; None means full ones.

    `assumed`: what every full row carries.

    Raises:
        UserError: the model, the device or a parameter does not suit the method.
    """
    flags = [text for text in _plain_flags(p, device, method) if text.partition("=")[0] not in fixed]
    packed, why = _packing(p, config, device, fixed, index)
    changed = with_flags(p, flags, check=False)
    mode = "packed" if packed else "bucketed" if "bucket.mode" not in fixed else p.bucket.mode
    length = round_up(changed.data.max_length, pad_multiple(changed))
    least = length * changed.train.row_kind.unit
    tokens = max(math.ceil(changed.train.step_tokens / changed.layout.data), least)
    if mode != "packed":
        tokens = -(-tokens // least) * least
    if changed.train.optimizer_in_backward:  # A step is one micro-batch, and ends with the row that reaches its tokens.
        mode, tokens = "packed", round_up(changed.train.step_tokens - 1 + length, pad_multiple(changed))
    sized = {"bucket.mode": mode, "bucket.max_tokens": tokens}
    flags += flags_of({key: value for key, value in sized.items() if key not in fixed})
    changed = with_flags(p, flags)
    run, filled = _with_rows(full_rows_run(changed, config, device, assumed=assumed), index)
    resized = "bucket.max_tokens" not in fixed and mode != "fixed" and not changed.train.optimizer_in_backward
    sizes = _sizes(run, index, length) if resized else ()
    return Start(run=run, sizes=tuple(sizes), flags=tuple(flags), mode=why, filled=filled)


def _plain_flags(p: Params, device: Device, method: Method) -> tuple[str, ...]:
    """Overrides that turn memory switches off; fp32 master weights where all weights are trained in bf16."""
    precision, _ = precision_on(device, p.train.precision)
    values = {**SWITCHED_OFF, **(with_method(method) if method != p.train.method else {})}
    values |= {
        "train.method": method,
        "train.precision": precision,
        # bf16 alone loses most updates of a usual learning rate.
        "train.master_weights": method == "full" and precision == "bf16",
        "train.grad_ckpt": False,
        "train.sharding": "none" if p.hardware.num_gpus == 1 else "ddp",
        "train.shard_group_gpus": OFF["train.shard_group_gpus"],
        "train.loss_chunk": p.train.loss_chunk or LOSS_CHUNK_TOKENS,
    }
    return flags_of(values)


def _packing(
    p: Params, config: PretrainedConfig, device: Device, fixed: Collection[str], index: RowIndex | None
) -> tuple[bool, str]:
    """Whether rows are packed, and why."""
    if "bucket.mode" in fixed:
        return p.bucket.mode == "packed", "as set"
    if index is None:
        return False, "rows of one length have no padding"
    if is_whole(config):
        return False, f"{TOWER.rows_text} are not packed"
    try:
        refuse_packed_rows(config, int(index.lengths.max()))
    except UserError:
        return False, f"attention of {config.model_type} cannot see where packed rows end"
    if device.kind != "cuda" or device.compute_capability < FLASH_CAPABILITY:
        return False, f"{device.name} has no kernel for packed rows, which it computes one after the other"
    tokens = round_up(p.data.max_length, pad_multiple(p)) * p.train.row_kind.unit
    bucketed = with_flags(p, [f"bucket.max_tokens={tokens}", "bucket.mode=bucketed"])
    plan = PlanSettings.from_params(bucketed).plan(index)
    padding = 1 - float(index.lengths[plan.rows].sum()) / float(plan.padded_tokens.sum())
    if padding < WORTH_PACKING:
        return False, f"buckets pad {padding:.1%} alone"
    return True, f"buckets would pad {padding:.0%}"


def _sizes(run: Run, index: RowIndex | None, length: int) -> Iterator[Option]:
    """Smaller micro-batches, down to one row or pair: 3/4, 1/2, 3/8, 1/4, … of the largest one's tokens."""
    most, least = run.bucket.max_tokens, length * run.setting.train.row_kind.unit
    grid = 1 if run.bucket.mode == "packed" else least
    shares = (share / 2**halvings for halvings in count() for share in (Fraction(3, 4), Fraction(1, 2)))
    sizes = (max(int(most * share) // grid * grid, least) for share in shares)
    tokens, level = most, 0
    while tokens > least:
        tokens, level = next(size for size in sizes if size < tokens), level + 1
        flags = flags_of({"bucket.max_tokens": tokens})
        smaller, _ = _with_rows(remade(run, with_flags(run.params, flags)), index)
        work = smaller.tokens_per_step / run.tokens_per_step
        yield Option(flags=flags, effect=SAME, ease=0, level=level, run=smaller, work=work)


def _with_rows(run: Run, index: RowIndex | None) -> tuple[Run, float]:
    """The run with the padding and the number of micro-batches of some rows, and the share that is not padding.

    Its micro-batches stay full: these need the most memory, so the answer holds for rows outside of the sample too.
    """
    if index is None:
        return run, 1.0
    plan = PlanSettings.from_params(run.params).plan(index)
    steps, ranks = len(plan.steps), run.setting.layout.data
    padded = float(plan.padded_tokens.sum())
    changed = replace(
        run,
        tokens_per_step=padded / steps / ranks / run.setting.layout.context,
        micro_batches_per_step=max(1.0, len(plan) / steps / ranks),
    )
    return changed, float(index.lengths[plan.rows].sum()) / padded
