"""The changes that advice tries: every option of every switch, their combinations, and what each does to learning."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from stages.estimate import neighbours
from stages.estimate.predict import Setting
from stages.estimate.shapes import TracedSteps, halved
from stages.estimate.workload import Costs, Workload
from stages.step.batches import BatchShape

SAME, ROUNDED, OTHER_WEIGHTS, LESS_DATA = range(4)
EFFECTS = (
    "changes nothing that is learnt",
    "rounds otherwise: the loss may differ a little",
    "trains other weights",
    "rows are cut shorter",
)
"""What each class does to learning."""
LOSS_CHUNK_TOKENS = 512
"""The chunk offered where none is set, and no smaller one: logits are then a small part."""
SHORTEST_ROW_TOKENS = 64
ROW_MULTIPLE = 8
SAME_SPEED = 0.005
"""Slow-downs closer than this are a tie: the model of speed knows no better."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """One way to set one switch."""

    flags: tuple[str, ...]
    """What `dvc exp run -S` takes; empty: as it is."""
    effect: int
    """Class of what it does to learning."""
    ease: int
    """Place in the order from easy to hard."""
    strength: int
    """How far along its switch: more takes less memory."""
    run: Workload
    """The run with this option alone."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A combination of options."""

    options: tuple[Option, ...]
    """One of each switch."""
    run: Workload
    slowdown: float

    @property
    def flags(self) -> tuple[str, ...]:
        """All flags, easy ones first; of a flag given twice the last one."""
        last = {flag.partition("=")[0]: flag for option in self.options for flag in option.flags}
        return tuple(last.values())

    @property
    def effect(self) -> int:
        """Class of the change that touches learning most."""
        return max(option.effect for option in self.options if option.flags)

    @property
    def order(self) -> tuple[int, int, int, int]:
        """By which candidates are tried."""
        eases = [option.ease for option in self.options if option.flags]
        return (self.effect, round(self.slowdown / SAME_SPEED), max(eases), len(eases))

    def covers(self, other: "Candidate") -> bool:
        """Whether this one goes at least as far as the other on every switch."""
        return all(a.strength >= b.strength for a, b in zip(self.options, other.options, strict=True))


def candidates_of(run: Workload, costs: Costs, native_bf16: bool) -> Iterator[Candidate]:
    """Every combination of the switches' options but the run as it is."""
    model = run.setting.model
    plain = Option(flags=(), effect=SAME, ease=0, strength=0, run=run)
    # Updates in backward need steps of one micro-batch.
    switches = [[plain, *(() if run.setting.optimizer_in_backward else budgets_of(run))]]
    switches.append([plain, *_in_turn(run, neighbours.lighter_activations(run.setting, cuda=costs.cuda), SAME, 1)])
    if run.setting.loss_chunk is None:
        chunked = replace(run.setting, loss_chunk=LOSS_CHUNK_TOKENS)
        switches.append([plain, *_in_turn(run, [(chunked, (f"train.loss_chunk={LOSS_CHUNK_TOKENS}",))], SAME, 4)])
    if run.setting.optimizer in ("adamw", "adamw_foreach"):
        small = replace(run.setting, optimizer="adamw_8bit")
        switches.append([plain, *_in_turn(run, [(small, ("train.optimizer=adamw_8bit",))], ROUNDED, 5)])
    switches.append([plain, *_in_turn(run, neighbours.lighter_state(run.setting, cuda=costs.cuda), SAME, 8)])
    switches.append([plain, *_in_turn(run, neighbours.lighter_sharing(run.setting, cuda=costs.cuda), SAME, 9)])
    if model.precision == "fp32" and (native_bf16 or model.adapted):  # Full weights stay fp32 under fp16.
        half = neighbours.with_precision(run.setting, "bf16" if native_bf16 else "fp16")
        switches.append([plain, *_in_turn(run, [half], ROUNDED, 6)])
    methods = [neighbours.with_method(run.setting, method) for method in neighbours.LIGHTER[model.method]]
    switches.append([plain, *_in_turn(run, methods, OTHER_WEIGHTS, 7)])
    for options in product(*switches):
        if any(option.flags for option in options):
            changed = _combined(run, options)
            yield Candidate(options=options, run=changed, slowdown=costs.slowdown(changed))


def _in_turn(
    run: Workload, settings: Sequence[tuple[Setting, tuple[str, ...]]], effect: int, ease: int
) -> list[Option]:
    """Options of one switch, from settings and their flags, each further along it than the one before."""
    return [
        Option(flags=flags, effect=effect, ease=ease + k, strength=1 + k, run=replace(run, setting=setting))
        for k, (setting, flags) in enumerate(settings)
    ]


def _combined(run: Workload, options: Sequence[Option]) -> Workload:
    """A run with all options: the budget's is first, the others change one part of the setting each."""
    model, setting = run.setting.model, run.setting
    for option in options:
        other = option.run.setting
        changed = {k: v for k, v in vars(other.model).items() if v != getattr(run.setting.model, k)}
        model = replace(model, **changed)
        changed = {k: v for k, v in vars(other).items() if k != "model" and v != getattr(run.setting, k)}
        setting = replace(setting, **changed)
    return replace(options[0].run, setting=replace(setting, model=model))


def budgets_of(run: Workload) -> Iterator[Option]:
    """Smaller micro-batches by halves down to the longest row, then shorter rows by halves."""
    steps: TracedSteps = run.steps
    strength, parts, fixed = 0, 1, run.mode == "fixed"
    while (fewer := halved(steps)) is not None:
        steps = fewer
        parts *= 2
        flag = f"bucket.fixed_rows={run.fixed_rows // parts}"
        if not fixed:
            if run.max_tokens // parts < run.longest:
                break
            flag = f"bucket.max_tokens={run.max_tokens // parts}"
        elif run.fixed_rows // parts < 1:
            break
        strength += 1
        smaller = replace(
            run,
            steps=steps,
            max_tokens=run.max_tokens if fixed else run.max_tokens // parts,
            fixed_rows=run.fixed_rows // parts if fixed else run.fixed_rows,
            micro_batches_per_step=run.micro_batches_per_step * parts,
        )
        yield Option(flags=(flag,), effect=SAME, ease=0, strength=strength, run=smaller)
    if fixed:
        return
    length = run.longest // 2 // ROW_MULTIPLE * ROW_MULTIPLE
    while length >= SHORTEST_ROW_TOKENS:
        strength += 1
        yield _shorter(run, length, strength)
        length = length // 2 // ROW_MULTIPLE * ROW_MULTIPLE


def _shorter(run: Workload, length: int, strength: int) -> Option:
    """Rows of at most this length, one in a micro-batch."""

    def cut(shape: BatchShape) -> BatchShape:
        joined = None if shape.joined_lengths is None else (length,)
        return BatchShape(rows=1, length=length, supervised=min(shape.supervised, length), joined_lengths=joined)

    shorter = replace(
        run,
        steps=tuple(tuple(cut(shape) for shape in step) for step in run.steps),
        max_tokens=length,
        longest=length,
        micro_batches_per_step=run.tokens_per_step / length,
    )
    flags = (f"data.max_length={length}", f"bucket.max_tokens={length}")
    return Option(flags=flags, effect=LESS_DATA, ease=9, strength=strength, run=shorter)
