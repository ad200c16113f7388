"""Conversions of another tool's keys into parameters of this one, and what is said about them."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from math import ceil, isfinite
from pathlib import Path
from typing import Any

from cuda_memory.units import counted, labelled, round_up
from lean_finetune.commands.convert.layer_patterns import adapted_parts, is_pattern, names_of
from lean_finetune.config.other_tools import Table, shared
from lean_finetune.config.schema import Preference
from lean_finetune.core.errors import UserError
from lean_finetune.images.image_family import Size
from lean_finetune.islands.objectives.registry import OBJECTIVES, SFT


@dataclass
class Converted:
    """A configuration in our parameters, and what became of each of its keys."""

    tool: str
    values: dict[str, Any] = field(default_factory=dict)
    """By dotted key."""
    used: dict[str, str] = field(default_factory=dict)
    """By key of the tool: the parameter that it sets."""
    differs: list[str] = field(default_factory=list)
    """What is done otherwise here."""
    ignored: dict[str, list[str]] = field(default_factory=dict)
    """Keys by the reason."""
    unknown: list[str] = field(default_factory=list)
    keys: dict[str, Any] = field(default_factory=dict)
    """The configuration's own values by dotted key, with the tool's defaults."""
    image: Size | None = None
    """The assumed size of images, if rows have some."""
    template_text: str = ""
    """A chat template whose text stands in the configuration: `import` writes it into a file."""
    adapted_parts: set[str] = field(default_factory=set)
    """Parts for images, vision and projector, whose layers have adapters by their names."""

    def say(self, difference: str) -> None:
        """Note what is done otherwise here, once."""
        if difference not in self.differs:
            self.differs.append(difference)

    def ignore(self, key: str, reason: str) -> None:
        """List a key as ignored, no longer as used."""
        self.used.pop(key, None)
        listed = self.ignored.setdefault(reason, [])
        listed += [key] if key not in listed else []

    def flags(self) -> list[str]:
        """The parameters as overrides."""
        return [f"{key}={json.dumps(value, default=str)}" for key, value in self.values.items()]

    def lines(self) -> Iterator[str]:
        """What became of each key, for people: first what means something else here."""
        yield f"from a configuration of {self.tool}"
        for text in self.differs:
            yield labelled("  different here", text)
        if self.unknown:
            yield labelled("  not known", f"{', '.join(self.unknown)} (no effect here)")
        for key, ours in self.used.items():
            value = json.dumps(self.values[ours], default=str) if ours in self.values else ""
            yield labelled("  used", f"{key} → {ours}{f'={value}' if value else ''}")
        for reason, keys in self.ignored.items():
            yield labelled("  ignored", f"{', '.join(keys)} ({reason})")

    def summary(self) -> str:
        """How many keys mean the same here, and what does not, in one text."""
        ignored = sum(map(len, self.ignored.values()))
        unknown = f", not known: {', '.join(map(str, self.unknown))}" if self.unknown else ""
        different = counted(len(self.differs), "difference")
        return f"{len(self.used)} used, {different}, {ignored} without effect here{unknown}; --keys lists them"


# Values of other tools in the types of our parameters.

Conversion = Callable[[str, Any, Converted], Any]
"""Of a key, its value and the result so far to the value here. Raises ValueError, whose text is the rule."""


def _number(key: str, value: Any, converted: Converted) -> float:
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        with suppress(ValueError):
            return float(value)
    raise ValueError("must be a number")


def _whole(key: str, value: Any, converted: Converted) -> int:
    if not (number := _number(key, value, converted)).is_integer():
        raise ValueError("must be a whole number")
    return int(number)


def _count(key: str, value: Any, converted: Converted) -> float:
    number = _number(key, value, converted)
    return int(number) if number.is_integer() else number


def _positive(key: str, value: Any, converted: Converted) -> int:
    if (number := _whole(key, value, converted)) < 1:
        raise ValueError("must be at least 1")
    return number


def _epochs(key: str, value: Any, converted: Converted) -> int:
    epochs = _number(key, value, converted)
    if not isfinite(epochs):
        raise ValueError("must be a finite number")
    if (whole := max(1, ceil(epochs))) != epochs:
        converted.differs.append(f"{key}={value}: whole passes only, so {whole}")
    return whole


def _share(key: str, value: Any, converted: Converted) -> float:
    if (share := _number(key, value, converted)) < 1:
        return share
    converted.differs.append(f"{key}={value} is a number of rows; data.heldout_fraction is a share: 0.05")
    return 0.05


def _targets(key: str, value: Any, converted: Converted) -> list[str]:
    if value in ("all", "all-linear", ["all"], ["all-linear"]):
        converted.adapted_parts |= {"vision", "projector"}
        return ["all-linear"]
    if isinstance(value, str) and is_pattern(value):
        found = names_of(value)
        converted.adapted_parts |= set(adapted_parts(found))
        return sorted({name.rpartition(".")[2] for name in found})
    if isinstance(value, list):
        converted.adapted_parts |= set(adapted_parts([str(name) for name in value])) | {"vision"}
    return _names(key, value, converted)


def _names(key: str, value: Any, converted: Converted) -> list[str]:
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list):
        raise ValueError("must be names of layers")
    return [str(name).strip() for name in names]


def _one_adapter(key: str, value: Any, converted: Converted) -> str:
    found = value.split(",") if isinstance(value, str) else value
    if not (isinstance(found, list) and len(found) == 1 and isinstance(found[0], str)):
        raise ValueError("must be one adapter")
    return found[0].rstrip("/")


def _data_sets(key: str, value: Any, converted: Converted) -> list[Any]:
    listed = value.split(",") if isinstance(value, str) else value
    if not isinstance(listed, list) or not all(isinstance(entry, str | Mapping) for entry in listed):
        raise ValueError("must be names of data sets")
    return [entry.strip() if isinstance(entry, str) else entry for entry in listed]


def _text(key: str, value: Any, converted: Converted) -> str:
    if not isinstance(value, str):
        raise ValueError("must be a text")
    return value


def _max_norm(key: str, value: Any, converted: Converted) -> float | None:
    return _number(key, value, converted) or None


def _switch(key: str, value: Any, converted: Converted) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def _model(key: str, value: Any, converted: Converted) -> str:
    return _text(key, value, converted).rstrip("/")


PARAMETERS: Mapping[str, Conversion] = {
    "train.epochs": _epochs,
    "data.heldout_fraction": _share,
    "train.lora.targets": _targets,
    "train.lora.modules_to_save": _names,
    "train.max_grad_norm": _max_norm,
    "model.name": _model,
    "train.lr": _number,
    "train.weight_decay": _number,
    "train.warmup_fraction": _number,
    "train.lora.dropout": _number,
    **dict.fromkeys([f"train.preference.{name}" for name in Preference.model_fields], _number),
    "train.lora.alpha": _whole,
    "train.lora.rank": _whole,
    "train.lora.experts": lambda key, value, converted: "all",
    "train.context_parallel": _positive,
    **dict.fromkeys(("data.image_max_pixels", "data.image_min_pixels"), _positive),
    "data.max_rows": _positive,
}
"""By parameter."""
FACTS: Mapping[str, Conversion] = {
    **dict.fromkeys(("length", "rows", "accumulation", "step_rows"), _positive),
    **dict.fromkeys(("warmup_steps", "max_steps"), _count),
    **dict.fromkeys(("dataset", "eval_dataset"), _data_sets),
    **dict.fromkeys(("component", "dataset_dir", "chat_template", "template_text"), _text),
    **dict.fromkeys(("freeze_vision", "freeze_projector", "freeze_language", "freeze_parts"), _switch),
    **dict.fromkeys(("packing", "padded", "no_grad_ckpt", "mlp_targets", "offload"), _switch),
    "attention_targets": _targets,
    "start": _one_adapter,
}
"""By fact of the tables."""


# Parameters that several keys of another tool's configuration decide together.

LENGTH, PAD_MULTIPLE = 4096, 8
"""Row length where a configuration has none, and the padding of fit_params.yaml."""
METHOD_OF_BITS = {4: "qlora", 8: "int8_lora"}
MLP_LAYERS = ["gate_proj", "up_proj", "down_proj"]
LAYER_NAMES = {"output_proj": "o_proj"}
"""torchtune's names of layers that differ from transformers'."""
SHARDING = (
    ("z3|zero3|zero_3|stage3|full_shard", "zero3"),
    ("z2|zero2|zero_2|shard_grad_op", "zero2"),
    ("z1|zero1", "zero1"),
)
"""Parts of a name or value that say how GPUs share a run."""


def combine_facts(facts: Mapping[str, Any], converted: Converted, table: Table, gpus: int, path: Path) -> None:
    """Set the parameters that several keys decide together."""
    values = converted.values
    method = values["train.method"] = _method(facts, table, path)
    if method == "full":
        for key in [key for key in values if key.startswith(("train.lora.", "train.quant."))]:
            del values[key]
    else:
        _combine_adapter(facts, values, table)
    _combine_precision(facts, values, method, path)
    _combine_batches(facts, converted, table, gpus)
    _combine_sharding(facts, converted, gpus)
    if facts.get("no_grad_ckpt"):
        values["train.grad_ckpt"] = False
    elif "no_grad_ckpt" in {
        rule["fact"] for rule in table["keys"].values() if isinstance(rule, dict) and "fact" in rule
    }:
        values.setdefault("train.grad_ckpt", True)
    if values.get("train.optimizer_in_backward"):
        values["train.max_grad_norm"] = None
    if "train.lr" not in values and "lr_of" in table:
        values["train.lr"] = table["lr_of"]["full" if method == "full" else "adapter"]
    for name in ("warmup_steps", "max_steps"):
        value = facts.get(name)
        if name == "warmup_steps" and value is not None and 0 < float(value) < 1:
            values["train.warmup_fraction"] = float(value)
        elif value is not None and float(value) > 0:
            ours = shared()["facts"][name]
            converted.differs.append(
                f"{name} of {value}: here {ours}, which does not count steps; set it for your data"
            )


def _method(facts: Mapping[str, Any], table: Table, path: Path) -> str:
    """train.method."""
    component = str(facts.get("component", "")).rpartition(".")[2]
    adapter = facts.get("adapter", "lora" if facts.get("adapted_layers") else "full")
    if component.startswith(("qlora_", "lora_")):
        adapter = "lora"
    bits = 4 if component.startswith("qlora_") else facts.get("bits")
    if adapter == "full" and table.get("bits_of_adapters"):
        bits = None
    if adapter == "qlora":
        if bits != 4:
            raise UserError(f"{path}: adapter: qlora needs load_in_4bit: true, in {table['tool']} too; add it")
        adapter = "lora"
    if adapter == "full" and bits is not None:
        raise UserError(f"{path}: weights in {bits} bits cannot be trained themselves; add an adapter (lora)")
    return METHOD_OF_BITS.get(int(bits), "lora") if bits is not None else str(adapter)


def _combine_adapter(facts: Mapping[str, Any], values: dict[str, Any], table: Table) -> None:
    """Rank, alpha and targets."""
    if "train.lora.rank" in values and "train.lora.alpha" not in values and "alpha_per_rank" in table:
        values["train.lora.alpha"] = table["alpha_per_rank"] * values["train.lora.rank"]
    if "adapted_layers" in facts:
        values["train.lora.targets"] = facts["adapted_layers"]
    if "attention_targets" in facts:
        names = [LAYER_NAMES.get(name, name) for name in facts["attention_targets"]]
        values["train.lora.targets"] = [*names, *(MLP_LAYERS if facts.get("mlp_targets") else [])]


def _combine_precision(facts: Mapping[str, Any], values: dict[str, Any], method: str, path: Path) -> None:
    """train.precision. Mixed precision with method full trains fp32 weights: here 16-bit weights with an fp32 copy."""
    stored = {
        "bfloat16": "bf16",
        "bf16": "bf16",
        "float16": "fp16",
        "fp16": "fp16",
        "float32": "fp32",
        "fp32": "fp32",
    }.get(str(facts.get("dtype")))
    bf16, fp16 = facts.get("bf16"), facts.get("fp16")
    if (bf16, fp16) == ("bf16", "fp16"):
        raise UserError(f"{path}: fp16: must be one precision; got bf16 and fp16; remove one")
    mixed = fp16 or (bf16 if bf16 in ("bf16", "auto") else None)
    if mixed is not None:
        values["train.precision"] = mixed
        values["train.master_weights"] = method == "full" and mixed == "bf16" and stored != "bf16"
    elif stored is not None:
        torchtune_adapter = stored == "bf16" and method != "full" and "component" in facts
        values["train.precision"] = "pure_bf16" if torchtune_adapter else stored
    elif bf16 is not None:
        values["train.precision"] = "fp16" if method == "int8_lora" else bf16  # As Axolotl does.


def _combine_batches(facts: Mapping[str, Any], converted: Converted, table: Table, gpus: int) -> None:
    """Lengths, micro-batches and the tokens of a step."""
    values = converted.values
    length = facts.get("length", LENGTH)
    if "length" not in facts:
        converted.differs.append(f"no limit on the length of rows: {LENGTH} tokens are assumed; --length sets another")
    padded = round_up(length, PAD_MULTIPLE)
    different = max(1, gpus // values.get("train.context_parallel", 1))  # GPUs that train different rows.
    rows, per_row = facts.get("rows", 1), OBJECTIVES[values.get("train.objective", SFT)].kind.unit
    of_step = facts.get("step_rows", table.get("rows_of_step", 1))
    steps = facts.get("accumulation", max(1, ceil(of_step / rows / different)))
    values["data.max_length"] = length
    tokens = rows * per_row * padded
    values["bucket.max_tokens"] = tokens
    values["train.tokens_per_step"] = tokens * steps * different
    values["bucket.mode"] = "packed" if facts.get("packing") else "bucketed"
    size = f"{rows} pair{'s' * (rows > 1)} of 2 x {padded}" if per_row > 1 else f"{rows} x {padded}"
    converted.differs.append(
        f"rows count as full: {size} tokens in a micro-batch, {values['train.tokens_per_step']} in a step"
    )
    if steps > 1 and values.get("train.optimizer_in_backward"):
        values["train.optimizer_in_backward"] = False


def _combine_sharding(facts: Mapping[str, Any], converted: Converted, gpus: int) -> None:
    """How GPUs share the run, and what is on the host."""
    values, text = converted.values, str(facts.get("sharding", "")).lower()
    found = next((sharding for pattern, sharding in SHARDING if re.search(pattern, text)), None)
    sharding = found or ("zero3" if facts.get("sharding") and "z0" not in text else "ddp")
    if gpus > 1:
        values |= {"hardware.num_gpus": gpus, "train.sharding": sharding}
    elif found:
        converted.differs.append(
            f"{facts['sharding']} shares a run between GPUs; this answer is for one: --gpus sets more"
        )
    if facts.get("offload") or "offload" in text:
        values["train.offload"] = "parameters" if gpus > 1 and sharding == "zero3" else "optimizer"
