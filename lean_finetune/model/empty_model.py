"""Models without weights, built from their config alone."""

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers import initialization as init

from lean_finetune.core.errors import UserError


def meta_model(config: PretrainedConfig, **options: object) -> PreTrainedModel:
    """A causal language model on the meta device: shapes, types and ties without memory.

    Args:
        config: its config.
        options: of transformers' `from_config`, such as its type and attention.

    Raises:
        UserError: the code of its family cannot build it with these values, or has not what `options` ask for.
    """
    with unset_fake_temporarily(), torch.device("meta"), init.no_init_weights():
        try:
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, **options)
        except Exception as error:  # Whatever a family's code raises over values that it did not expect.
            raise UserError(
                f"model.name: {config.model_type} cannot be built ({_reason(error, options)}); choose another model, "
                "or give the config.json that belongs to this one"
            ) from None
        model.tie_weights()
    refuse_other_heads(model)
    return model


def refuse_other_heads(model: PreTrainedModel) -> None:
    """Refuse models whose logits are not plainly the head's product with what the decoder makes: so the loss is made.

    Raises:
        UserError: naming what stands between.
    """
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    parts = [part for part in (decoder, head) if part is not None]
    seen = {id(parameter) for part in parts for parameter in part.parameters()}
    between = sorted(name for name, parameter in model.named_parameters() if id(parameter) not in seen)
    name = model.config.model_type
    if head is None or decoder is None or decoder in (model, head):
        raise UserError(f"model.name: {name} has no decoder apart from its head; choose another model")
    if between:
        raise UserError(
            f"model.name: {name} has {between[0]} outside of its decoder and its head, which the loss would pass over; "
            "choose another model"
        )


def _reason(error: Exception, options: dict[str, object]) -> str:
    """Why a model cannot be built, in a few words."""
    if isinstance(error, KeyError) and error.args[0] in options.values():
        return f"its code knows no {error}"
    first = next(iter(str(error).splitlines()), "").partition(". ")[0]
    return first if isinstance(error, ValueError) and first else f"{type(error).__name__}: {first}"
