"""Predict memory outside of the training step: loading, held-out losses, generation, saving.

Forward passes are traced, as the step is. Loading and saving move tensors one by one; their memory is a sum, which
tests compare with measured loads. Merging needs one weight more than saving.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from transformers import PretrainedConfig
from transformers.core_model_loading import dot_natural_key

from lean_finetune.config.adapter_starts import ADAPTER_STARTS
from lean_finetune.core.units import readable_size
from lean_finetune.memory.predict.evaluation_phases import GenerationShape, highest, peak_of_answers, peak_of_loss
from lean_finetune.memory.predict.setting import Setting
from lean_finetune.memory.predict.state_formulas import (
    FP32_BYTES,
    PACKED_BITS,
    ModelShapes,
    ParameterShape,
    adapted_weights,
    model_shapes,
    state_bytes,
    state_lines,
    weight_lines,
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
from lean_finetune.model.model_spec import ModelSpec
from lean_finetune.step.batches import BatchShape
from lean_finetune.step.evaluation_limits import EvaluationLimits
from lean_finetune.step.loss import summed_loss, token_losses

LOAD, HELDOUT, EVALUATE, GENERATE, SAVE = "load", "heldout", "evaluate", "generate", "save"
EVALUATE_MERGED = "evaluate_merged"
EVALUATION_PHASES = (HELDOUT, EVALUATE, GENERATE, EVALUATE_MERGED)
"""Phases of held-out losses and generation."""
STATES = (WEIGHTS, QUANTISATION_STATE, ADAPTERS, OPTIMIZER)
"""Categories that do not depend on batches."""
FILE = "weight_files"
"""Category of a weight as read from its file, until it is converted."""
UNSHARDED = "whole_weights"
"""Category of weights that are unsharded on a GPU while loading shards them, or saving gathers them."""
LOADING = "loading"
"""Category of temporary memory that quantising one weight needs."""
HALF_BYTES = 2


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
    """Type of the weights in a model's files, by a config just read from its file; fp32 if not stated."""
    return config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32


def other_phases(
    config: PretrainedConfig, setting: Setting, around: OtherPhases, target: Target, update: Peak
) -> Mapping[str, Peak]:
    """Peaks of load, heldout (during training), evaluate, generate and save on the device.

    Call after `predict`, which refuses untraceable models. `update` is the predicted peak of the optimizer's phase: in
    runs on several GPUs it gives the state of one GPU. Stage evaluate always runs on one GPU.
    """
    if setting.sharing is not None:
        return _sharded_phases(config, setting, around, target, update)
    shapes, on_device = model_shapes(config), replace(setting, offload="none", optimizer_in_backward=False)
    lines = state_lines(shapes, on_device, cuda=target.foreach)
    states = dict(state_bytes(lines, granularity_bytes=target.granularity_bytes))
    states.pop(GRADIENTS)
    optimizer_bytes = states.pop(OPTIMIZER, 0)
    end = _peak({**states, OPTIMIZER: optimizer_bytes})
    return {
        LOAD: _load(shapes, setting.model, around.stored_dtype, target, states, end),
        HELDOUT: _heldout(config, setting, around, target, optimizer_bytes),
        **_evaluation(config, setting, around, target),
        SAVE: end,
    }


def _sharded_phases(
    config: PretrainedConfig, setting: Setting, around: OtherPhases, target: Target, update: Peak
) -> Mapping[str, Peak]:
    """`other_phases` on one of several GPUs."""
    shapes, sharing = model_shapes(config), setting.sharing
    assert sharing is not None
    optimizer_bytes = update.by_category.get(OPTIMIZER, 0)
    states = {category: update.by_category.get(category, 0) for category in (*STATES, SHARDING)}
    largest = max(parameter.values for parameter in shapes.parameters) * setting.model.dtype.itemsize
    # Embedding and head are sharded last: unsharded on the device once, beside the shards of all layers.
    unsharded = largest if sharing.holders > 1 else 0
    loaded = {**states, OPTIMIZER: 0, UNSHARDED: unsharded * (1 if config.get_text_config().tie_word_embeddings else 2)}
    return {
        LOAD: highest((_peak(states), _peak(loaded))),
        HELDOUT: _heldout(config, setting, around, target, optimizer_bytes),
        **_evaluation(config, replace(setting, sharing=None), around, target),
        SAVE: _peak({**states, UNSHARDED: unsharded}),
    }


def _heldout(
    config: PretrainedConfig, setting: Setting, around: OtherPhases, target: Target, optimizer_bytes: int
) -> Peak:
    """Peak of held-out losses during training."""
    shape = around.in_training
    chunk = setting.loss_chunk or shape.rows * shape.length  # As in the training loop.
    loss = peak_of_loss(config, setting, shape, target, lambda model, batch: summed_loss(model, batch, chunk))
    return _peak({**loss.by_category, OPTIMIZER: optimizer_bytes})


def _evaluation(config: PretrainedConfig, setting: Setting, around: OtherPhases, target: Target) -> dict[str, Peak]:
    """Peaks of stage evaluate, with the merged model if requested."""
    found = _evaluation_of(config, setting, around, target)
    if around.merged:
        merged = replace(setting, model=replace(setting.model, method="full"))
        found[EVALUATE_MERGED] = highest(_evaluation_of(config, merged, around, target).values())
    return found


def _evaluation_of(config: PretrainedConfig, setting: Setting, around: OtherPhases, target: Target) -> dict[str, Peak]:
    """Peaks of evaluating one model."""
    plain = replace(setting, model=replace(setting.model, attention="auto"))  # As in stage evaluate.
    loss = peak_of_loss(
        config, plain, around.evaluation, target, lambda model, batch: token_losses(model, batch, around.logits_chunk)
    )
    answers = [peak_of_answers(config, setting, shape, target) for shape in around.generation]
    return {EVALUATE: loss} | ({GENERATE: highest(answers)} if answers else {})


def evaluation_note(by_phase: Mapping[str, Peak], training_bytes: int, max_tokens: int, longest: int) -> str | None:
    """A note if evaluation needs more memory than training, with fewer tokens than `max_tokens` if they help."""
    worst = max((phase for phase in EVALUATION_PHASES if phase in by_phase), key=lambda phase: by_phase[phase].bytes)
    peak = by_phase[worst]
    if peak.bytes <= training_bytes:
        return None
    note = f"{worst} is predicted to hold {readable_size(peak.bytes)}, training {readable_size(training_bytes)}"
    states = sum(peak.by_category.get(category, 0) for category in STATES)
    # Activations grow linearly with the tokens, or faster.
    fewer = int(max_tokens * (training_bytes - states) / (peak.bytes - states))
    if worst == HELDOUT or fewer < longest:
        return f"{note}; fewer tokens in evaluate.max_tokens do not help: rows are up to {longest} long"
    return f"{note}; with -S evaluate.max_tokens={fewer} it holds no more"


def _peak(by_category: Mapping[str, int]) -> Peak:
    return Peak(bytes=sum(by_category.values()), by_category=dict(sorted(by_category.items())))


def _load(
    shapes: ModelShapes, spec: ModelSpec, stored: torch.dtype, target: Target, states: Mapping[str, int], end: Peak
) -> Peak:
    """Peak of loading: while weights are read, or at the `end` with the optimizer's state.

    Weights are read, converted and quantised one at a time, in the order of their names. A GPU gets each in its final
    type, or in 16 or 32 bits if it quantises it there.
    """
    placed, moments = 0, [end]

    def final_bytes(parameter: ParameterShape) -> int:
        """Bytes of a weight in its final type, with its scales."""
        alone = replace(shapes, parameters=(parameter,), buffer_bytes=())
        sizes = state_bytes(weight_lines(alone, spec), granularity_bytes=target.granularity_bytes)
        return sizes[WEIGHTS] + sizes.get(QUANTISATION_STATE, 0)

    for parameter in sorted(shapes.parameters, key=lambda parameter: dot_natural_key(parameter.name)):
        own = final_bytes(parameter)
        on_cpu = target.capability is None
        if parameter.experts:
            moments += _loading_experts(
                parameter, spec, stored, placed, own, by_expert=shapes.stored_by_expert, on_cpu=on_cpu
            )
        else:
            for file_bytes, loading_bytes in _temporary_bytes(parameter, spec, stored, on_cpu=on_cpu):
                moments.append(_peak({WEIGHTS: placed + own, FILE: file_bytes, LOADING: loading_bytes}))
        placed += own
    if spec.adapted and (spec.lora_dora or spec.lora_init != "default"):
        adapted = max(adapted_weights(shapes, spec), key=lambda parameter: parameter.values)
        moments.append(_peak({**states, LOADING: _adapter_init_bytes(adapted, spec, final_bytes(adapted))}))
    return highest(moments)


def _loading_experts(
    parameter: ParameterShape,
    spec: ModelSpec,
    stored: torch.dtype,
    placed: int,
    own: int,
    *,
    by_expert: bool,
    on_cpu: bool,
) -> Iterator[Peak]:
    """Moments of loading a projection of all experts, beside `placed` bytes of other weights.

    If files have a tensor for each expert, all of them and their stack exist at the same time; else the stack as read,
    and converted. Then the stack is packed, expert by expert.
    """
    stacked = parameter.values * spec.dtype.itemsize
    as_read = stacked if by_expert else parameter.values * stored.itemsize if on_cpu and stored != spec.dtype else 0
    yield _peak({WEIGHTS: placed, FILE: as_read, LOADING: stacked})
    if spec.method in PACKED_BITS:
        one = parameter.values // parameter.experts
        packing = int(one * _quantising_bytes(spec, on_cpu=on_cpu))
        yield _peak({WEIGHTS: placed + own, LOADING: stacked + packing})


def _adapter_init_bytes(weight: ParameterShape, spec: ModelSpec, final_bytes: int) -> int:
    """Temporary bytes of initialising an adapter, after all weights are loaded.

    DoRA computes the norms of the weight's rows: the adapter's product, the scaled product and their sum with the
    weight exist at the same time; a quantised weight is copied and dequantised. PiSSA needs the weight in fp32, its
    principal part and the rest; LoftQ the original weight, the quantised one and their difference.
    """
    full_bytes, fp32_bytes = weight.values * spec.dtype.itemsize, weight.values * FP32_BYTES
    norm_bytes = 3 * full_bytes + (final_bytes + full_bytes if spec.method in PACKED_BITS else 0)
    # A frozen weight that is fp32 already is one of the copies.
    copies = ADAPTER_STARTS[spec.lora_init].fp32_copies - (full_bytes == fp32_bytes and spec.method not in PACKED_BITS)
    return max(norm_bytes if spec.lora_dora else 0, copies * fp32_bytes)


def _temporary_bytes(
    parameter: ParameterShape, spec: ModelSpec, stored: torch.dtype, *, on_cpu: bool
) -> Iterator[tuple[int, int]]:
    """(bytes as read, other bytes) beside a weight's final bytes, at each moment of loading it."""
    packed = parameter.linear and spec.method in PACKED_BITS
    as_read = parameter.values * stored.itemsize if on_cpu and stored != spec.dtype else 0
    if not packed:
        yield as_read, 0
        return
    converted = parameter.values * spec.dtype.itemsize
    if as_read:
        yield as_read, converted
    yield 0, converted + int(parameter.values * _quantising_bytes(spec, on_cpu=on_cpu))


def _quantising_bytes(spec: ModelSpec, *, on_cpu: bool) -> float:
    """Temporary bytes per value while bitsandbytes quantises a weight, beside its input and output."""
    halved = 0 if spec.dtype == torch.float16 else HALF_BYTES
    if spec.method == "int8_lora":  # fp16 copy; on a CPU also scaled and rounded values.
        return halved + (2 * FP32_BYTES - 1 if on_cpu else 0)
    if not on_cpu:
        return 0
    widened = 0 if spec.dtype == torch.float32 else FP32_BYTES
    # Scaled values (fp32), their codes (int32), the codes as bytes, and every second one shifted by 4 bits.
    return widened + 2 * FP32_BYTES + 1.5
