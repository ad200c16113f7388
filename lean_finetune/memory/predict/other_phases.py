"""Memory outside of the training step: loading, held-out losses, answers, saving.

What passes through the model is traced, as the step is; loading and saving move tensors one by one, and what they hold
is a sum, stated here and checked against a measured load in the tests. Merging holds one weight more than saving.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from transformers import PretrainedConfig
from transformers.core_model_loading import dot_natural_key

from lean_finetune.config.adapter_starts import ADAPTER_STARTS
from lean_finetune.core.units import readable_size
from lean_finetune.memory.predict.evaluation_phases import GenerationShape, peak_of_answers, peak_of_loss
from lean_finetune.memory.predict.setting import Setting
from lean_finetune.memory.predict.state_formulas import (
    FP32_BYTES,
    PACKED_BITS,
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
ASKING = (HELDOUT, EVALUATE, GENERATE, EVALUATE_MERGED)
"""Phases in which a model is asked and not trained."""
STATES = (WEIGHTS, QUANTISATION_STATE, ADAPTERS, OPTIMIZER)
"""Categories that do not depend on what a model is asked."""
FILE = "weight_files"
"""Category of a weight as it was read, until it is converted."""
WHOLE = "whole_weights"
"""Category of weights that are whole on a GPU while they are cut, or gathered to be saved."""
LOADING = "loading"
"""Category of what quantising one layer needs for a moment."""
HALF_BYTES = 2
"""Of a number in 16 bits."""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What these phases depend on besides the setting."""

    stored_dtype: torch.dtype
    """Type of the weights in the model's files. (A config forgets it once a model of another type is made of it.)"""

    in_training: BatchShape
    """Largest batch of held-out rows; no larger than training's own."""
    evaluation: BatchShape
    """Largest batch of held-out rows in stage evaluate."""
    logits_chunk: int
    """Tokens whose logits exist at once there."""
    generation: tuple[GenerationShape, ...]
    """Batches of prompts in stage evaluate that can be the largest; none where none is answered."""
    merged: bool
    """evaluate.merged: whether the merged model, which is not quantised, is asked as well."""


def heldout_shape(max_tokens: int, longest: int) -> BatchShape:
    """The largest batch of held-out rows within a budget of padded tokens, all of them trained.

    Held-out rows are taken to be no longer than the longest training row, `longest`.
    """
    rows = max(1, max_tokens // longest)
    return BatchShape(rows=rows, length=longest, supervised=rows * longest, joined_lengths=None)


def generation_shapes(
    limits: EvaluationLimits, *, prompts: int, longest: int, positions: int | None
) -> tuple[GenerationShape, ...]:
    """The batches of prompts that can need the most memory; none where nothing is answered, or no prompt has room.

    That of the longest prompts may leave much of `limits.max_tokens` over; that of one prompt more does not, and where
    the longest stands alone, it alone needs no mask.

    Args:
        limits: of stage evaluate.
        prompts: how many are answered.
        longest: tokens of the longest training row; no held-out prompt is taken to be longer.
        positions: the longest row the model knows; None where it knows no end.
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
    """Type of a model's weights in its files, of a config fresh from its file; fp32 where it does not say."""
    return config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32


def other_phases(
    config: PretrainedConfig, setting: Setting, around: Surroundings, target: Target, update: Peak
) -> Mapping[str, Peak]:
    """Peaks of load, heldout (during training), evaluate, generate and save, on the device.

    The setting has been predicted before, so what cannot be traced was refused there. `update` is its peak in the
    optimizer's phase: where several GPUs share the run, it tells what one of them holds. Stage evaluate is one GPU's.
    """
    if setting.sharing is not None:
        return _of_one_of_many(config, setting, around, target, update)
    unsharded = replace(setting, offload="none", optimizer_in_backward=False)
    lines = state_lines(model_shapes(config), unsharded, cuda=target.foreach)
    states = dict(state_bytes(lines, granularity_bytes=target.granularity_bytes))
    states.pop(GRADIENTS)
    optimizer_bytes = states.pop(OPTIMIZER, 0)
    heldout = _heldout(config, setting, around, target)
    asked = _asked(config, setting, around, target)
    return {
        LOAD: _load(config, setting, around.stored_dtype, target, states, optimizer_bytes),
        HELDOUT: _peak({**heldout.by_category, OPTIMIZER: optimizer_bytes}),
        **asked,
        SAVE: _peak({**states, OPTIMIZER: optimizer_bytes}),
    }


def _of_one_of_many(
    config: PretrainedConfig, setting: Setting, around: Surroundings, target: Target, update: Peak
) -> Mapping[str, Peak]:
    """The same where several GPUs share the run: of one of them, and of the one that evaluates."""
    shapes, sharing = model_shapes(config), setting.sharing
    assert sharing is not None
    optimizer_bytes = update.by_category.get(OPTIMIZER, 0)
    kept = {category: update.by_category.get(category, 0) for category in (*STATES, SHARDING)}
    largest = max(parameter.values for parameter in shapes.parameters) * setting.model.dtype.itemsize
    # The last to be cut is what no layer holds: whole on the device once, beside the parts of all layers.
    uncut = largest if sharing.holders > 1 else 0
    loaded = {**kept, OPTIMIZER: 0, WHOLE: uncut * (1 if config.get_text_config().tie_word_embeddings else 2)}
    return {
        LOAD: max(_peak(kept), _peak(loaded), key=lambda peak: peak.bytes),
        HELDOUT: _peak({**_heldout(config, setting, around, target).by_category, OPTIMIZER: optimizer_bytes}),
        **_asked(config, replace(setting, sharing=None), around, target),
        SAVE: _peak({**kept, WHOLE: uncut}),
    }


def _heldout(config: PretrainedConfig, setting: Setting, around: Surroundings, target: Target) -> Peak:
    """The peak of held-out losses during training, but for the optimizer's state."""
    shape = around.in_training
    chunk = setting.loss_chunk or shape.rows * shape.length  # As the loop has it.
    return peak_of_loss(config, setting, shape, target, lambda model, batch: summed_loss(model, batch, chunk))


def _asked(config: PretrainedConfig, setting: Setting, around: Surroundings, target: Target) -> dict[str, Peak]:
    """Peaks of stage evaluate's questions, to the merged model too where it is asked."""
    found = _asked_of_one(config, setting, around, target)
    if around.merged:
        whole = replace(setting, model=replace(setting.model, method="full"))
        merged = _asked_of_one(config, whole, around, target).values()
        found[EVALUATE_MERGED] = max(merged, key=lambda peak: peak.bytes)
    return found


def _asked_of_one(config: PretrainedConfig, setting: Setting, around: Surroundings, target: Target) -> dict[str, Peak]:
    """Peaks of its questions to one model."""
    plain = replace(setting, model=replace(setting.model, attention="auto"))  # As stage evaluate loads it.
    loss = peak_of_loss(
        config, plain, around.evaluation, target, lambda model, batch: token_losses(model, batch, around.logits_chunk)
    )
    answers = [peak_of_answers(config, setting, shape, target) for shape in around.generation]
    return {EVALUATE: loss} | ({GENERATE: max(answers, key=lambda peak: peak.bytes)} if answers else {})


def note_of_asking(by_phase: Mapping[str, Peak], training_bytes: int, max_tokens: int, longest: int) -> str | None:
    """What to tell of a model that takes more memory to be asked than to be trained; None where none does.

    Args:
        by_phase: peaks of all phases.
        training_bytes: the highest of the training step.
        max_tokens: padded tokens in a batch of stage evaluate.
        longest: tokens of the longest training row.
    """
    highest = max((phase for phase in ASKING if phase in by_phase), key=lambda phase: by_phase[phase].bytes)
    peak = by_phase[highest]
    if peak.bytes <= training_bytes:
        return None
    told = f"{highest} is predicted to hold {readable_size(peak.bytes)}, training {readable_size(training_bytes)}"
    states = sum(peak.by_category.get(category, 0) for category in STATES)
    # What passes through the model grows in step with the tokens, or faster.
    fewer = int(max_tokens * (training_bytes - states) / (peak.bytes - states))
    if highest == HELDOUT or fewer < longest:
        return f"{told}; fewer tokens in evaluate.max_tokens do not mend that: rows are up to {longest} long"
    return f"{told}; with -S evaluate.max_tokens={fewer} it holds no more"


def _peak(by_category: Mapping[str, int]) -> Peak:
    """A peak from its parts."""
    return Peak(bytes=sum(by_category.values()), by_category=dict(sorted(by_category.items())))


def _load(
    config: PretrainedConfig,
    setting: Setting,
    stored: torch.dtype,
    target: Target,
    states: Mapping[str, int],
    optimizer_bytes: int,
) -> Peak:
    """The most held while weights arrive or, where that is more, at the end with the optimizer's state.

    Weights arrive one at a time, in the order of their names: read, converted, packed, and only then the next. A GPU
    gets each in its final type, or in 16 or 32 bits where it packs it there.
    """
    end = _peak({**states, OPTIMIZER: optimizer_bytes})
    spec, placed, moments = setting.model, 0, [end]
    shapes = model_shapes(config)

    def stays(parameter: ParameterShape) -> int:
        """Bytes of a weight in its final type, with what its packing keeps."""
        alone = replace(shapes, parameters=(parameter,), buffer_bytes=())
        kept = state_bytes(weight_lines(alone, spec), granularity_bytes=target.granularity_bytes)
        return kept[WEIGHTS] + kept.get(QUANTISATION_STATE, 0)

    for parameter in sorted(shapes.parameters, key=lambda parameter: dot_natural_key(parameter.name)):
        own = stays(parameter)
        for file_bytes, loading_bytes in _passing(parameter, spec, stored, on_cpu=target.capability is None):
            moments.append(_peak({WEIGHTS: placed + own, FILE: file_bytes, LOADING: loading_bytes}))
        placed += own
    if spec.adapted and (spec.lora_dora or spec.lora_init != "default"):
        adapted = max(adapted_weights(shapes, spec), key=lambda parameter: parameter.values)
        moments.append(_peak({**states, LOADING: _starting_bytes(adapted, spec, stays(adapted))}))
    return max(moments, key=lambda peak: peak.bytes)


def _starting_bytes(weight: ParameterShape, spec: ModelSpec, stays_bytes: int) -> int:
    """Bytes that the start of an adapter takes beside the model, once all weights are there.

    DoRA measures the rows of the weight: the product of the adapter, that product scaled, and the weight with it are
    there at once; a packed weight is copied as it is, and unpacked. PiSSA has the weight in fp32, what it takes of it,
    and what is left; LoftQ the weight of the files, the packed one and their difference.
    """
    full_bytes, fp32_bytes = weight.values * spec.dtype.itemsize, weight.values * FP32_BYTES
    measuring = 3 * full_bytes + (stays_bytes + full_bytes if spec.method in PACKED_BITS else 0)
    # A frozen weight that is fp32 already is one of the copies.
    copies = ADAPTER_STARTS[spec.lora_init].fp32_copies - (full_bytes == fp32_bytes and spec.method not in PACKED_BITS)
    return max(measuring if spec.lora_dora else 0, copies * fp32_bytes)


def _passing(
    parameter: ParameterShape, spec: ModelSpec, stored: torch.dtype, *, on_cpu: bool
) -> Iterator[tuple[int, int]]:
    """(bytes as read, other bytes) beside what stays of a weight, at each moment of its arrival."""
    packed = parameter.linear and spec.method in PACKED_BITS
    as_read = parameter.values * stored.itemsize if on_cpu and stored != spec.dtype else 0
    if not packed:
        yield as_read, 0
        return
    converted = parameter.values * spec.dtype.itemsize
    if as_read:
        yield as_read, converted
    yield 0, converted + int(parameter.values * _packing_bytes(spec, on_cpu=on_cpu))


def _packing_bytes(spec: ModelSpec, *, on_cpu: bool) -> float:
    """Bytes per value that bitsandbytes needs while it packs a weight, beside the weight and what stays of it."""
    halved = 0 if spec.dtype == torch.float16 else HALF_BYTES
    if spec.method == "int8_lora":  # A copy in fp16; on a CPU its scaled values and those rounded, less the bytes kept.
        return halved + (2 * FP32_BYTES - 1 if on_cpu else 0)
    if not on_cpu:
        return 0
    widened = 0 if spec.dtype == torch.float32 else FP32_BYTES
    # Values scaled (fp32), their numbers (int32), those in a byte, and every second of them shifted by half a byte.
    return widened + 2 * FP32_BYTES + 1.5
