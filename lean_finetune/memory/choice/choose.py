"""Choose what is trained and the fastest memory switches for it; what a device lacks if nothing fits."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

from transformers import PretrainedConfig

from cuda_memory.gpus import Device
from lean_finetune.config.field_types import Method
from lean_finetune.config.load import with_flags
from lean_finetune.config.schema import Params
from lean_finetune.core.errors import UserError
from lean_finetune.memory.advice.search import Fitting
from lean_finetune.memory.advice.search_space import Candidate
from lean_finetune.memory.advice.what_fits import LENGTH_STEP, generation, longest_fitting_row, smallest_gpu
from lean_finetune.memory.choice.fastest import MOST_CHOICES, FastestSets
from lean_finetune.memory.choice.plain_run import Start, plain_start
from lean_finetune.memory.predict.assumed_rows import TEXT_ROWS, AssumedRows
from lean_finetune.memory.switches.all_switches import LIGHTER_METHODS
from lean_finetune.memory.switches.switch import ROUNDED, UNCLIPPED
from lean_finetune.plan.optimizer_steps import RowIndex

BEST: tuple[Method, ...] = ("full", "lora", "qlora")
"""Best quality first: all weights, adapters on exact weights, adapters on rounded weights."""


@dataclass(frozen=True, kw_only=True)
class Lost:
    """A method that was tried and is not taken."""

    method: Method
    why: str | None
    """Why it is refused; None if it does not fit."""
    least_bytes: int
    """The least that any set of switches needs, as far as known."""
    most_bytes: int
    """The most with which it would fit."""


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The answer."""

    choices: Sequence[Fitting]
    """The best few sets, best first; empty if nothing fits."""
    start: Start
    """The plain run of the method that was chosen or tried last."""
    lost: Sequence[Lost]
    """Methods with better quality that do not fit."""
    sets: FastestSets
    assumed: AssumedRows
    """Those of every row that was predicted."""

    @property
    def method(self) -> Method:
        """What is trained."""
        return self.start.run.setting.train.method

    def settings(self, choice: Fitting) -> dict[str, str]:
        """The overrides of the user's parameters that lead to a set, by key."""
        return dict(text.split("=", 1) for text in (*self.start.flags, *choice.flags))


def choose(
    p: Params,
    config: PretrainedConfig,
    device: Device,
    methods: Sequence[Method],
    fixed: Collection[str],
    index: RowIndex | None,
    most: int = MOST_CHOICES,
    assumed: AssumedRows = TEXT_ROWS,
) -> Chosen:
    """The fastest sets, `most` of them, of the first of `methods` that fits.

    Parameters in `fixed` keep their values. Of several methods, one that moves weights or optimizer state to the host
    is taken only if none fits without that. `index`: the rows; None means full ones of data.max_length. Those that are
    predicted carry what is `assumed`.

    Raises:
        UserError: the model, the device or a parameter does not suit the only method.
    """
    lost: list[Lost] = []
    last: FastestSets | None = None
    for on_device in (True, False) if len(methods) > 1 else (False,):
        for method in methods if on_device or len(methods) == 1 else methods[-1:]:
            try:
                start = plain_start(p, config, device, method, fixed, index, assumed)
            except UserError as error:
                if len(methods) == 1:
                    raise
                lost.append(Lost(method=method, why=str(error), least_bytes=0, most_bytes=0))
                continue
            last = FastestSets(start, partial(_wanted, fixed, on_device))
            if last.find(ROUNDED if on_device else UNCLIPPED, most):
                return Chosen(choices=last.found, start=start, lost=lost, sets=last, assumed=assumed)
            least_bytes, most_bytes = least_needed(last)
            lost.append(Lost(method=method, why=None, least_bytes=least_bytes, most_bytes=most_bytes))
    if last is None:
        raise UserError(lost[-1].why or "")
    return Chosen(choices=(), start=last.start, lost=lost, sets=last, assumed=assumed)


BF16_UPDATES = {"train.master_weights": "false", "train.optimizer": "adamw_8bit", "train.offload": "none"}
"""Updates of bf16 weights themselves: an eighth of the bytes of fp32 master weights with adamw, and no host."""


def faster_with_bf16_updates(chosen: Chosen, fixed: Collection[str], index: RowIndex | None) -> Chosen | None:
    """The fastest set that updates bf16 weights on the GPU, where a full fine-tune updates fp32 ones on the host.

    None if there is no such set, or what it changes is in `fixed`.
    """
    run = chosen.start.run
    train = chosen.choices[0].run.setting.train if chosen.choices else run.setting.train
    if not train.master_weights or train.offload == "none" or fixed & BF16_UPDATES.keys():
        return None
    p = with_flags(run.params, [f"{key}={value}" for key, value in BF16_UPDATES.items()], check=False)
    found = choose(
        p, run.config, run.device, (chosen.method,), {*fixed, *BF16_UPDATES}, index, most=1, assumed=chosen.assumed
    )
    return found if found.choices else None


def _wanted(fixed: Collection[str], on_device: bool, flags: tuple[str, ...]) -> bool:
    """Whether overrides keep what the user named, and the device."""
    values = dict(text.split("=", 1) for text in flags)
    return not (fixed & values.keys() or (on_device and values.get("train.offload", "none") != "none"))


def least_needed(sets: FastestSets) -> tuple[int, int]:
    """The least bytes that any combination needs, as far as known, and the most with which it would fit."""
    least = min(_candidates(sets), key=lambda one: known_bytes(sets, one) / sets.most_bytes(one))
    return known_bytes(sets, least), sets.most_bytes(least)


def known_bytes(sets: FastestSets, one: Candidate) -> int:
    """The traced peak of a combination, or its lower bound."""
    traced = sets.traced.get(one.flags)
    return sets.bound(one) if traced is None else traced[1].bytes


def _candidates(sets: FastestSets) -> list[Candidate]:
    return [one for group in sets.groups.values() for one in group]


@dataclass(frozen=True, kw_only=True)
class WouldDo:
    """What would make a model fit that does not."""

    peak_bytes: int
    """Of the set that needs the least."""
    gpu: str | None
    """The smallest known GPU on which that set fits."""
    length: int | None
    """Tokens of the longest row with which it fits here; None if not even the shortest does."""


def what_would_do(chosen: Chosen) -> WouldDo:
    """The smallest GPU and the longest row for the set that needs the least memory."""
    sets = chosen.sets
    least = min(_candidates(sets), key=lambda one: (sets.bound(one) / sets.most_bytes(one), -one.total_level))
    run, peak_bytes, fitting = least.run, sets.peak_bytes(least), sets.most_bytes(least)
    near = {0: sets.costs.least_bytes(run.setting), least.most_tokens: peak_bytes}
    longest = longest_fitting_row(run, fitting, near).value if near[0] <= fitting else 0
    return WouldDo(
        peak_bytes=peak_bytes,
        gpu=smallest_gpu(run, {generation(run.device): peak_bytes}),
        length=longest if LENGTH_STEP <= longest < run.longest else None,
    )


def lighter_that_fits(chosen: Chosen, fixed: Collection[str], index: RowIndex | None) -> Chosen | None:
    """The answer for the best method with less memory than the one that does not fit; None if none fits."""
    run = chosen.start.run
    for method in LIGHTER_METHODS[chosen.method] if "train.method" not in fixed else ():
        found = choose(run.params, run.config, run.device, (method,), fixed, index, most=1, assumed=chosen.assumed)
        if found.choices:
            return found
    return None
