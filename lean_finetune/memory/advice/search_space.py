"""The changes that advice tries: the options of every switch and their combinations."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations, product
from typing import Any

from lean_finetune.config.declared_params import params_of_rules
from lean_finetune.config.load import keeps_rules, with_flags
from lean_finetune.config.schema import Bucket
from lean_finetune.core.errors import UserError
from lean_finetune.memory.advice.full_rows import full_batch, in_stages, remade
from lean_finetune.memory.advice.run import Run
from lean_finetune.memory.advice.step_cost import Costs
from lean_finetune.memory.predict.traced_step import TracedSteps, halved
from lean_finetune.memory.switches.all_switches import SWITCHES
from lean_finetune.memory.switches.switch import (
    EFFECTS,
    LESS_DATA,
    ROUNDED,
    SAME,
    SMALLER_PARTS,
    SMALLER_STEPS,
    UNCLIPPED,
    Support,
    Switch,
    Values,
    different,
    flags_of,
    setting_with,
)
from lean_finetune.model.beside.whole_config import refuse_parts
from lean_finetune.model.model_config import refuse_packed_rows
from lean_finetune.rows.attachment import measures_of
from lean_finetune.step.batches import BatchShape

MICRO_BATCH = "micro_batch"
"""The switch of section `bucket`: smaller micro-batches, then shorter rows."""
SHORTEST_ROW_TOKENS = 64
ROW_MULTIPLE = 8
SAME_SPEED = 0.005
"""Slowdowns closer than this count as equal, because the cost model is no more accurate."""
PAGED_NOTE = "8-bit optimizer state, paged from host memory"
HARDEST = 9
"""Ease of shorter rows."""


Allowed = Callable[[tuple[str, ...]], bool]
"""Whether overrides may be tried."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """One value of one switch."""

    switch: str = MICRO_BATCH
    flags: tuple[str, ...]
    """Overrides for `dvc exp run -S`. Empty for the value of the run itself."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """The values that change the setting, by dotted key."""
    effect: int
    """Index in EFFECTS."""
    ease: int
    """Rank from easy to hard."""
    level: int
    """Position in its switch. A stronger option needs less memory."""
    run: Run
    """The run with the micro-batches of this option."""
    note: str = ""
    """What it changes besides its effect."""
    work: float = 1.0
    """Tokens of a step with padding, relative to those of the run itself."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A combination of options."""

    options: tuple[Option, ...]
    """One option of each switch."""
    run: Run
    slowdown: float

    @property
    def flags(self) -> tuple[str, ...]:
        """All overrides in the order of the switches."""
        return _flags_of(self.options)

    @property
    def effect(self) -> int:
        """The most harmful effect of its options."""
        return max((option.effect for option in self.options if option.flags), default=SAME)

    @property
    def effect_text(self) -> str:
        """What it changes in learning."""
        return ", ".join(filter(None, [EFFECTS[self.effect], *(option.note for option in self.options)]))

    @property
    def order(self) -> tuple[int, int, int, int]:
        """The sort key for trying candidates."""
        eases = [option.ease for option in self.options if option.flags]
        return (self.effect, round(self.slowdown / SAME_SPEED), max(eases), len(eases))

    @property
    def total_level(self) -> int:
        """Sum of the levels of its options."""
        return sum(option.level for option in self.options)

    @property
    def sums_gradients(self) -> bool:
        """Whether the traced steps add to the gradients of an earlier micro-batch."""
        return any(len(step) > 1 for step in self.run.steps)

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest micro-batch."""
        return max(shape.rows * shape.length for step in self.run.steps for shape in step)

    @property
    def attached(self) -> set[Any]:
        """What the rows of its micro-batches carry besides tokens."""
        of_shapes = (shape.attached for step in self.run.steps for shape in step)
        return {tuple(one.of_rows for one in attached if one.of_rows) for attached in of_shapes}

    def level(self, switch: str) -> int:
        """The level of the option of one switch."""
        return self.options[switch_names().index(switch)].level

    def covers(self, other: "Candidate") -> bool:
        """Whether every option is at least as strong as the other candidate's."""
        return all(a.level >= b.level for a, b in zip(self.options, other.options, strict=True))


def switch_names() -> list[str]:
    """Names of all switches, in the order of a candidate's options."""
    return [MICRO_BATCH, *(switch.name for switch in SWITCHES)]


class Space:
    """The options of every switch, and their combinations; of both, those that the rules of params.yaml accept."""

    def __init__(
        self,
        run: Run,
        costs: Costs,
        sizes: Iterable[Option] | None = None,
        wanted: Allowed = lambda flags: True,
    ):
        """Find the options.

        Args:
            run: the run that they change.
            costs: of that run.
            sizes: the options of `MICRO_BATCH`, ascending by level; None means halved ones.
            wanted: whether overrides may be tried, besides the rules.
        """
        self.run, self.costs, self._wanted = run, costs, wanted
        self._keeps_rules = partial(keeps_rules, params_of_rules(run.params))
        unchanged = Option(flags=(), effect=SAME, ease=0, level=0, run=run)
        support = Support(
            cuda=costs.cuda,
            native_bf16=run.device.native_bf16,
            host_ram_known=run.host_ram_bytes is not None,
            small_chunks=sizes is not None,
        )
        # Updates in the backward pass need steps of one micro-batch.
        smaller = () if run.setting.train.optimizer_in_backward else budgets_of(run) if sizes is None else sizes
        found = [[*smaller], *([*self._options_of(switch, support)] for switch in SWITCHES)]
        found = [[one for one in options if wanted(one.flags)] for options in found]
        alone = [one for options in found for one in options if self._keeps_rules(one.flags)]
        self._alone = {id(one) for one in alone}
        """Identities of the options that the rules accept alone; the others need one of another switch beside them."""
        tried = [[one for one in some if id(one) in self._alone or self._is_helped(one, alone)] for some in found]
        self._options = [[unchanged, *self._possible(options)] for options in tried]
        self._apart = self._incompatible()
        self.unchanged = Candidate(options=(unchanged,) * len(found), run=run, slowdown=1.0)

    def allows(self, flags: tuple[str, ...]) -> bool:
        """Whether overrides are wanted and keep the rules."""
        return self._wanted(flags) and self._keeps_rules(flags)

    def of_effect(self, effect: int) -> list[Candidate]:
        """Every combination with this effect, in the order in which to try them."""
        chosen: list[tuple[Option, ...]] = [()]
        for options in self._options:
            known = [(one, self._apart.get(id(one), frozenset())) for one in options if one.effect <= effect]
            chosen = [(*some, one) for some in chosen for one, apart in known if apart.isdisjoint(map(id, some))]
        of_effect = (
            options for options in chosen if max((one.effect for one in options if one.flags), default=-1) == effect
        )
        kept = (options for options in of_effect if self.allows(_flags_of(options)))
        fitting = (candidate for candidate in map(self._candidate, kept) if self._fits_host(candidate))
        return sorted(fitting, key=lambda candidate: candidate.order)

    def _incompatible(self) -> Mapping[int, frozenset[int]]:
        """By the identity of an option, the identities of those of earlier switches that it is not combined with."""
        found: dict[int, set[int]] = {}
        for earlier, later in combinations(self._options, 2):
            for a, b in product(earlier[1:], later[1:]):
                both = {id(a), id(b)} <= self._alone  # Of others, a third one may be what the rules ask for.
                if not _are_apart(a, b) and (not both or self._keeps_rules(_flags_of((a, b)))):
                    continue
                found.setdefault(id(b), set()).add(id(a))
        return {one: frozenset(others) for one, others in found.items()}

    def _is_helped(self, option: Option, others: Iterable[Option]) -> bool:
        """Whether the rules accept an option beside one of the others."""
        beside = (other for other in others if other.switch != option.switch and not _are_apart(option, other))
        return any(self._keeps_rules(_flags_of((option, other))) for other in beside)

    def _fits_host(self, candidate: Candidate) -> bool:
        """Whether the host has memory for what is offloaded."""
        there = self.run.host_ram_bytes
        return there is None or self.costs.offloaded_bytes(candidate.run.setting)[0] <= there

    def _options_of(self, switch: Switch, support: Support) -> Iterator[Option]:
        """The options of a switch, each stronger than the one before."""
        run = self.run
        variants = (different(run.setting, variant) for variant in switch.lighter(run.setting, support))
        number = 0  # Of those that the rules accept alone: the others change no order.
        for level, values in enumerate(filter(None, variants), 1):
            other_optimizer = switch.one_micro_batch and "train.optimizer" in values
            option = Option(
                switch=switch.name,
                flags=flags_of(values),
                values=values,
                effect=max(
                    switch.effect,
                    UNCLIPPED if "train.max_grad_norm" in values else SAME,
                    ROUNDED if other_optimizer else SAME,
                ),
                ease=switch.ease + number,
                level=level,
                run=run,
                note=PAGED_NOTE if other_optimizer else "",
            )
            if switch.one_micro_batch:
                packed = [*_of_one_micro_batch(option)]
                # Of a lighter variant the smallest steps: levels are one order.
                yield from packed[-1:] if number else packed
            else:
                yield option
            number += self._keeps_rules(option.flags)

    def _possible(self, options: Iterable[Option]) -> Iterator[Option]:
        """The options that this model supports."""
        for option in options:
            setting = setting_with(self.run.setting, option.values)
            try:
                refuse_parts(setting.train, self.run.config)
                self.costs.least_bytes(setting)
            except UserError:  # Its heads or layers cannot be split so, or its rows exclude the option.
                continue
            yield option

    def _candidate(self, options: tuple[Option, ...]) -> Candidate:
        """The combination of options. At most one of them changes the micro-batches."""
        values = {key: value for option in options for key, value in option.values.items()}
        resized = next((option.run for option in options if option.run is not self.run), self.run)
        setting = setting_with(resized.setting, values)
        if setting.layout.pipeline != self.run.setting.layout.pipeline:
            changed = in_stages(resized, setting)
        else:  # Fewer groups of GPUs train different rows.
            micro_batches = resized.micro_batches_per_step * setting.layout.context / self.run.setting.layout.context
            if micro_batches != self.run.micro_batches_per_step:
                setting = replace(setting, accumulates_gradients=micro_batches > 1)
            changed = replace(resized, setting=setting, micro_batches_per_step=micro_batches)
        work = math.prod(option.work for option in options)
        return Candidate(options=options, run=changed, slowdown=work * self.costs.slowdown(changed))


def _are_apart(a: Option, b: Option) -> bool:
    """Whether two options of different switches exclude each other, or set one parameter to different values."""
    excludes = {switch.name: switch.excludes for switch in SWITCHES}
    apart = b.switch in excludes.get(a.switch, ()) or a.switch in excludes.get(b.switch, ())
    return apart or {*a.flags, *b.flags} != {*_flags_of((a, b))}


def _flags_of(options: Iterable[Option]) -> tuple[str, ...]:
    """All overrides in the order of the options. If two set one parameter, the last one counts."""
    last = {flag.partition("=")[0]: flag for option in options for flag in option.flags}
    return tuple(last.values())


def _of_one_micro_batch(option: Option) -> Iterator[Option]:
    """The option with every step packed into one micro-batch, and then with smaller steps too."""
    run = option.run
    try:
        refuse_packed_rows(run.config, run.longest)
    except UserError:
        return
    yield _packed_steps(option)
    tokens = max(run.bucket.max_tokens - run.longest, run.longest)
    if tokens < run.setting.train.step_tokens:
        smaller = replace(
            option,
            flags=(f"train.tokens_per_step={tokens}", *option.flags),
            effect=SMALLER_STEPS,
            ease=option.ease + 1,
            level=option.level + 1,
            run=replace(run, setting=run.setting.with_train(tokens_per_step=tokens), tokens_per_step=float(tokens)),
        )
        yield _packed_steps(smaller)


def _packed_steps(option: Option) -> Option:
    """The option with every step packed into one micro-batch that has room for the largest step."""
    run, flags, bucket = option.run, option.flags, option.run.bucket
    # A step ends with the row that reaches its tokens.
    max_tokens = run.setting.train.step_tokens - 1 + run.longest
    if bucket.mode == "packed" and bucket.max_tokens >= max_tokens:
        max_tokens = bucket.max_tokens
    else:
        flags = (f"bucket.max_tokens={max_tokens}", *flags)
    if bucket.mode != "packed":
        flags = ("bucket.mode=packed", *flags)
    bucket = bucket.model_copy(update={"mode": "packed", "max_tokens": max_tokens})
    packed = replace(
        run,
        steps=((full_batch(bucket, run.longest, run.setting.train.row_kind),),),
        bucket=bucket,
        micro_batches_per_step=1,
    )
    return replace(option, flags=flags, run=packed)


def part_of_bucket(bucket: Bucket, longest: int, parts: int) -> Values:
    """What divides micro-batches by `parts`; nothing if that leaves no row, or no room for one of `longest` tokens."""
    rows, tokens = bucket.fixed_rows // parts, bucket.max_tokens // parts
    if bucket.mode == "fixed":
        return {"bucket.fixed_rows": rows} if rows else {}
    return {"bucket.max_tokens": tokens} if tokens >= longest else {}


def budgets_of(run: Run) -> Iterator[Option]:
    """Halve micro-batches down to the longest row, then halve the longest row."""
    steps: TracedSteps = run.steps
    bucket, level, parts, fixed = run.bucket, 0, 1, run.bucket.mode == "fixed"
    while (fewer := halved(steps)) is not None:
        for option in _within_less(run, steps, 2 * parts):
            level += 1
            yield replace(option, level=level)
        steps, parts = fewer, 2 * parts
        sizes = part_of_bucket(bucket, run.longest, parts)
        if not sizes:
            break
        level += 1
        smaller = replace(
            run,
            steps=steps,
            bucket=bucket.model_copy(update={key.removeprefix("bucket."): value for key, value in sizes.items()}),
            micro_batches_per_step=run.micro_batches_per_step * parts,
        )
        yield Option(flags=flags_of(sizes), effect=SAME, ease=0, level=level, run=smaller)
    length = run.longest // 2 // ROW_MULTIPLE * ROW_MULTIPLE
    if measures_of(run.attached):  # Shorter rows would cut it, and such rows are left out.
        yield from _smaller_rows(run, level)
        return
    while length >= SHORTEST_ROW_TOKENS and not fixed:
        level += 1
        flags = (f"data.max_length={length}", f"bucket.max_tokens={length}")
        shorter = _shorter_rows(run, length)
        yield Option(flags=flags, effect=LESS_DATA, ease=HARDEST, level=level, run=shorter)
        length = length // 2 // ROW_MULTIPLE * ROW_MULTIPLE


def _within_less(run: Run, steps: TracedSteps, parts: int) -> Iterator[Option]:
    """Micro-batches with a part of what rows carry besides tokens, for each measure of it; those of text stay.

    Nothing without several such rows in one.
    """

    def carries(shape: BatchShape) -> bool:
        return any(one.of_rows for one in shape.attached)

    def with_fewer(shape: BatchShape) -> BatchShape:
        found = halved(((shape,),)) if carries(shape) else None
        return shape if found is None else found[0][0]

    if not any(carries(shape) and shape.rows > 1 for step in steps for shape in step):
        return
    for measure in measures_of(run.attached):
        most = max(int(measure.values.max()), run.most[measure.limit] // parts)
        smaller = replace(
            run,
            steps=tuple(tuple(map(with_fewer, step)) for step in steps),
            bucket=run.bucket.model_copy(update={measure.limit: most}),
            micro_batches_per_step=run.micro_batches_per_step * parts,
        )
        yield Option(flags=(f"bucket.{measure.limit}={most}",), effect=SAME, ease=0, level=0, run=smaller)


def _smaller_rows(run: Run, level: int) -> Iterator[Option]:
    """Make what full rows carry smaller, as long as a model makes less of it; tokens of planned rows would change."""
    size = run.full_row.size
    for each in run.full_row.lighter(run.params.data):
        try:
            smaller = remade(run, with_flags(run.params, (each,)))
        except UserError:  # The family has no such limit, or it is below the least.
            return
        if smaller.full_row.size < size:
            level, size = level + 1, smaller.full_row.size
            work = smaller.longest / run.longest
            yield Option(flags=(each,), effect=SMALLER_PARTS, ease=HARDEST, level=level, run=smaller, work=work)


def _shorter_rows(run: Run, length: int) -> Run:
    """The run with rows of at most `length` tokens, one per micro-batch."""

    def shortened(shape: BatchShape) -> BatchShape:
        unit = shape.kind.unit
        joined = None if shape.packed_lengths is None else (length,) * unit
        rows, length_of_rows = (unit, length) if joined is None else (1, unit * length)
        supervised = min(shape.supervised, unit * length)
        return replace(shape, rows=rows, length=length_of_rows, supervised=supervised, packed_lengths=joined)

    return replace(
        run,
        steps=tuple(tuple(map(shortened, step)) for step in run.steps),
        bucket=run.bucket.model_copy(update={"max_tokens": length}),
        longest=length,
        micro_batches_per_step=run.tokens_per_step * run.setting.layout.context / length,
    )
