"""Suit a configuration of another tool to the model that it names, where that tool takes what is refused here."""

from transformers import PretrainedConfig

from lean_finetune.commands.convert.conversions import Converted
from lean_finetune.core.errors import UserError
from lean_finetune.model.empty_model import meta_model
from lean_finetune.model.model_config import refuse_packed_rows

TARGETS, HEAD = "train.lora.targets", "lm_head"


def suit_to_model(converted: Converted, config: PretrainedConfig) -> None:
    """Change what the model does not allow here, and say so. `refuse_unsupported` judges what is left."""
    _leave_out_targets(converted, config)
    if converted.values.get("bucket.mode") == "packed":
        try:
            refuse_packed_rows(config, converted.values["data.max_length"])
        except UserError:
            pad_rows(converted)


def pad_rows(converted: Converted) -> None:
    """Pad the rows that are packed there."""
    converted.values["bucket.mode"] = "bucketed"
    converted.say("rows are packed there, and padded here: the model's attention takes no packed rows here")


def _leave_out_targets(converted: Converted, config: PretrainedConfig) -> None:
    """Leave out targets that are no modules of the model, as peft does, and a head that is the embedding."""
    targets = converted.values.get(TARGETS, [])
    if len(targets) < 2:
        return
    modules = [name for name, _ in meta_model(config).named_modules()]
    found = [each for each in targets if any(name == each or name.endswith(f".{each}") for name in modules)]
    if found and (missing := [each for each in targets if each not in found]):
        converted.say(f"{config.model_type} has no {', '.join(missing)}: peft leaves such names out, and so it is here")
    if HEAD in found and config.tie_word_embeddings:
        found.remove(HEAD)
        converted.say(f"the head of {config.model_type} is its embedding here, so it has no adapter")
    if found:
        converted.values[TARGETS] = found
