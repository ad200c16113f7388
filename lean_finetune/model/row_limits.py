"""Refuse rows that a model cannot take: too long, joined, or divided among processes."""

from transformers import PretrainedConfig

from lean_finetune.core.errors import UserError
from lean_finetune.model.model_config import (
    attention_window,
    caps_scores,
    computes_own_attention,
    has_attention,
    layer_settings,
    max_positions,
    other_layers,
    row_loop,
)

UNPACKED = "set bucket.mode=bucketed, or choose another model"
"""Remedy for families that do not support joined rows."""


def refuse_long_rows(config: PretrainedConfig, longest: int) -> None:
    """Refuse rows longer than the model's position embeddings.

    Args:
        config: the model's config.
        longest: padded tokens of the longest row.

    Raises:
        UserError: naming both numbers.
    """
    limit = max_positions(config)
    if limit is not None and longest > limit:
        raise UserError(
            f"data.max_length: rows must fit the model's {limit} positions (max_position_embeddings); the longest is "
            f"padded to {longest}; lower data.max_length to {limit} or less"
        )


def rows_see_each_other(name: str) -> UserError:
    """The refusal of joined rows in a family."""
    return UserError(f"bucket.mode: packed needs rows that do not see each other; in {name} they do; {UNPACKED}")


def tokens_seen_outside_attention(name: str) -> UserError:
    """The refusal of divided rows in a family."""
    return UserError(
        "train.context_parallel: needs a model whose tokens see each other in attention alone, at positions that it is "
        f"given; {name} does not work so; set train.context_parallel=1"
    )


def refuse_divided_rows(config: PretrainedConfig, parts: int) -> None:
    """Refuse to divide the tokens of rows among `parts` processes if attention cannot be divided by heads.

    Raises:
        UserError: naming what the model has, and the remedy.
    """
    if parts == 1:
        return
    if not has_attention(config) or row_loop(config) != "none" or computes_own_attention(config):
        raise tokens_seen_outside_attention(config.model_type)
    for heads in layer_settings(config, "num_attention_heads"):
        if heads % parts:
            raise UserError(
                "train.context_parallel: must divide the model's attention heads, of which each GPU computes a part; "
                f"got {parts} for {heads}; set it to a divisor"
            )


def refuse_joined_rows(config: PretrainedConfig, longest: int) -> None:
    """Refuse to join rows if attention within a row is more than plain causal attention.

    Args:
        config: the model's config.
        longest: tokens of the longest row.

    Raises:
        UserError: naming what the model has, and the remedy.
    """
    if kinds := other_layers(config):
        raise UserError(
            f"bucket.mode: packed needs attention that sees a row's bounds; {config.model_type} has layers of type "
            f"{', '.join(kinds)}; set bucket.mode=bucketed"
        )
    if computes_own_attention(config):  # A token would see the rows before its own.
        raise rows_see_each_other(config.model_type)
    if caps_scores(config):
        raise UserError(
            f"bucket.mode: packed needs attention that sees a row's bounds; {config.model_type} caps its scores, which "
            "no such kernel does; set bucket.mode=bucketed"
        )
    window = attention_window(config)
    if window is not None and longest > window:
        raise UserError(
            f"bucket.mode: packed rows must fit the model's attention window of {window} tokens (sliding_window); the "
            f"longest has {longest}; lower data.max_length to {window} or set bucket.mode=bucketed"
        )
