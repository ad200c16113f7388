"""Predict memory outside of the training step: loading, held-out losses, generation, saving.

Forward passes are traced, as the step is. Loading and saving move tensors one by one; their memory is a sum, which
tests compare with measured loads. Merging needs one weight more than saving.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers import PretrainedConfig

from cuda_memory.units import readable_size
from lean_finetune.config.sharding_rules import SPLIT_WEIGHTS
from lean_finetune.memory.predict.evaluation_phases import (
    GenerationShape,
    highest,
    peak_of,
    peak_of_answers,
    peak_of_loss,
)
from lean_finetune.memory.predict.layer_structure import stages_of
from lean_finetune.memory.predict.load_phase import load_peak
from lean_finetune.memory.predict.setting import Setting
from lean_finetune.memory.predict.state_formulas import (
    model_shapes,
    state_bytes,
    state_lines,
)
from lean_finetune.memory.trace.cuda_kernels import Target
from lean_finetune.memory.trace.memory_trace import (
    ADAPTERS,
    GRADIENTS,
    OPTIMIZER,
    QUANTISATION_STATE,
    SHARDING,
    WEIGHTS,
    Peak,
)
from lean_finetune.model.attention.kernels import TokenExchange
from lean_finetune.model.files.quantized_checkpoint import UNPACKED, stored_format, without_quantisation
from lean_finetune.model.precision import base_dtype
from lean_finetune.step.batches import Batch, BatchShape
from lean_finetune.step.evaluation_limits import EvaluationLimits
from lean_finetune.step.loss import summed_loss, token_losses

LOAD, HELDOUT, EVALUATE, GENERATE, SAVE = "load", "heldout", "evaluate", "generate", "save"
EVALUATE_MERGED = "evaluate_merged"
EVALUATION_PHASES = (HELDOUT, EVALUATE, GENERATE, EVALUATE_MERGED)
"""Phases of held-out losses and generation."""
STATES = (WEIGHTS, QUANTISATION_STATE, ADAPTERS, OPTIMIZER)
"""Categories that do not depend on batches."""
UNSHARDED = "whole_weights"
"""Category of weights that are unsharded on a GPU while loading shards them, or saving gathers them."""


@dataclass(frozen=True, kw_only=True)
class OtherPhases:
    """What these phases depend on besides the setting."""

    stored_dtype: torch.dtype
    """Type of the weights in the model's files. (Building a model of another type changes the config's.)"""
    in_training: BatchShape
    """Largest batch of held-out rows during training."""
    evaluation: BatchShape
    """Largest batch of held-out rows in stage evaluate."""
    logits_chunk: int
    """Tokens whose logits exist at the same time in stage evaluate."""
    generation: tuple[GenerationShape, ...]
    """Candidates for the largest batch of prompts in stage evaluate; empty if nothing is generated."""
    merged: bool
    """evaluate.merged: also evaluate the merged model, which is not quantised."""


def heldout_shape(max_tokens: int, longest: int) -> BatchShape:
    """The largest batch of held-out rows within a budget of padded tokens, all of them supervised.

    Assumes that no held-out row is longer than the longest training row, `longest`.
    """
    rows = max(1, max_tokens // longest)
    return BatchShape(rows=rows, length=longest, supervised=rows * longest, joined_lengths=None)


def generation_shapes(
    limits: EvaluationLimits, *, prompts: int, longest: int, positions: int | None
) -> tuple[GenerationShape, ...]:
    """Batches of prompts that can need the most memory; none if nothing is generated, or no prompt has room.

    The batch of the longest prompts may leave much of `limits.max_tokens` unused. A batch of one prompt more does not,
    and needs a mask even if the longest prompt is alone in its batch. The longest prompt is assumed to have as many
    tokens as the longest training row. `positions` is the model's max_position_embeddings; None if unlimited.
    """
    new_tokens, shapes = limits.max_new_tokens, []
    prompt_tokens = longest if positions is None else min(longest, positions - new_tokens)
    if prompts < 1 or prompt_tokens < 1:
        return ()
    rows = min(prompts, limits.prompts_at_once(prompt_tokens))
    shapes.append(GenerationShape(rows=rows, prompt_tokens=prompt_tokens, new_tokens=new_tokens))
    shorter = limits.max_tokens // (rows + 1) - new_tokens
    if shorter >= 1 and rows < min(prompts, limits.generate_batch_rows):
        shapes.append(GenerationShape(rows=rows + 1, prompt_tokens=shorter, new_tokens=new_tokens))
    return tuple(shapes)


def stored_dtype(config: PretrainedConfig) -> torch.dtype:
    """Type of the weights in a model's files, by a config just read from its file; fp32 if not stated.

    For quantised files, the type of their other weights: bf16 if not stated.
    """
    if isinstance(config.dtype, torch.dtype):
        return config.dtype
    return torch.float32 if stored_format(config) is None else UNPACKED


def other_phases(
    config: PretrainedConfig, setting: Setting, around: OtherPhases, target: Target, update: Peak
) -> Mapping[str, Peak]:
    """Peaks of load, heldout (during training), evaluate, generate and save on the device.

    Call after `predict`, which refuses untraceable models. `update` is the predicted peak of the optimizer's phase: in
    runs on several GPUs it gives the state of one GPU. Stage evaluate always runs on one GPU.
    """
    load, save = load_and_save(config, setting, around.stored_dtype, target, update)
    return {
        LOAD: load,
        HELDOUT: _heldout(config, setting, around, target, save.by_category.get(OPTIMIZER, 0)),
        **_evaluation(config, replace(setting, sharing=None), around, target),
        SAVE: save,
    }


def load_and_save(
    config: PretrainedConfig, setting: Setting, stored: torch.dtype, target: Target, update: Peak
) -> tuple[Peak, Peak]:
    """Peaks of loading and of saving; `stored` is the type of the weights in their files, `update` as above."""
    shapes, sharing = model_shapes(config), setting.sharing
    if sharing is None:
        on_device = setting.with_train(optimizer_in_backward=False)
        lines = state_lines(shapes, on_device, cuda=target.foreach)
        states = dict(state_bytes(lines, granularity_bytes=target.granularity_bytes))
        states.pop(GRADIENTS)
        optimizer_bytes = states.pop(OPTIMIZER, 0)
        end = peak_of({**states, OPTIMIZER: optimizer_bytes})
        return load_peak(config, shapes, setting.train, stored, target, states, end), end
    states = {category: update.by_category.get(category, 0) for category in (*STATES, SHARDING)}
    largest = max(parameter.values for parameter in shapes.parameters) * base_dtype(setting.train).itemsize
    # Embedding and head are sharded last: unsharded on the device once, beside the shards of all layers.
    unsharded = largest if sharing.spec.mode in SPLIT_WEIGHTS or setting.tensor_parallel > 1 else 0
    loaded = {**states, OPTIMIZER: 0, UNSHARDED: unsharded * (1 if config.get_text_config().tie_word_embeddings else 2)}
    return highest((peak_of(states), peak_of(loaded))), peak_of({**states, UNSHARDED: unsharded})


def _heldout(
    config: PretrainedConfig, setting: Setting, around: OtherPhases, target: Target, optimizer_bytes: int
) -> Peak:
    """Peak of held-out losses during training."""
    shape = around.in_training
    chunk = setting.train.loss_chunk or shape.rows * shape.length  # As in the training loop.

    def loss_of(model: nn.Module, batch: Batch, exchange: TokenExchange | None) -> torch.Tensor:
        return summed_loss(model, batch, chunk, exchange=exchange)

    loss = highest(peak_of_loss(config, each, shape, target, loss_of) for each in stages_of(setting))
    return peak_of({**loss.by_category, OPTIMIZER: optimizer_bytes})


def _evaluation(config: PretrainedConfig, setting: Setting, around: OtherPhases, target: Target) -> dict[str, Peak]:
    """Peaks of stage evaluate, with the merged model if requested."""
    found = _evaluation_of(config, setting, around, target)
    if around.merged:
        merged = setting.with_train(method="full")
        plain = without_quantisation(deepcopy(config))
        found[EVALUATE_MERGED] = highest(_evaluation_of(plain, merged, around, target).values())
    return found


def _evaluation_of(config: PretrainedConfig, setting: Setting, around: OtherPhases, target: Target) -> dict[str, Peak]:
    """Peaks of evaluating one model."""
    # As in stage evaluate.
    plain = setting.with_train(attention="auto", fused_kernels="none")

    def loss_of(model: nn.Module, batch: Batch, exchange: TokenExchange | None) -> torch.Tensor:
        return token_losses(model, batch, around.logits_chunk)

    loss = peak_of_loss(config, plain, around.evaluation, target, loss_of)
    answers = [peak_of_answers(config, plain, shape, target) for shape in around.generation]
    return {EVALUATE: loss} | ({GENERATE: highest(answers)} if answers else {})


def loading_note(load_bytes: int, training_bytes: int) -> str | None:
    """A note if loading the weights needs more memory than training, whose peak decides the verdict."""
    if load_bytes <= training_bytes:
        return None
    return f"loading is predicted to take {readable_size(load_bytes)}, training {readable_size(training_bytes)}"


def evaluation_note(by_phase: Mapping[str, Peak], training_bytes: int, max_tokens: int, longest: int) -> str | None:
    """A note if evaluation needs more memory than training, with fewer tokens than `max_tokens` if they help."""
    worst = max((phase for phase in EVALUATION_PHASES if phase in by_phase), key=lambda phase: by_phase[phase].bytes)
    peak = by_phase[worst]
    if peak.bytes <= training_bytes:
        return None
    note = f"{worst} is predicted to take {readable_size(peak.bytes)}, training {readable_size(training_bytes)}"
    states = sum(peak.by_category.get(category, 0) for category in STATES)
    # Activations grow linearly with the tokens, or faster.
    fewer = int(max_tokens * (training_bytes - states) / (peak.bytes - states))
    if worst == HELDOUT or fewer < longest:
        return f"{note}; fewer tokens in evaluate.max_tokens do not help: rows are up to {longest} long"
    return f"{note}; with -S evaluate.max_tokens={fewer} it takes no more"
