"""Rules of params.yaml for objectives of preferences."""

from collections.abc import Callable
from operator import attrgetter

from lean_finetune.config.adapter_starts import ADAPTER_STARTS
from lean_finetune.config.rule import Rule
from lean_finetune.config.schema import Params, Preference
from lean_finetune.objectives.registry import OBJECTIVES


def _unused_preference(params: Params) -> list[str]:
    """Parameters of section `preference` that are set, and that the objective does not read."""
    train = params.train
    used = () if train.preferences is None else train.preferences.defaults
    given = [name for name in Preference.model_fields if getattr(train.preference, name) is not None]
    return [name for name in given if name not in used]


def _unused_message(params: Params) -> str:
    name = _unused_preference(params)[0]
    users = [one.name for one in OBJECTIVES.values() if one is not None and name in one.defaults]
    return (
        f"train.objective={params.train.objective} does not read {name}; got {getattr(params.train.preference, name)}; "
        f"leave it blank, or use train.objective={' or '.join(users)}"
    )


def _preferences_exclude(key: str, broken: Callable[[Params], bool], reason: str, remedy: str) -> Rule:
    """The rule that objectives of preferences exclude a setting."""
    return Rule(
        key,
        lambda p: p.train.preferences is not None and broken(p),
        f"{reason}; got {{{key}}} with train.objective={{train.objective}}; {remedy}, or use train.objective=sft",
    )


NO_EFFECT_ON_SCORES = {"train.loss_chunk": None, "evaluate.generate_rows": 0}
"""Settings of logits and of generated text, which a reward model does not have, and their values without an effect."""


def _set_without_logits(params: Params) -> list[str]:
    """Settings of logits and of generated text that are on."""
    return [name for name, off in NO_EFFECT_ON_SCORES.items() if attrgetter(name)(params) != off]


def _without_logits_message(params: Params) -> str:
    names = _set_without_logits(params)
    got = " and ".join(f"{name}={attrgetter(name)(params)}" for name in names)
    remedy = " and ".join(f"{name}={'null' if (off := NO_EFFECT_ON_SCORES[name]) is None else off}" for name in names)
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
        lambda p: p.train.best_by == "accuracy" and p.train.preferences is None,
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
    Rule("train.objective", lambda p: p.train.scores and bool(_set_without_logits(p)), _without_logits_message),
    _scores_exclude(
        "train.router_aux_loss",
        lambda p: p.train.router_aux_loss > 0.0,
        "was not tried with reward models",
        "set it to 0.0",
    ),
    _scores_exclude("evaluate.tasks", lambda p: bool(p.evaluate.tasks), "a reward model writes no text", "use []"),
    Rule(
        "train.lora.dropout",
        lambda p: p.train.preferences is not None and p.train.preferences.has_reference and p.train.lora.dropout > 0.0,
        "dropout would change the log-probabilities that are compared with the reference; got {train.lora.dropout} "
        "with train.objective={train.objective}; set it to 0.0",
    ),
    Rule(
        "train.lora.init",
        lambda p: (
            p.train.preferences is not None
            and p.train.preferences.has_reference
            and ADAPTER_STARTS[p.train.lora.init].changes_output
        ),
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
