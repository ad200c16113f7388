"""Changes of another tool's own keys with which its run fits there: the least harmful first, then the fastest.

All changes of the least harmful effects are tried together. If the run fits with them, each is taken back that is not
needed, the one that slows most first. A more harmful effect is tried if nothing fits without it, or if it makes the run
faster. Slowdowns are those of the same changes here, by the cost model: the tool's own times are not known.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

from lean_finetune.core.errors import UserError
from lean_finetune.memory.advice.as_tool import AsTool, predict_as_tool
from lean_finetune.memory.advice.run import Run
from lean_finetune.memory.advice.search import FASTER
from lean_finetune.memory.advice.step_cost import Costs
from lean_finetune.memory.switches.switch import EFFECTS, LESS_DATA, OTHER_WEIGHTS, ROUNDED, SAME
from lean_finetune.memory.tool_step.tools import Keys

MOST_OFFERS = 3
SHORTEST = 512
"""Tokens of a row below which it is not shortened."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """Values of some of a tool's keys."""

    about: str
    """What is changed: a combination has at most one change of it. Later ones of a tool need less memory."""
    keys: Keys
    effect: int = SAME
    """Index in EFFECTS."""


def _one(about: str, key: str, value: Any, effect: int = SAME) -> Change:
    return Change(about=about, keys={key: value}, effect=effect)


AXOLOTL_ADAPTER: Keys = {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "lora_target_linear": True}
"""What an adapter needs in a configuration without one."""
CUT_CROSS_ENTROPY = "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"
CHANGES: Mapping[str, Sequence[Change]] = {
    "TRL": (
        _one("loss", "loss_type", "chunked_nll"),
        _one("loss", "use_liger_kernel", True, ROUNDED),
        _one("checkpointing", "gradient_checkpointing", True),
        _one("offloading", "activation_offloading", True),
        _one("type", "dtype", "bfloat16", ROUNDED),
        _one("optimizer", "optim", "adamw_8bit", ROUNDED),
        _one("sharding", "deepspeed.zero_optimization.stage", 2),
        _one("sharding", "deepspeed.zero_optimization.stage", 3),
        Change(
            about="weights",
            keys={"use_peft": True, "load_in_4bit": True, "load_in_8bit": False},
            effect=OTHER_WEIGHTS,
        ),
    ),
    "LLaMA-Factory": (
        _one("loss", "enable_liger_kernel", True, ROUNDED),
        _one("checkpointing", "disable_gradient_checkpointing", False),
        Change(about="type", keys={"pure_bf16": True, "bf16": False, "fp16": False}, effect=ROUNDED),
        _one("optimizer", "optim", "adamw_8bit", ROUNDED),
        _one("sharding", "deepspeed", "examples/deepspeed/ds_z2_config.json"),
        _one("sharding", "deepspeed", "examples/deepspeed/ds_z3_config.json"),
        Change(about="weights", keys={"finetuning_type": "lora", "quantization_bit": 4}, effect=OTHER_WEIGHTS),
    ),
    "Axolotl": (
        Change(about="loss", keys={"plugins": [CUT_CROSS_ENTROPY], "cut_cross_entropy": True}, effect=ROUNDED),
        _one("checkpointing", "gradient_checkpointing", True),
        _one("offloading", "activation_offloading", True),
        _one("optimizer", "optimizer", "adamw_bnb_8bit", ROUNDED),
        _one("sharding", "deepspeed", "deepspeed_configs/zero2.json"),
        _one("sharding", "deepspeed", "deepspeed_configs/zero3_bf16.json"),
        Change(
            about="weights",
            keys={"adapter": "qlora", "load_in_4bit": True, "load_in_8bit": False},
            effect=OTHER_WEIGHTS,
        ),
    ),
    "torchtune": (
        _one("compile", "compile", True, ROUNDED),
        _one("checkpointing", "enable_activation_checkpointing", True),
        _one("offloading", "enable_activation_offloading", True),
        _one("optimizer", "optimizer._component_", "bitsandbytes.optim.AdamW8bit", ROUNDED),
    ),
    "LitGPT": (_one("weights", "quantize", "bnb.nf4-dq", OTHER_WEIGHTS),),
    "ms-swift": (
        _one("loss", "use_liger_kernel", True, ROUNDED),
        _one("checkpointing", "gradient_checkpointing", True),
        _one("optimizer", "optim", "adamw_8bit", ROUNDED),
        _one("sharding", "deepspeed", "zero2"),
        _one("sharding", "deepspeed", "zero3"),
        Change(
            about="weights",
            keys={"tuner_type": "lora", "quant_method": "bnb", "quant_bits": 4},
            effect=OTHER_WEIGHTS,
        ),
    ),
}
"""Keys of each tool that can save memory. Sharding is tried on several GPUs."""
ROW_KEYS: Mapping[str, tuple[str, str, str]] = {
    "TRL": ("per_device_train_batch_size", "gradient_accumulation_steps", "max_length"),
    "LLaMA-Factory": ("per_device_train_batch_size", "gradient_accumulation_steps", "cutoff_len"),
    "Axolotl": ("micro_batch_size", "gradient_accumulation_steps", "sequence_len"),
    "torchtune": ("batch_size", "gradient_accumulation_steps", "tokenizer.max_seq_len"),
    "LitGPT": ("train.micro_batch_size", "", "train.max_seq_length"),
    "ms-swift": ("per_device_train_batch_size", "gradient_accumulation_steps", "max_length"),
}
"""Keys for rows of a micro-batch, micro-batches of a step and tokens of a row. LitGPT's steps have a number of rows."""


def changes_of(tool: str, keys: Keys, gpus: int) -> list[Change]:
    """The changes that a configuration does not have yet, by the keys that it has."""
    found: list[Change] = []
    for change in CHANGES.get(tool, ()):
        wanted = _in_words_of(tool, change, keys)
        new = {key: value for key, value in wanted.items() if keys.get(key) != value and (keys.get(key) or value)}
        if new and _allows(change, keys, gpus) and all(other.keys != new for other in found):
            found.append(replace(change, keys=new))
    if tool in ROW_KEYS:
        found += _of_rows(*ROW_KEYS[tool], keys)
    return found


def _allows(change: Change, keys: Keys, gpus: int) -> bool:
    """Whether a configuration can have a change beside its other keys."""
    if change.about == "sharding":
        named = "deepspeed" in keys and "deepspeed" not in change.keys
        return gpus > 1 and not named and not any(key.startswith(("deepspeed.", "fsdp")) for key in keys)
    # Another class of torchtune's optimizer would get its arguments.
    return "optimizer._component_" not in change.keys or not {"optimizer.fused", "optimizer.foreach"} & keys.keys()


def _in_words_of(tool: str, change: Change, keys: Keys) -> Keys:
    """The keys of a change, as they stand beside those of a configuration."""
    wanted = dict(change.keys)
    if "dtype" in wanted and "torch_dtype" in keys:  # The older name of the same.
        wanted = {"torch_dtype": wanted["dtype"]}
    if isinstance(plugins := keys.get("plugins"), list) and "plugins" in wanted:
        wanted["plugins"] = [*plugins, *(one for one in wanted["plugins"] if one not in plugins)]
    if tool == "Axolotl" and change.about == "weights" and not keys.get("adapter"):
        wanted |= {key: value for key, value in AXOLOTL_ADAPTER.items() if key not in keys}
    return wanted


def _of_rows(rows_key: str, steps_key: str, length_key: str, keys: Keys) -> Iterator[Change]:
    """Fewer rows in a micro-batch with as many in a step, and shorter rows."""
    rows, steps, length = (keys.get(key) for key in (rows_key, steps_key, length_key))
    # torchtune does not add up gradients that are used in backward.
    if isinstance(rows, int) and not keys.get("optimizer_in_bwd"):
        for fewer in (number for number in range(rows - 1, 0, -1) if rows % number == 0):
            accumulated = {steps_key: steps * rows // fewer} if isinstance(steps, int) else {}  # Else it is computed.
            yield Change(about="rows", keys={rows_key: fewer, **accumulated})
    while isinstance(length, int) and length >= 2 * SHORTEST:
        length //= 2
        yield _one("length", length_key, length, LESS_DATA)


@dataclass(frozen=True, kw_only=True)
class ToolOffer:
    """Values of a tool's keys, and the run with them."""

    keys: Keys
    found: AsTool
    slowdown: float
    """Time per token relative to the configuration's, assumed as here."""
    effect: int

    def as_json(self) -> dict[str, Any]:
        """For `fit --json`."""
        return {
            "keys": self.keys,
            "peak_bytes": self.found.peak.bytes,
            "verdict": self.found.state,
            "slowdown": round(self.slowdown, 2),
            "effect": EFFECTS[self.effect],
        }


Variant = Callable[[Keys], tuple[Run, str, Keys]]
"""From changed keys to the run here, the tool and all of its keys. Raises UserError if the tool does not allow them."""
Chosen = tuple[int, ...]
"""Numbers of the changes of a combination, in ascending order."""


@dataclass(kw_only=True)
class ToolSearch:
    """Tries changes of a configuration, each combination once."""

    run: Run
    found: AsTool
    """The run as it is configured."""
    changes: Sequence[Change]
    variant: Variant
    traced: dict[Chosen, AsTool | None] = field(default_factory=dict)
    """None: the tool, its description or a trace refuses it."""

    def offers(self) -> list[ToolOffer]:
        """Combinations with which the run fits, the least harmful first; empty if there is none."""
        offers: list[ToolOffer] = []
        for effect in sorted({change.effect for change in self.changes}):
            if offers and effect >= OTHER_WEIGHTS:
                break
            chosen = self._fewest(self._strongest(effect))
            found = self.traced.get(chosen)
            if found is None or found.state != "fits":
                continue
            slowdown = self.slowdown(chosen)
            if not offers or slowdown < FASTER * offers[-1].slowdown:
                worst = max(self.changes[number].effect for number in chosen)
                offers.append(ToolOffer(keys=self._keys(chosen), found=found, slowdown=slowdown, effect=worst))
        return offers[:MOST_OFFERS]

    def best_alone(self) -> ToolOffer | None:
        """The change that alone lowers the peak most; None if none does."""
        alone = [(number,) for number in range(len(self.changes))]
        lower = [(found.peak.bytes, one) for one in alone if (found := self._trace(one)) is not None]
        if not lower or min(lower)[0] >= self.found.peak.bytes:
            return None
        _, best = min(lower)
        found = self.traced[best]
        assert found is not None
        effect = self.changes[best[0]].effect
        return ToolOffer(keys=self._keys(best), found=found, slowdown=self.slowdown(best), effect=effect)

    def slowdown(self, chosen: Chosen) -> float:
        """Time per token with a combination, relative to without: the product of those of its changes."""
        return prod(self._slowdowns.get(number, 1.0) for number in chosen)

    @cached_property
    def _slowdowns(self) -> Mapping[int, float]:
        """By number of a change, of those that can be made alone."""
        costs, found = Costs(self.run), {}
        for number, change in enumerate(self.changes):
            with suppress(UserError):
                found[number] = costs.slowdown(self.variant(change.keys)[0])
        return found

    def _strongest(self, effect: int) -> Chosen:
        """All changes up to an effect that the configuration allows, the last of each kind."""
        last: dict[str, int] = {}
        for number, change in enumerate(self.changes):
            if change.effect <= effect and number in self._slowdowns:
                last[change.about] = number
        return tuple(sorted(last.values()))

    def _fewest(self, chosen: Chosen) -> Chosen:
        """A combination without the changes that are not needed for the run to fit; itself if it does not fit."""
        if not self._fits(chosen):
            return chosen
        for number in sorted(chosen, key=lambda number: (-self._slowdowns[number], -self.changes[number].effect)):
            change = self.changes[number]
            weaker = [
                other
                for other in range(number)
                if self.changes[other].about == change.about
                and self.changes[other].effect <= change.effect
                and other in self._slowdowns
            ]
            for instead in ((), *((other,) for other in weaker)):
                lighter = tuple(sorted({*chosen, *instead} - {number}))
                if self._fits(lighter):
                    chosen = lighter
                    break
        return chosen

    def _fits(self, chosen: Chosen) -> bool:
        found = self._trace(chosen)
        return found is not None and found.state == "fits"

    def _trace(self, chosen: Chosen) -> AsTool | None:
        if not chosen:
            return self.found
        if chosen not in self.traced:
            try:
                found = predict_as_tool(*self.variant(self._keys(chosen)))
            except UserError:
                found = "refused"
            self.traced[chosen] = None if isinstance(found, str) else found
        return self.traced[chosen]

    def _keys(self, chosen: Chosen) -> Keys:
        """The keys of a combination together."""
        return {key: value for number in chosen for key, value in self.changes[number].keys.items()}
