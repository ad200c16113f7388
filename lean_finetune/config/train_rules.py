"""Rules between the parameters of section `train`, and those that objectives of preferences set to all sections."""

from collections.abc import Callable
from operator import attrgetter

from lean_finetune.config.adapter_starts import ADAPTER_STARTS
from lean_finetune.config.field_types import ALL_LINEAR
from lean_finetune.config.optimizers import OPTIMIZERS, OptimizerEntry
from lean_finetune.config.rule import Rule, needs
from lean_finetune.config.schema import Params, Preference
from lean_finetune.islands.objectives.registry import OBJECTIVES

ADAPTER_METHODS = ("lora", "qlora", "int8_lora")
IN_BACKWARD = "train.optimizer_in_backward"


def _optimizer(params: Params) -> OptimizerEntry:
    return OPTIMIZERS[params.train.optimizer]


def _start_message(params: Params) -> str:
    start = ADAPTER_STARTS[params.train.lora.init]
    methods = " or ".join(f"train.method={method}" for method in start.methods)
    got = "{train.lora.init} with train.method={train.method}"
    return f"{{train.lora.init}} {start.reason}; got {got}; use {methods}, or default"


def _rows_exclude(key: str) -> Rule:
    """The rule that a dimension of the mesh excludes a trained embedding or head."""
    dimension = attrgetter(key)

    def message(params: Params) -> str:
        name = "modules_to_save" if params.train.lora.modules_to_save else "trainable_tokens"
        return (
            f"divides the embedding and the head, which train.lora.{name} trains; got {{{key}}} with "
            f"{{train.lora.{name}}}; set it to 1 and use train.sharding=zero3, or set train.lora.{name}=[]"
        )

    return Rule(
        key,
        lambda p: dimension(p) > 1 and bool(p.train.lora.modules_to_save or p.train.lora.trainable_tokens),
        message,
    )


def _part_rule(part: str) -> Rule:
    """The rule that a part for images has adapters only where the other layers have them."""
    key = f"train.{part}"
    mode = attrgetter(key)
    return Rule(
        key,
        lambda p: p.train.method == "full" and mode(p) == "lora",
        f"has adapters as the other layers have; got {{{key}}} with train.method={{train.method}}; use full, or frozen",
    )


TRAIN_RULES = [
    Rule(
        "train.master_weights",
        lambda p: p.train.master_weights and (p.train.method != "full" or p.train.precision not in ("auto", "bf16")),
        "has an effect only with train.method=full and train.precision=bf16; got true with {train.method} and "
        "{train.precision}; set it to false",
    ),
    Rule(
        "train.optimizer",
        lambda p: _optimizer(p).paged and p.train.offload != "none",
        lambda p: (
            "a paged optimizer moves its state to the host itself; got {train.optimizer} with "
            f"train.offload={{train.offload}}; use {_optimizer(p).use_instead}, or train.offload=none"
        ),
    ),
    needs("train.offload_to", "train.offload", "optimizer", "parameters"),
    Rule(
        "train.offload_to",
        lambda p: p.train.offload_to == "disk" and not _optimizer(p).updates_by_value,
        "disk updates a tensor in parts, but {train.optimizer} needs sums over a tensor or stacks two moments in one; "
        "got disk; use cpu, or train.optimizer=adamw_8bit",
    ),
    Rule(
        IN_BACKWARD,
        lambda p: p.train.optimizer_in_backward and p.hardware.num_gpus > 1,
        "needs one GPU, because several GPUs sum their gradients first; got true with "
        "hardware.num_gpus={hardware.num_gpus}; set train.optimizer_in_backward=false, or hardware.num_gpus=1",
    ),
    needs(IN_BACKWARD, "train.method", "full"),
    Rule(
        IN_BACKWARD,
        lambda p: p.train.optimizer_in_backward and p.train.max_grad_norm is not None,
        "updates weights before the norm of all gradients is known; got true with "
        "train.max_grad_norm={train.max_grad_norm}; leave train.max_grad_norm blank, or set "
        "train.optimizer_in_backward=false",
    ),
    Rule(
        IN_BACKWARD,
        lambda p: p.train.optimizer_in_backward and p.train.precision == "fp16",
        "updates weights before an fp16 overflow is known; got true with train.precision=fp16; use bf16 or fp32, or "
        "set train.optimizer_in_backward=false",
    ),
    needs("train.router", "train.method", "full"),
    needs("train.quant.type", "train.method", "qlora"),
    needs("train.quant.double", "train.method", "qlora"),
    needs("train.lora.dropout", "train.method", *ADAPTER_METHODS),
    needs("train.lora.rslora", "train.method", *ADAPTER_METHODS),
    Rule(
        "train.lora.init",
        lambda p: p.train.method not in ADAPTER_STARTS[p.train.lora.init].methods,
        _start_message,
    ),
    Rule(
        "model.adapter",
        lambda p: p.model.adapter is not None and p.train.method == "full",
        "needs adapters, and train.method=full trains all weights; got {model.adapter}; merge it (`lean-finetune "
        "export DIRECTORY --model ADAPTER`) and name the result in model.name, or use train.method=lora",
    ),
    Rule(
        "model.adapter_revision",
        lambda p: p.model.adapter_revision is not None and p.model.adapter is None,
        "has an effect only with model.adapter; got {model.adapter_revision}; leave it blank",
    ),
    Rule(
        "train.lora.init",
        lambda p: p.model.adapter is not None and p.train.lora.init != "default",
        "an adapter that goes on has its own start; got {train.lora.init} with model.adapter={model.adapter}; use "
        "default, or leave model.adapter blank",
    ),
    Rule(
        "train.lora.dora",
        lambda p: p.train.lora.dora and (p.train.method not in ("lora", "qlora") or p.train.lora.init != "default"),
        "needs train.method=lora or qlora (peft drops the scales of 8-bit weights) and train.lora.init=default; got "
        "{train.method}, {train.lora.init}; set it to false",
    ),
    needs("train.lora.modules_to_save", "train.method", *ADAPTER_METHODS),
    needs("train.lora.trainable_tokens", "train.method", *ADAPTER_METHODS),
    Rule(
        "train.lora.trainable_tokens",
        lambda p: bool(p.train.lora.trainable_tokens and p.train.lora.modules_to_save),
        "rows of the embedding are trained alone, or all of them; got {train.lora.trainable_tokens} with "
        "train.lora.modules_to_save={train.lora.modules_to_save}; set one of them to []",
    ),
    _rows_exclude("train.tensor_parallel"),
    _rows_exclude("train.pipeline_stages"),
    needs("train.lora.experts", "train.method", *ADAPTER_METHODS),
    Rule(
        "train.lora.experts",
        lambda p: (
            p.train.lora.experts != "none"
            and (p.train.lora.dropout > 0 or p.train.lora.dora or p.train.lora.init != "default")
        ),
        "adapters of experts work without train.lora.dropout, dora and another init than default; got "
        "{train.lora.experts} with {train.lora.dropout}, {train.lora.dora}, {train.lora.init}; set them to 0.0, false "
        "and default, or train.lora.experts to none",
    ),
    Rule(
        "train.router_aux_loss",
        lambda p: p.train.router_aux_loss > 0 and p.train.grad_ckpt and p.train.method == "int8_lora",
        "has no gradient where int8_lora recomputes layers; got {train.router_aux_loss}; set it to 0.0, or "
        "train.grad_ckpt=false",
    ),
    *map(_part_rule, ("vision", "projector")),
    Rule(
        "train.vision",
        lambda p: p.train.vision == "lora" and p.train.method == "int8_lora" and p.train.grad_ckpt,
        "adapters of the tower get no gradient where int8_lora recomputes its layers; got lora; set "
        "train.grad_ckpt=false, or use train.method=qlora",
    ),
    Rule(
        "train.lora.targets",
        lambda p: ALL_LINEAR in p.train.lora.targets and len(p.train.lora.targets) > 1,
        f"{ALL_LINEAR} must be the only entry; got {{train.lora.targets}}; remove it or the other names",
    ),
    Rule(
        "train.fused_kernels",
        lambda p: (
            p.train.fused_kernels in ("liger", "fla")
            and (p.train.compress_activations != "none" or p.train.sequence_tiles is not None)
        ),
        "was not tried with train.compress_activations and sequence_tiles; got "
        "{train.fused_kernels} with {train.compress_activations} and {train.sequence_tiles}; set it to none, or these "
        "to none and blank",
    ),
    Rule(
        "train.fused_kernels",
        lambda p: p.train.fused_kernels == "liger" and p.train.grad_ckpt_policy == "selective",
        "overwrites outputs of matmuls with their rotary embedding, and train.grad_ckpt_policy=selective reads them "
        "again; got {train.fused_kernels} with selective; set it to none, or use full or every_n",
    ),
    needs("train.merge", "train.method", *ADAPTER_METHODS),
]


# Rules for objectives of preferences.


def _unused_preference(params: Params) -> list[str]:
    """Parameters of section `preference` that are set, and that the objective does not read."""
    train = params.train
    used = train.goal.defaults
    given = [name for name in Preference.model_fields if getattr(train.preference, name) is not None]
    return [name for name in given if name not in used]


def _unused_message(params: Params) -> str:
    name = _unused_preference(params)[0]
    users = [one.name for one in OBJECTIVES.values() if name in one.defaults]
    return (
        f"train.objective={params.train.objective} does not read {name}; got {getattr(params.train.preference, name)}; "
        f"leave it blank, or use train.objective={' or '.join(users)}"
    )


def _preferences_exclude(key: str, broken: Callable[[Params], bool], reason: str, remedy: str) -> Rule:
    """The rule that objectives of preferences exclude a setting."""
    return Rule(
        key,
        lambda p: p.train.goal.compares and broken(p),
        f"{reason}; got {{{key}}} with train.objective={{train.objective}}; {remedy}, or use train.objective=sft",
    )


def _set_without_logits(params: Params) -> list[str]:
    """Settings of logits and of generated text that are on."""
    return [name for name, off in params.train.goal.off.items() if attrgetter(name)(params) != off]


def _without_logits_message(params: Params) -> str:
    names, off = _set_without_logits(params), params.train.goal.off
    got = " and ".join(f"{name}={attrgetter(name)(params)}" for name in names)
    remedy = " and ".join(f"{name}={'null' if off[name] is None else off[name]}" for name in names)
    return f"a reward model has no logits and writes no text; got reward with {got}; set {remedy}"


def _scores_exclude(key: str, broken: Callable[[Params], bool], reason: str, remedy: str) -> Rule:
    """The rule that reward models exclude a setting."""
    return Rule(
        key,
        lambda p: p.train.scores and broken(p),
        f"{reason}; got {{{key}}} with train.objective={{train.objective}}; {remedy}",
    )


PREFERENCE_RULES = [
    Rule("train.preference", lambda p: bool(_unused_preference(p)), _unused_message),
    Rule(
        "train.best_by",
        lambda p: p.train.best_by == "accuracy" and not p.train.goal.compares,
        "accuracy is the share of pairs in the right order, or of labels; got accuracy with "
        "train.objective={train.objective}; use loss",
    ),
    _preferences_exclude(
        "train.context_parallel",
        lambda p: p.train.context_parallel > 1,
        "the log-probability of an answer needs all of its tokens in one process",
        "set it to 1",
    ),
    _preferences_exclude(
        "train.tensor_parallel",
        lambda p: p.train.tensor_parallel > 1,
        "was not tried with preferences",
        "set it to 1",
    ),
    _preferences_exclude(
        "train.pipeline_stages",
        lambda p: p.train.pipeline_stages > 1,
        "was not tried with preferences",
        "set it to 1",
    ),
    Rule("train.objective", lambda p: bool(_set_without_logits(p)), _without_logits_message),
    _scores_exclude(
        "train.router_aux_loss",
        lambda p: p.train.router_aux_loss > 0.0,
        "was not tried with reward models",
        "set it to 0.0",
    ),
    _scores_exclude("evaluate.tasks", lambda p: bool(p.evaluate.tasks), "a reward model writes no text", "use []"),
    Rule(
        "train.lora.dropout",
        lambda p: p.train.goal.has_reference and p.train.lora.dropout > 0.0,
        "dropout would change the log-probabilities that are compared with the reference; got {train.lora.dropout} "
        "with train.objective={train.objective}; set it to 0.0",
    ),
    Rule(
        "train.lora.init",
        lambda p: p.train.goal.has_reference and ADAPTER_STARTS[p.train.lora.init].changes_output,
        "starts from another model than the reference, which is the base without adapters; got {train.lora.init} with "
        "train.objective={train.objective}; use default",
    ),
    _preferences_exclude(
        "data.over_length",
        lambda p: p.data.over_length == "split",
        "the parts of an answer are no answer to prefer",
        "use truncate or drop",
    ),
    _preferences_exclude(
        "data.train_on",
        lambda p: p.data.train_on == "all",
        "preferences are of answers, not of prompts",
        "use assistant",
    ),
    _preferences_exclude(
        "bucket.fixed_rows",
        lambda p: p.bucket.mode == "fixed" and p.bucket.fixed_rows % p.train.row_kind.unit != 0,
        "a pair is two rows of one micro-batch",
        "use an even number",
    ),
]
