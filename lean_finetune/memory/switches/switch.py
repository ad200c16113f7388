"""What a memory switch is."""

import json
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Literal

from lean_finetune.islands.tower import TOWER
from lean_finetune.memory.trace.setting import Setting

Values = Mapping[str, Any]
"""Values by dotted key of params.yaml."""
SAME, ROUNDED, UNCLIPPED, SMALLER_STEPS, OTHER_WEIGHTS, SMALLER_PARTS, LESS_DATA = range(7)
EFFECTS = (
    "same training result",
    "different rounding: the loss may differ slightly",
    "no gradient clipping",
    "smaller optimizer steps without gradient clipping",
    "trains different weights",
    f"changes the data: {TOWER.smaller}",
    "rows are truncated to fewer tokens",
)
"""Effects on learning, the least harmful first."""


@dataclass(frozen=True, kw_only=True)
class Support:
    """What the device can do."""

    cuda: bool
    native_bf16: bool
    host_ram_known: bool = False
    """RAM of the host may be what is missing."""
    small_chunks: bool = False
    """Small chunks of the loss are worth trying: the search has time for them."""


Variants = Callable[[Setting, Support], Iterable[Values]]
"""Values to try for a setting. Values equal to the setting's own are ignored, and those that a rule refuses."""


@dataclass(frozen=True, kw_only=True)
class Switch:
    """A way to change the memory of a run. `memory/switches/all_switches.py` lists all of them."""

    name: str
    parameters: tuple[str, ...]
    """Dotted keys that it owns: `("train.method",)`. Its variants may reset keys of other switches too."""
    lighter: Variants
    """Variants for advice, each with less memory than the one before."""
    shown: Variants = lambda setting, support: ()
    """Variants for switches.csv, heavier ones too."""
    effect: int
    """Index in EFFECTS."""
    ease: int
    """Rank of the first variant, 1 is the easiest. It decides between candidates of equal speed."""
    excludes: frozenset[str] = frozenset()
    """Names of switches that it is not combined with."""
    one_micro_batch: bool = False
    """Needs optimizer steps of a single micro-batch."""
    saves: str | None = None
    """Memory category that it reduces, if it is only one: it can never save more than all of that category."""
    changes_states: bool = True
    """Changes the bytes of weights, gradients or optimizer state."""
    other_memory: Literal["same", "not less", "unknown"] = "unknown"
    """Memory besides these states and `saves`, compared with a weaker variant. A safe default for a new switch."""
    words: Callable[[Setting], Mapping[str, str]] = lambda setting: {}
    """What it does in a run, in words by what they are about; nothing where it is off. For `lean-finetune plan`."""
    time: Callable[[Setting, float], float] = lambda setting, more_micro_batches: 1.0
    """Assumed factor on the time of a step, if `step_cost` does not compute what the switch costs.

    The second argument is the number of micro-batches relative to the run without changes.
    """


PLACES = {"cpu": "the host", "disk": "disk"}
"""Where something is offloaded to, in words."""


def flags_of(values: Values) -> tuple[str, ...]:
    """Overrides for `dvc exp run -S`."""
    return tuple(f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in values.items())


def set_options(flags: Iterable[str]) -> str:
    """Overrides as command-line options."""
    return shlex.join(word for flag in flags for word in ("-S", flag))


def different(setting: Setting, values: Values) -> Values:
    """The values that differ from the values of a setting."""
    return {key: value for key, value in values.items() if attrgetter(key)(setting) != value}


def setting_with(setting: Setting, values: Values) -> Setting:
    """The setting with other values of section `train`."""
    train = setting.train
    for key, value in values.items():
        train = train.with_value(key.removeprefix("train."), value)
    return replace(setting, train=train)
