"""What would make a run fit: combinations of changes, the least harmful first, then the fastest.

Changes come in classes by what they do to learning. Within the first class that holds a way to fit, and on into the
next ones until enough are found (shorter rows only where nothing else is), combinations are tried in the order of their
predicted slow-down; ties go by how easy a change is, from the token budget to shorter rows. States alone rule out what
cannot fit; the strongest combination of a class is traced first, and where that does not fit, the class is left.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from tqdm import tqdm

from stages.estimate import neighbours
from stages.estimate.kernels import Target
from stages.estimate.predict import Setting, predict
from stages.estimate.shapes import TracedSteps, halved
from stages.estimate.workload import Costs, Workload
from stages.step.batches import BatchShape
from stages.units import GIB

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
MOST_FOUND = 4
MOST_TRACES = 14
"""So that the search over an 8B model stays below a minute on one core."""
ADVICE_COLUMNS = ["command", "peak_gib", "slowdown", "effect"]
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
class Remedy:
    """Changes with which the run fits."""

    flags: tuple[str, ...]
    peak_bytes: int
    slowdown: float
    """Times as long a token takes, predicted."""
    effect: str
    """What it does to learning."""

    @property
    def command(self) -> str:
        """The line to run."""
        return f"dvc exp run {self.switches}"

    @property
    def switches(self) -> str:
        """Its flags as they are given."""
        return " ".join(f"-S {flag}" for flag in self.flags)

    def as_json(self) -> dict[str, Any]:
        """As advice.json holds it."""
        return {
            "command": self.command,
            "peak_bytes": self.peak_bytes,
            "slowdown": round(self.slowdown, 2),
            "effect": self.effect,
        }

    def as_row(self) -> dict[str, Any]:
        """As advice.csv holds it."""
        return {
            "command": self.command,
            "peak_gib": round(self.peak_bytes / GIB, 3),
            "slowdown": round(self.slowdown, 2),
            "effect": self.effect,
        }


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


def advise(
    run: Workload, costs: Costs, target: Target, *, usable_bytes: int, native_bf16: bool, progress: bool
) -> list[Remedy]:
    """The best few changes with which a run fits; none where none is found.

    `native_bf16` says whether the device offers precision bf16; `progress` shows a bar on standard error.
    """
    search = _Search(target, costs, usable_bytes, progress)
    candidates = sorted(_candidates(run, costs, native_bf16), key=lambda candidate: candidate.order)
    with search.bar:
        for effect in range(len(EFFECTS)):
            of_class = [candidate for candidate in candidates if candidate.effect == effect]
            if of_class and search.open and not (effect == LESS_DATA and search.found):
                search.look_through(of_class)
    return search.found


class _Search:
    """Traces candidates and keeps those that fit."""

    def __init__(self, target: Target, costs: Costs, usable_bytes: int, progress: bool):
        self._target, self._costs, self._usable = target, costs, usable_bytes
        self._peaks: dict[tuple[str, ...], int] = {}
        self._traced: list[Candidate] = []
        self._fitting: list[Candidate] = []
        self.bar = tqdm(total=MOST_TRACES, desc="advice", unit=" traces", disable=not progress)

    @property
    def open(self) -> bool:
        """Whether more may be looked for."""
        return len(self._fitting) < MOST_FOUND and len(self._peaks) < MOST_TRACES

    @property
    def found(self) -> list[Remedy]:
        """What fits, in the order of candidates."""
        return [
            Remedy(flags=c.flags, peak_bytes=self._peaks[c.flags], slowdown=c.slowdown, effect=EFFECTS[c.effect])
            for c in sorted(self._fitting, key=lambda candidate: candidate.order)
        ]

    def look_through(self, candidates: Sequence[Candidate]) -> None:
        """Find those of a class that fit and do no more than needed."""
        strongest = max(candidates, key=lambda c: [option.strength for option in c.options])
        strongest = max(candidates, key=lambda c: (sum(c.covers(other) for other in candidates), c is strongest))
        if not self._fits(strongest):
            return
        before = len(self._fitting)
        for candidate in candidates:
            if not self.open:
                break
            if not any(candidate.covers(other) for other in self._fitting) and self._fits(candidate):
                self._fitting.append(candidate)
        if len(self._fitting) == before and not any(strongest.covers(other) for other in self._fitting):
            self._fitting.append(strongest)

    def _fits(self, candidate: Candidate) -> bool:
        """Whether a candidate fits, traced where neither states alone nor another candidate's trace tell."""
        if candidate.flags not in self._peaks:
            if self._floor(candidate) > self._usable:
                return False
            run = candidate.run
            self._peaks[candidate.flags] = predict(run.config, run.setting, run.steps, self._target).peak.bytes
            self._traced.append(candidate)
            self.bar.update()
        return self._peaks[candidate.flags] <= self._usable

    def _floor(self, candidate: Candidate) -> int:
        """Bytes that a candidate holds at least.

        Its states; and, where one that differs in the optimizer alone was traced, that peak less what the states save:
        the optimizer changes nothing else.
        """
        states = self._costs.least_bytes(candidate.run.setting)
        floors = [states]
        for other in self._traced:
            same = replace(other.run.setting, optimizer=candidate.run.setting.optimizer) == candidate.run.setting
            if same and other.run.steps == candidate.run.steps:
                floors.append(self._peaks[other.flags] - self._costs.least_bytes(other.run.setting) + states)
        return max(floors)


def _candidates(run: Workload, costs: Costs, native_bf16: bool) -> Iterator[Candidate]:
    """Every combination of the switches' options but the run as it is."""
    model = run.setting.model
    plain = Option(flags=(), effect=SAME, ease=0, strength=0, run=run)
    # Updates in backward need steps of one micro-batch.
    switches = [[plain, *(() if run.setting.optimizer_in_backward else _budgets(run))]]
    switches.append([plain, *_in_turn(run, neighbours.lighter_activations(run.setting, cuda=costs.cuda), SAME, 1)])
    if run.setting.loss_chunk is None:
        chunked = replace(run.setting, loss_chunk=LOSS_CHUNK_TOKENS)
        switches.append([plain, *_in_turn(run, [(chunked, (f"train.loss_chunk={LOSS_CHUNK_TOKENS}",))], SAME, 4)])
    if run.setting.optimizer in ("adamw", "adamw_foreach"):
        small = replace(run.setting, optimizer="adamw_8bit")
        switches.append([plain, *_in_turn(run, [(small, ("train.optimizer=adamw_8bit",))], ROUNDED, 5)])
    switches.append([plain, *_in_turn(run, neighbours.lighter_state(run.setting, cuda=costs.cuda), SAME, 8)])
    switches.append([plain, *_in_turn(run, neighbours.lighter_sharing(run.setting), SAME, 9)])
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


def _budgets(run: Workload) -> Iterator[Option]:
    """Smaller micro-batches by halves down to the longest row, then shorter rows by halves."""
    steps: TracedSteps = run.steps
    strength, parts = 0, 1
    while (fewer := halved(steps)) is not None:
        steps = fewer
        parts *= 2
        flag = f"bucket.fixed_rows={run.fixed_rows // parts}"
        if run.mode != "fixed":
            if run.max_tokens // parts < run.longest:
                break
            flag = f"bucket.max_tokens={run.max_tokens // parts}"
        elif run.fixed_rows // parts < 1:
            break
        strength += 1
        smaller = replace(run, steps=steps, micro_batches_per_step=run.micro_batches_per_step * parts)
        yield Option(flags=(flag,), effect=SAME, ease=0, strength=strength, run=smaller)
    if run.mode == "fixed":
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
        longest=length,
        micro_batches_per_step=run.tokens_per_step / length,
    )
    flags = (f"data.max_length={length}", f"bucket.max_tokens={length}")
    return Option(flags=flags, effect=LESS_DATA, ease=9, strength=strength, run=shorter)
