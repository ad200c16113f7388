"""All memory switches.

CONTRIBUTING.md says how to add one. Those of activations and logits, and of several GPUs, have modules of their own.
The table in docs/memory-switches.md, switches.csv and the advice of estimate and `lean-finetune fit` read this list.
"""

from collections.abc import Iterable, Mapping

from lean_finetune.config.field_types import Method, Precision
from lean_finetune.config.optimizers import OPTIMIZERS
from lean_finetune.config.rule import OFF, Needs
from lean_finetune.config.train_rules import TRAIN_RULES
from lean_finetune.islands.tower import TOWER
from lean_finetune.memory.switches.activations import ACTIVATION_SWITCHES
from lean_finetune.memory.switches.several_gpus import PARALLEL_SWITCHES
from lean_finetune.memory.switches.switch import EFFECTS, OTHER_WEIGHTS, PLACES, ROUNDED, SAME, Support, Switch, Values
from lean_finetune.memory.trace.setting import Setting

LIGHTER_METHODS: Mapping[Method, tuple[Method, ...]] = {
    "full": ("lora", "qlora"),
    "lora": ("qlora",),
    "int8_lora": ("qlora",),
    "qlora": (),
}
"""Methods with less memory than a method, the most similar first."""


def _lighter_optimizer(setting: Setting, support: Support) -> Iterable[Values]:
    lighter = OPTIMIZERS[setting.train.optimizer].lighter
    return [] if lighter is None else [{"train.optimizer": lighter}]


def _lighter_offload(setting: Setting, support: Support) -> Iterable[Values]:
    """The optimizer in host memory or on its disk, then weights too. Adapters gain only where weights move."""
    given, adapted = setting.train.offload, setting.train.adapted
    if not support.cuda:
        return
    what = ["optimizer"] if given != "parameters" and not adapted else []
    for moved in [*what, *(["parameters"] if setting.gpus == 1 or given == "parameters" else [])]:
        if moved != given:
            yield {"train.offload": moved, "train.offload_to": "cpu"}
        if support.host_ram_known and not adapted:
            yield {"train.offload": moved, "train.offload_to": "disk"}


def _words_of_offload(setting: Setting) -> Mapping[str, str]:
    train = setting.train
    what = {"none": None, "optimizer": "optimizer", "parameters": "weights and optimizer"}[train.offload]
    return {} if what is None else {"offload": f"{what} on {PLACES[train.offload_to]}"}


def with_precision(precision: Precision) -> Values:
    """Another precision, with the settings turned off that exclude it."""
    in_backward = {"train.optimizer_in_backward": False} if precision == "fp16" else {}
    return {"train.precision": precision, "train.master_weights": False, **in_backward}


def _lighter_precision(setting: Setting, support: Support) -> Iterable[Values]:
    # In fp16, full training stores fp32 weights, so it saves nothing.
    if setting.train.precision == "fp32" and (support.native_bf16 or setting.train.adapted):
        yield with_precision("bf16" if support.native_bf16 else "fp16")


def with_method(method: Method) -> Values:
    """Another method, with the options turned off that it ignores or excludes."""
    ours = {key for switch in SWITCHES for key in switch.parameters}
    needed = (rule for rule in TRAIN_RULES if isinstance(rule, Needs) and rule.other == "train.method")
    off = {rule.key: OFF[rule.key] for rule in needed if rule.key in ours and method not in rule.values}
    reset = {"train.lora.init": "default", "train.lora.dora": False, "train.master_weights": False}
    return {"train.method": method, **reset, **off}


def _frozen_parts(setting: Setting, support: Support) -> Iterable[Values]:
    """Parts beside the decoder that are trained by adapters, or frozen."""
    return TOWER.lighter(setting.train)


def _smaller_expert_adapters(setting: Setting, support: Support) -> Iterable[Values]:
    """Adapters of half the rank on the experts of a mixture, then adapters beside the experts alone."""
    lora = setting.train.lora
    if lora.experts == "all":
        if lora.expert_rank > 1:
            yield {"train.lora.expert_rank": lora.expert_rank // 2}
        yield {"train.lora.experts": "none"}


def _update_in_backward(setting: Setting, support: Support) -> Iterable[Values]:
    """Update each weight in the backward pass, which excludes clipping; then with AdamW's state paged from the host."""
    train = setting.train
    if train.offload != "parameters" and not train.scales_loss:  # The rules do not know the precision of `auto`.
        in_backward = {"train.optimizer_in_backward": True, "train.max_grad_norm": None}
        yield in_backward
        least = OPTIMIZERS[train.optimizer].lighter or train.optimizer
        paged = next((name for name, other in OPTIMIZERS.items() if other.use_instead == least), None)
        if support.cuda and paged is not None:
            yield {**in_backward, "train.optimizer": paged}


SWITCHES = [
    *ACTIVATION_SWITCHES,
    Switch(
        name="optimizer",
        parameters=("train.optimizer",),
        lighter=_lighter_optimizer,
        shown=lambda setting, support: [{"train.optimizer": "adamw"}, {"train.optimizer": "adamw_8bit"}],
        words=lambda setting: {"optimizer": setting.train.optimizer},
        effect=ROUNDED,
        ease=5,
        other_memory="same",
    ),
    Switch(
        name="offload",
        parameters=("train.offload", "train.offload_to"),
        lighter=_lighter_offload,
        shown=lambda setting, support: list(_lighter_offload(setting, support))[:1],
        words=_words_of_offload,
        effect=SAME,
        ease=8,
        excludes=frozenset({"method"}),
        other_memory="not less",
    ),
    *PARALLEL_SWITCHES,
    Switch(
        name="precision",
        parameters=("train.precision", "train.master_weights"),
        lighter=_lighter_precision,
        shown=lambda setting, support: [
            *([with_precision("bf16")] if support.native_bf16 and setting.train.precision != "bf16" else []),
            *([with_precision("fp32")] if setting.train.precision != "fp32" else []),
        ],
        effect=ROUNDED,
        ease=6,
    ),
    Switch(
        name="method",
        parameters=(
            "train.method",
            "train.lora.init",
            "train.lora.dora",
            "train.lora.dropout",
            "train.lora.modules_to_save",
            "train.lora.rslora",
            "train.lora.trainable_tokens",
            "train.quant.type",
            "train.quant.double",
            "train.router",
        ),
        lighter=lambda setting, support: map(with_method, LIGHTER_METHODS[setting.train.method]),
        shown=lambda setting, support: [
            with_method(method) for method in ("full", "lora", "qlora") if method != setting.train.method
        ],
        effect=OTHER_WEIGHTS,
        ease=7,
    ),
    Switch(
        name="experts",
        parameters=("train.lora.experts", "train.lora.expert_rank"),
        lighter=_smaller_expert_adapters,
        shown=_smaller_expert_adapters,
        effect=OTHER_WEIGHTS,
        ease=6,
    ),
    Switch(
        name=TOWER.name,
        parameters=tuple(f"train.{kind}" for kind in TOWER.kinds),
        lighter=_frozen_parts,
        shown=_frozen_parts,
        effect=OTHER_WEIGHTS,
        ease=6,
    ),
    Switch(
        name="in_backward",
        parameters=("train.optimizer_in_backward", "train.max_grad_norm"),
        lighter=_update_in_backward,
        words=lambda setting: (
            {"optimizer": f"{setting.train.optimizer} in backward, without clipping"}
            if setting.train.optimizer_in_backward
            else {}
        ),
        effect=SAME,
        ease=10,
        excludes=frozenset({"micro_batch"}),
        one_micro_batch=True,
    ),
]


def switch_table() -> str:
    """The table of docs/memory-switches.md: what each switch varies and what that does to learning."""
    rows = ["| switch | parameters | effect of a lighter value |", "|---|---|---|"]
    for switch in SWITCHES:
        keys = ", ".join(f"`{key}`" for key in switch.parameters)
        rows.append(f"| {switch.name} | {keys} | {EFFECTS[switch.effect]} |")
    return "\n".join(rows)
