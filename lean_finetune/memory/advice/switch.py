"""A memory switch: which parameters it varies, the values to try, and what they do to learning."""

import json
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from lean_finetune.config.section import Section
from lean_finetune.memory.predict.setting import Setting

Values = Mapping[str, Any]
"""Values by dotted key of params.yaml."""
SAME, ROUNDED, UNCLIPPED, SMALLER_STEPS, OTHER_WEIGHTS, LESS_DATA = range(6)
EFFECTS = (
    "same training result",
    "different rounding: the loss may differ slightly",
    "no gradient clipping",
    "smaller optimizer steps without gradient clipping",
    "trains different weights",
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


Variants = Callable[[Setting, Support], Iterable[Values]]
"""Values to try for a setting. Values equal to the setting's own are ignored."""


@dataclass(frozen=True, kw_only=True)
class Switch:
    """A way to change the memory of a run. `memory/advice/switches.py` lists all of them."""

    name: str
    parameters: tuple[str, ...]
    """Dotted keys that it varies: `("train.method",)`."""
    lighter: Variants
    """Variants for advice, each with less memory than the one before."""
    shown: Variants = lambda setting, support: ()
    """Variants for switches.csv, heavier ones too."""
    effect: int
    """Index in EFFECTS."""
    ease: int
    """Rank from easy to hard of the first variant. It decides between candidates of equal speed."""
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
    time: Callable[[Setting, float], float] = lambda setting, more_micro_batches: 1.0
    """Assumed factor on the time of a step, if `step_cost` does not compute what the switch costs.

    The second argument is the number of micro-batches relative to the run without changes.
    """


def flag(key: str, value: Any) -> str:
    """An override for `dvc exp run -S`."""
    return f"{key}={value if isinstance(value, str) else json.dumps(value)}"


def set_options(flags: Iterable[str]) -> str:
    """Overrides as command-line options."""
    return shlex.join(word for flag in flags for word in ("-S", flag))


def replace_attribute(owner: Any, path: str, value: Any) -> Any:
    """A copy of nested dataclasses and sections with another value of one attribute: that of a dotted key."""
    name, _, rest = path.partition(".")
    changes = {name: replace_attribute(getattr(owner, name), rest, value) if rest else value}
    return owner.model_copy(update=changes) if isinstance(owner, Section) else replace(owner, **changes)
