"""All memory switches.

To add one: a parameter and its rules in `config/train_schema.py`, a `Switch` here (of activations and logits: in
`activation_switches.py`), and the code that acts on it. The table in docs/memory-switches.md, switches.csv and the
advice of estimate and `lean-finetune fit` read this list.
"""

from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any

from lean_finetune.config.field_types import Method, Precision, Sharding
from lean_finetune.config.optimizers import OPTIMIZERS
from lean_finetune.config.sharding_rules import GATHERED_LAYERS, SPLIT_WEIGHTS
from lean_finetune.memory.advice.activation_switches import ACTIVATION_SWITCHES
from lean_finetune.memory.advice.stages_switch import STAGES, with_stages
from lean_finetune.memory.advice.switch import (
    EFFECTS,
    OTHER_WEIGHTS,
    ROUNDED,
    SAME,
    Support,
    Switch,
    Values,
    replace_attribute,
)
from lean_finetune.memory.predict.setting import Setting

LIGHTER_METHODS: Mapping[Method, tuple[Method, ...]] = {
    "full": ("lora", "qlora"),
    "lora": ("qlora",),
    "int8_lora": ("qlora",),
    "qlora": (),
}
"""Methods with less memory than a method, the most similar first."""
LIGHTER_SHARDING: Mapping[Sharding, tuple[Sharding, ...]] = {
    "none": (),
    "ddp": ("zero1", "zero2", "zero3"),
    "zero1": ("zero2", "zero3"),
    "zero2": ("zero3",),
    "zero3": (),
    "hsdp": ("zero3",),
}
"""Modes with less memory per GPU than a mode, the most similar first."""
COMMUNICATION_TIME: Mapping[Sharding, float] = {"zero1": 1.02, "zero2": 1.05, "zero3": 1.10, "hsdp": 1.08}
"""Assumed factor on the time of a step: weights are communicated too, mostly while layers compute."""
DIVISIBLE: frozenset[Sharding] = frozenset({"ddp", "zero2", "zero3"})
"""Modes that share the parts of weights that tensor parallelism makes."""
NODE_DIVISORS = (2, 4, 8)
"""Numbers of GPUs of a node that advice lets compute a product together."""
EXCHANGE_TIME = 1.15
"""Assumed factor on the time of a step: tokens and heads are exchanged before and after attention of each layer."""


def _lighter_optimizer(setting: Setting, support: Support) -> Iterable[Values]:
    lighter = OPTIMIZERS[setting.optimizer].lighter
    return [] if lighter is None else [{"train.optimizer": lighter}]


def _lighter_offload(setting: Setting, support: Support) -> Iterable[Values]:
    """The optimizer in host memory. The optimizer state of adapters is too small to gain much."""
    optimizer = OPTIMIZERS[setting.optimizer]
    possible = not optimizer.foreach and not optimizer.paged
    if support.cuda and not setting.model.adapted and setting.offload == "none" and possible:
        yield {"train.offload": "optimizer"}


def _lighter_sharding(setting: Setting, support: Support) -> Iterable[Values]:
    """Modes with smaller shards; at last, weights and gradients in host memory too."""
    if setting.sharing is None or setting.sharing.gpus == 1:
        return
    mode, values, model = setting.sharing.spec.mode, {}, setting.model
    for lighter in LIGHTER_SHARDING[mode]:
        # 8-bit weights cannot be split. Optimizer state of adapters is too small to be worth dividing.
        unsplittable = lighter in SPLIT_WEIGHTS and model.method == "int8_lora"
        if not unsplittable and not (lighter == "zero1" and (model.adapted or setting.tensor_parallel > 1)):
            mode, values = lighter, {"train.sharding": lighter, "train.shard_group_gpus": None}
            yield values
    on_device = setting.offload != "parameters" and not OPTIMIZERS[setting.optimizer].paged
    if support.cuda and mode in GATHERED_LAYERS and on_device and setting.tensor_parallel == 1:
        yield {**values, "train.offload": "parameters"}


def _divided_rows(setting: Setting, support: Support) -> Iterable[Values]:
    """Each row divided among two GPUs, or among those of a usual node."""
    layout = None if setting.sharing is None else setting.sharing.spec.layout
    if layout is not None and layout.tensor == 1 and not setting.model.router_aux_loss:
        for context in sorted({2, min(NODE_DIVISORS[-1], layout.size)}):
            if context > layout.context and layout.size % context == 0:
                yield {"train.context_parallel": context}


def _exchange_time(setting: Setting, more_micro_batches: float) -> float:
    """Assumed time of a step relative to complete rows."""
    return EXCHANGE_TIME if setting.context > 1 else 1.0


def _communication_time(setting: Setting, more_micro_batches: float) -> float:
    """Assumed time of a step relative to ddp: the links between GPUs are unknown."""
    if setting.sharing is None:
        return 1.0
    mode = setting.sharing.spec.mode
    # Sharded weights are gathered for each micro-batch.
    times = more_micro_batches if mode in SPLIT_WEIGHTS else 1.0
    return 1 + times * (COMMUNICATION_TIME.get(mode, 1.0) - 1)


def _smaller_parts(setting: Setting, support: Support) -> Iterable[Values]:
    """Products of more GPUs, of which others remain to share weights."""
    if setting.sharing is None:
        return
    layout, model = setting.sharing.spec.layout, setting.model
    if layout is None or layout.context > 1 or setting.loss_chunk is None or setting.offload == "parameters":
        return
    if setting.sharing.spec.mode not in DIVISIBLE or model.method == "int8_lora" or model.lora_dora:
        return
    for size in NODE_DIVISORS:
        if size > layout.tensor and layout.size % size == 0 and layout.size > size:
            yield {"train.tensor_parallel": size}


def with_precision(precision: Precision) -> Values:
    """Another precision, with the settings turned off that exclude it."""
    in_backward = {"train.optimizer_in_backward": False} if precision == "fp16" else {}
    return {"train.precision": precision, "train.master_weights": False, **in_backward}


def _lighter_precision(setting: Setting, support: Support) -> Iterable[Values]:
    # In fp16, full training stores fp32 weights, so it saves nothing.
    if setting.model.precision == "fp32" and (support.native_bf16 or setting.model.adapted):
        yield with_precision("bf16" if support.native_bf16 else "fp16")


def with_method(method: Method) -> Values:
    """Another method, with the options reset that it ignores or excludes."""
    values: dict[str, Any] = {"train.method": method, "train.lora.init": "default", "train.lora.dora": False}
    if method == "full":
        values |= {"train.lora.dropout": 0.0, "train.lora.rslora": False, "train.lora.experts": "none"}
    if method != "qlora":
        values |= {"train.quant.type": "nf4", "train.quant.double": True}
    return {**values, "train.master_weights": False, "train.optimizer_in_backward": False}


def _smaller_expert_adapters(setting: Setting, support: Support) -> Iterable[Values]:
    """Adapters of half the rank on the experts of a mixture, then adapters beside the experts alone."""
    model = setting.model
    if model.adapted and model.lora_experts == "all":
        if model.lora_expert_rank > 1:
            yield {"train.lora.expert_rank": model.lora_expert_rank // 2}
        yield {"train.lora.experts": "none"}


def _update_in_backward(setting: Setting, support: Support) -> Iterable[Values]:
    """Update each weight in the backward pass, which excludes clipping and updates of all tensors at once."""
    model = setting.model
    if model.method == "full" and model.precision != "fp16" and not setting.sharing:
        entry = OPTIMIZERS[setting.optimizer]
        optimizer = entry.use_instead if entry.foreach and entry.use_instead else setting.optimizer
        yield {"train.optimizer_in_backward": True, "train.max_grad_norm": None, "train.optimizer": optimizer}


SWITCHES = [
    *ACTIVATION_SWITCHES,
    Switch(
        name="optimizer",
        parameters={"train.optimizer": "optimizer"},
        lighter=_lighter_optimizer,
        shown=lambda setting, support: [{"train.optimizer": "adamw"}, {"train.optimizer": "adamw_8bit"}],
        effect=ROUNDED,
        ease=5,
        other_memory="same",
    ),
    Switch(
        name="offload",
        parameters={"train.offload": "offload"},
        lighter=_lighter_offload,
        shown=_lighter_offload,
        effect=SAME,
        ease=8,
        excludes=frozenset({"method"}),
        other_memory="not less",
    ),
    Switch(
        name="sharding",
        parameters={
            "train.sharding": "sharing.spec.mode",
            "train.shard_group_gpus": "sharing.spec.group_gpus",
        },
        lighter=_lighter_sharding,
        effect=SAME,
        ease=9,
        other_memory="not less",
        time=_communication_time,
    ),
    STAGES,
    Switch(
        name="tensor_parallel",
        parameters={"train.tensor_parallel": "sharing.spec.layout.tensor"},
        lighter=_smaller_parts,
        effect=SAME,
        ease=10,
        excludes=frozenset({"sharding", "method"}),
        time=lambda setting, more: float(setting.tensor_parallel),  # So many GPUs for the same rows.
    ),
    Switch(
        name="context_parallel",
        parameters={"train.context_parallel": "sharing.spec.layout.context"},
        lighter=_divided_rows,
        effect=SAME,
        ease=10,
        excludes=frozenset({"tensor_parallel"}),
        changes_states=False,
        time=_exchange_time,
    ),
    Switch(
        name="precision",
        parameters={"train.precision": "model.precision", "train.master_weights": "master_weights"},
        lighter=_lighter_precision,
        shown=lambda setting, support: [
            *([with_precision("bf16")] if support.native_bf16 and setting.model.precision != "bf16" else []),
            *([with_precision("fp32")] if setting.model.precision != "fp32" else []),
        ],
        effect=ROUNDED,
        ease=6,
    ),
    Switch(
        name="method",
        parameters={
            "train.method": "model.method",
            "train.lora.init": "model.lora_init",
            "train.lora.dora": "model.lora_dora",
            "train.lora.dropout": "model.lora_dropout",
            "train.lora.rslora": "model.lora_rslora",
            "train.quant.type": "model.quant_type",
            "train.quant.double": "model.double_quant",
        },
        lighter=lambda setting, support: map(with_method, LIGHTER_METHODS[setting.model.method]),
        shown=lambda setting, support: [
            with_method(method) for method in ("full", "lora", "qlora") if method != setting.model.method
        ],
        effect=OTHER_WEIGHTS,
        ease=7,
    ),
    Switch(
        name="experts",
        parameters={
            "train.lora.experts": "model.lora_experts",
            "train.lora.expert_rank": "model.lora_expert_rank",
        },
        lighter=_smaller_expert_adapters,
        shown=_smaller_expert_adapters,
        effect=OTHER_WEIGHTS,
        ease=6,
    ),
    Switch(
        name="in_backward",
        parameters={
            "train.optimizer_in_backward": "optimizer_in_backward",
            "train.max_grad_norm": "max_grad_norm",
        },
        lighter=_update_in_backward,
        effect=SAME,
        ease=10,
        excludes=frozenset({"method", "micro_batch"}),
        one_micro_batch=True,
    ),
]


def _attributes() -> dict[str, str]:
    """The attribute in `Setting` of every parameter that a switch varies."""
    return {key: attribute for switch in SWITCHES for key, attribute in switch.parameters.items()}


def different(setting: Setting, values: Values) -> Values:
    """The values that differ from those of a setting."""
    paths = _attributes()
    return {key: value for key, value in values.items() if attrgetter(paths[key])(setting) != value}


def setting_with(setting: Setting, values: Values) -> Setting:
    """The setting with other values."""
    paths = _attributes()
    for key, value in values.items():
        staged = key in STAGES.parameters
        setting = with_stages(setting, value) if staged else replace_attribute(setting, paths[key], value)
        if key in ("train.tensor_parallel", "train.context_parallel") and setting.sharing is not None:
            others = setting.context * setting.tensor_parallel
            setting = replace_attribute(setting, "sharing.spec.layout.data", setting.sharing.gpus // others)
        if key == "train.offload" and setting.sharing is not None:
            setting = replace_attribute(setting, "sharing.spec.offload_weights", value == "parameters")
    return setting


def switch_table() -> str:
    """The table of docs/memory-switches.md: what each switch varies and what that does to learning."""
    rows = ["| switch | parameters | effect of a lighter value |", "|---|---|---|"]
    for switch in SWITCHES:
        keys = ", ".join(f"`{key}`" for key in switch.parameters)
        rows.append(f"| {switch.name} | {keys} | {EFFECTS[switch.effect]} |")
    return "\n".join(rows)


def weights_on_host(setting: Setting) -> Setting:
    """The sharded setting with weights, gradients and optimizer state in host memory."""
    return setting_with(setting, {"train.offload": "parameters"})
