"""Parameters that several keys of another tool's configuration decide together."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lean_finetune.commands.convert.converted import Converted
from lean_finetune.commands.convert.dataset_info import FILE, find_dataset_info, read_sources
from lean_finetune.config.other_tools import Table, shared
from lean_finetune.core.errors import UserError
from lean_finetune.core.units import round_up
from lean_finetune.pinning.hub import HUB_ID

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
    method = values["train.method"] = _method(facts, path)
    if method == "full":
        for key in [key for key in values if key.startswith(("train.lora.", "train.quant."))]:
            del values[key]
    else:
        _combine_adapter(facts, values, table)
    _combine_precision(facts, values, method)
    _combine_batches(facts, converted, gpus)
    _combine_sharding(facts, converted, gpus)
    if facts.get("no_grad_ckpt"):
        values["train.grad_ckpt"] = False
    elif "no_grad_ckpt" in {
        rule["fact"] for rule in table["keys"].values() if isinstance(rule, dict) and "fact" in rule
    }:
        values.setdefault("train.grad_ckpt", True)
    if values.get("train.optimizer_in_backward"):
        values["train.max_grad_norm"] = None
    _combine_data(facts, converted, path)
    if values.get("data.heldout_fraction") == 0 and "data.heldout_source" not in values:
        values |= {"train.heldout_every_steps": None, "evaluate.generate_rows": 0}
    for name in ("warmup_steps", "max_steps"):
        value = facts.get(name)
        if name == "warmup_steps" and value is not None and 0 < float(value) < 1:
            values["train.warmup_fraction"] = float(value)
        elif value is not None and float(value) > 0:
            ours = shared()["facts"][name]
            converted.differs.append(
                f"{name} of {value}: here {ours}, which does not count steps; set it for your data"
            )


def _method(facts: Mapping[str, Any], path: Path) -> str:
    """train.method."""
    component = str(facts.get("component", "")).rpartition(".")[2]
    adapter = facts.get("adapter", "full")
    if component.startswith(("qlora_", "lora_")):
        adapter = "lora"
    bits = 4 if component.startswith("qlora_") else facts.get("bits")
    if adapter == "full" and bits is not None:
        raise UserError(f"{path}: weights in {bits} bits cannot be trained themselves; add an adapter (lora)")
    return METHOD_OF_BITS.get(int(bits), "lora") if bits is not None else str(adapter)


def _combine_adapter(facts: Mapping[str, Any], values: dict[str, Any], table: Table) -> None:
    """Rank, alpha and targets."""
    if "train.lora.rank" in values and "train.lora.alpha" not in values and "alpha_per_rank" in table:
        values["train.lora.alpha"] = table["alpha_per_rank"] * values["train.lora.rank"]
    if "attention_targets" in facts:
        names = [LAYER_NAMES.get(name, name) for name in facts["attention_targets"]]
        values["train.lora.targets"] = [*names, *(MLP_LAYERS if facts.get("mlp_targets") else [])]


def _combine_precision(facts: Mapping[str, Any], values: dict[str, Any], method: str) -> None:
    """train.precision. Mixed precision with method full trains fp32 weights: here 16-bit weights with an fp32 copy."""
    stored = {
        "bfloat16": "bf16",
        "bf16": "bf16",
        "float16": "fp16",
        "fp16": "fp16",
        "float32": "fp32",
        "fp32": "fp32",
    }.get(str(facts.get("dtype")))
    mixed = facts.get("mixed")
    if mixed is not None:
        values["train.precision"] = mixed
        values["train.master_weights"] = method == "full" and mixed == "bf16" and stored != "bf16"
    elif stored is not None:
        torchtune_adapter = stored == "bf16" and method != "full" and "component" in facts
        values["train.precision"] = "pure_bf16" if torchtune_adapter else stored


def _combine_batches(facts: Mapping[str, Any], converted: Converted, gpus: int) -> None:
    """Lengths, micro-batches and the tokens of a step."""
    values = converted.values
    length = int(facts.get("length") or LENGTH)
    if not facts.get("length"):
        converted.differs.append(f"no limit on the length of rows: {LENGTH} tokens are assumed; --length sets another")
    padded = round_up(length, PAD_MULTIPLE)
    rows, steps = int(facts.get("rows", 1)), int(facts.get("accumulation") or 1)
    different = max(1, gpus // int(values.get("train.context_parallel") or 1))  # GPUs that train different rows.
    values["data.max_length"] = length
    values["bucket.max_tokens"] = rows * padded
    values["train.tokens_per_step"] = rows * padded * steps * different
    values["bucket.mode"] = "packed" if facts.get("packing") else "bucketed"
    converted.differs.append(
        f"rows count as full: {rows} x {padded} tokens in a micro-batch, {values['train.tokens_per_step']} in a step"
    )
    if int(facts.get("accumulation") or 1) > 1 and values.get("train.optimizer_in_backward"):
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


def _combine_data(facts: Mapping[str, Any], converted: Converted, path: Path) -> None:
    """data.source and data.heldout_source, and the limit of rows, which is one for each data set there."""
    values = converted.values
    for fact, ours in (("dataset", "data.source"), ("eval_dataset", "data.heldout_source")):
        listed = facts.get(fact) or []
        listed = [name.strip() for name in listed.split(",")] if isinstance(listed, str) else listed
        entries = [entry if isinstance(entry, Mapping) else {"path": entry} for entry in listed]
        names = [str(entry.get("path") or entry.get("id")) for entry in entries]
        info = find_dataset_info(str(facts["dataset_dir"]), path) if "dataset_dir" in facts else None
        if info is not None and names:
            sources, ignored = read_sources(names, info, facts.get("stage", "sft"))
            unread = values.get("data.ignore_columns", ignored)
            values["data.ignore_columns"] = [column for column in ignored if column in unread]
        elif all(HUB_ID.fullmatch(name) or Path(name).exists() for name in names):
            sources = [_source(name, entry) for name, entry in zip(names, entries, strict=True)]
        else:
            sources = []
            missing = f", and there is no {facts['dataset_dir']}/{FILE}" if "dataset_dir" in facts else ""
            converted.differs.append(f"data: {', '.join(names)} has no path here{missing}; set {ours} to your rows")
        if sources:
            values[ours] = sources[0]["source"] if [*sources[0]] == ["source"] and len(sources) == 1 else sources
        else:
            converted.used = {key: name for key, name in converted.used.items() if name != ours}
    if "data.heldout_source" in values:
        values["data.heldout_fraction"] = 0
    elif "data.source" in values and "data.heldout_fraction" not in values:
        converted.differs.append("a share of the rows is held out to evaluate on: data.heldout_fraction")
    if isinstance(values.get("data.source"), list) and "data.max_rows" in values:
        most = values.pop("data.max_rows")
        converted.used = {key: ours.replace("max_rows", "source.rows") for key, ours in converted.used.items()}
        for source in values["data.source"]:
            source["rows"] = min(most, source.get("rows", most))


def _source(name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """An entry of `data.source` for a path or a hub data set."""
    named = {"config": entry.get("name") or entry.get("config"), "split": entry.get("split")}
    return {
        "source": name if Path(name).exists() else f"hf://{name}",
        **{key: value for key, value in named.items() if value},
    }
