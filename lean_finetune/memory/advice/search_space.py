"""The changes that advice tries: every option of every switch, their combinations, and what each does to learning."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from lean_finetune.config.optimizers import OPTIMIZERS
from lean_finetune.core.errors import UserError
from lean_finetune.memory.advice import config_variants
from lean_finetune.memory.advice.workload import Costs, Workload, full_batch
from lean_finetune.memory.predict.setting import Setting
from lean_finetune.memory.predict.traced_shapes import TracedSteps, halved
from lean_finetune.model.model_config import refuse_joined_rows
from lean_finetune.step.batches import BatchShape

SAME, ROUNDED, UNCLIPPED, SMALLER_STEPS, OTHER_WEIGHTS, LESS_DATA = range(6)
EFFECTS = (
    "changes nothing that is learnt",
    "rounds otherwise: the loss may differ a little",
    "gradients are not clipped",
    "steps of fewer rows, whose gradients are not clipped",
    "trains other weights",
    "rows are cut shorter",
)
"""What each class does to learning."""
LOSS_CHUNK_TOKENS = 512
"""The chunk offered where none is set, and no smaller one: logits are then a small part."""
SHORTEST_ROW_TOKENS = 64
ROW_MULTIPLE = 8
SWITCHES = (
    "micro_batch",
    "activations",
    "loss_chunk",
    "optimizer",
    "state",
    "sharing",
    "precision",
    "method",
    "in_backward",
)
"""What is varied, in the order of a line's flags."""
OF_FULL = ("state", "in_backward")
"""Switches of full training: what another method trains is too small for them."""
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
        return max((option.effect for option in self.options if option.flags), default=SAME)

    @property
    def order(self) -> tuple[int, int, int, int]:
        """By which candidates are tried."""
        eases = [option.ease for option in self.options if option.flags]
        return (self.effect, round(self.slowdown / SAME_SPEED), max(eases), len(eases))

    def strength(self, switch: str) -> int:
        """How far along a switch it goes."""
        return self.options[SWITCHES.index(switch)].strength

    def covers(self, other: "Candidate") -> bool:
        """Whether this one goes at least as far as the other on every switch."""
        return all(a.strength >= b.strength for a, b in zip(self.options, other.options, strict=True))


class Space:
    """The options of every switch, and their combinations."""

    def __init__(self, run: Workload, costs: Costs, native_bf16: bool):
        """Look for options once; `native_bf16` says whether the device offers precision bf16."""
        self._run, self._costs = run, costs
        self._plain = Option(flags=(), effect=SAME, ease=0, strength=0, run=run)
        found = _options(run, costs.cuda, native_bf16)
        self._switches = [[self._plain, *found.get(switch, ())] for switch in SWITCHES]

    @property
    def unchanged(self) -> Candidate:
        """The run as it is."""
        return Candidate(options=(self._plain,) * len(SWITCHES), run=self._run, slowdown=1.0)

    def of_effect(self, effect: int) -> list[Candidate]:
        """Every combination of this class, in the order in which they are tried."""
        within = [[option for option in options if option.effect <= effect] for options in self._switches]
        chosen = (
            options
            for options in product(*within)
            if max((o.effect for o in options if o.flags), default=-1) == effect and _compatible(options)
        )
        return sorted(map(self._candidate, chosen), key=lambda candidate: candidate.order)

    def _candidate(self, options: tuple[Option, ...]) -> Candidate:
        """The combination of options."""
        changed = _combined(self._run, options)
        return Candidate(options=options, run=changed, slowdown=self._costs.slowdown(changed))


def _options(run: Workload, cuda: bool, native_bf16: bool) -> dict[str, Sequence[Option]]:
    """The options of each switch that has any, each further along it than the one before."""
    setting, found = run.setting, dict[str, Sequence[Option]]()
    # Updates in backward need steps of one micro-batch.
    found["micro_batch"] = () if setting.optimizer_in_backward else tuple(budgets_of(run))
    found["activations"] = _in_turn(run, config_variants.lighter_activations(setting, cuda=cuda), SAME, 1)
    if setting.loss_chunk is None:
        chunked = replace(setting, loss_chunk=LOSS_CHUNK_TOKENS)
        found["loss_chunk"] = _in_turn(run, [(chunked, (f"train.loss_chunk={LOSS_CHUNK_TOKENS}",))], SAME, 4)
    if (lighter := OPTIMIZERS[setting.optimizer].lighter) is not None:
        small = replace(setting, optimizer=lighter)
        found["optimizer"] = _in_turn(run, [(small, (f"train.optimizer={lighter}",))], ROUNDED, 5)
    found["state"] = _in_turn(run, config_variants.lighter_state(setting, cuda=cuda), SAME, 8)
    found["sharing"] = _in_turn(run, config_variants.lighter_sharing(setting, cuda=cuda), SAME, 9)
    if setting.model.precision == "fp32" and (native_bf16 or setting.model.adapted):  # Full weights stay fp32 in fp16.
        half = config_variants.with_precision(setting, "bf16" if native_bf16 else "fp16")
        found["precision"] = _in_turn(run, [half], ROUNDED, 6)
    methods = [config_variants.with_method(setting, method) for method in config_variants.LIGHTER[setting.model.method]]
    found["method"] = _in_turn(run, methods, OTHER_WEIGHTS, 7)
    found["in_backward"] = tuple(_updated_in_backward(run))
    return found


def _compatible(options: tuple[Option, ...]) -> bool:
    """Whether no two of them set one parameter to different values, and each has an effect beside the others."""
    by_switch = dict(zip(SWITCHES, options, strict=True))
    if by_switch["method"].flags and any(by_switch[switch].flags for switch in OF_FULL):
        return False
    if by_switch["in_backward"].flags and by_switch["micro_batch"].flags:
        return False
    values: dict[str, str] = {}
    flags = (flag.split("=", 1) for option in options for flag in option.flags)
    return all(values.setdefault(key, value) == value for key, value in flags)


def _in_turn(
    run: Workload, settings: Sequence[tuple[Setting, tuple[str, ...]]], effect: int, ease: int
) -> list[Option]:
    """Options of one switch, from settings and their flags, each further along it than the one before."""
    return [
        Option(flags=flags, effect=effect, ease=ease + k, strength=1 + k, run=replace(run, setting=setting))
        for k, (setting, flags) in enumerate(settings)
    ]


def _combined(run: Workload, options: Sequence[Option]) -> Workload:
    """A run with all options: one of them at most changes micro-batches, the others one part of the setting each."""
    model, setting = run.setting.model, run.setting
    for option in options:
        other = option.run.setting
        changed = {k: v for k, v in vars(other.model).items() if v != getattr(run.setting.model, k)}
        model = replace(model, **changed)
        changed = {k: v for k, v in vars(other).items() if k != "model" and v != getattr(run.setting, k)}
        setting = replace(setting, **changed)
    cut = next((option.run for option in options if option.run.steps is not run.steps), run)
    return replace(cut, setting=replace(setting, model=model))


def _updated_in_backward(run: Workload) -> Iterator[Option]:
    """Updates in backward: steps of one micro-batch, of joined rows; where steps are large, of smaller steps too."""
    changed = config_variants.updated_in_backward(run.setting)
    if changed is None or not _can_be_joined(run):
        return
    setting, flags = changed
    effect = SAME if run.setting.max_grad_norm is None else UNCLIPPED
    yield _whole_steps(replace(run, setting=setting), flags, effect, strength=1)
    tokens = max(run.max_tokens - run.longest, run.longest)
    if tokens < run.unpadded_tokens_per_step:
        smaller = replace(run, setting=setting, unpadded_tokens_per_step=tokens, tokens_per_step=float(tokens))
        yield _whole_steps(smaller, (f"train.tokens_per_step={tokens}", *flags), SMALLER_STEPS, strength=2)


def _whole_steps(run: Workload, flags: tuple[str, ...], effect: int, *, strength: int) -> Option:
    """Every step one micro-batch of joined rows, with as many tokens as a step can have."""
    max_tokens = run.most_step_tokens
    if run.mode == "packed" and run.max_tokens >= max_tokens:
        max_tokens = run.max_tokens
    else:
        flags = (f"bucket.max_tokens={max_tokens}", *flags)
    if run.mode != "packed":
        flags = ("bucket.mode=packed", *flags)
    whole = full_batch("packed", run.longest, max_tokens=max_tokens, fixed_rows=run.fixed_rows)
    joined = replace(run, steps=((whole,),), mode="packed", max_tokens=max_tokens, micro_batches_per_step=1)
    return Option(flags=flags, effect=effect, ease=9 + strength, strength=strength, run=joined)


def _can_be_joined(run: Workload) -> bool:
    """Whether bucket.mode=packed is possible for the model."""
    try:
        refuse_joined_rows(run.config, run.longest)
    except UserError:
        return False
    return True


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
