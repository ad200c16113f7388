"""Peaks of the phases beside the step: loading, held-out losses, answers, saving."""

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.core_model_loading import dot_natural_key

from cuda_memory.units import readable_size
from lean_finetune.config.adapter_starts import ADAPTER_STARTS
from lean_finetune.config.field_types import SPLIT_WEIGHTS
from lean_finetune.config.schema import Train
from lean_finetune.memory.predict.evaluation_phases import (
    GenerationShape,
    highest,
    peak_of,
    peak_of_answers,
    peak_of_loss,
)
from lean_finetune.memory.predict.state_formulas import (
    FP32_BYTES,
    PACKED_BITS,
    ModelShapes,
    ParameterShape,
    adapted_weights,
    copied_weights,
    kept_book_bytes,
    model_shapes,
    state_bytes,
    state_lines,
    trained_parts,
    weight_lines,
)
from lean_finetune.memory.predict.traced_step import TracedModel
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
from lean_finetune.model.experts.grouped_matmul import BLOCK_WEIGHTS
from lean_finetune.model.files.quantized_checkpoint import (
    BITSANDBYTES,
    FP8,
    MXFP4,
    ROWS_AT_ONCE,
    UNPACKED,
    fp8_block,
    stored_format,
    without_quantisation,
)
from lean_finetune.model.model_config import ties_embedding
from lean_finetune.model.precision import adapter_dtype, base_dtype
from lean_finetune.model.trained_rows import MEAN_ROWS, token_ids
from lean_finetune.rows.attachment import AttachedShape, Attachment, Measure
from lean_finetune.step.batches import Batch, BatchShape
from lean_finetune.step.evaluation_limits import LOGITS_CHUNK, ROWS_OF_LONGEST, EvaluationLimits
from lean_finetune.step.loss import summed_loss, token_losses
from lean_finetune.step.step_loss import TokenLoss

FILE = "weight_files"
"""Category of a weight as read from its file, until it is converted."""
LOADING = "loading"
"""Category of temporary memory that quantising one weight needs."""
HALF_BYTES = 2
PACKED_EXPERT_BYTES = 1 + FP32_BYTES / BLOCK_WEIGHTS
"""Of a value of an expert that is packed and not yet in the stack: 8 bits, or 4 and 4 of the one before; its scales."""
MXFP4_VALUE_BYTES = 4 + 7 / 32
"""Of an expert while it is unpacked: an integer for two values, 16 bits a value, and for 32 values a scale thrice."""


def load_peak(
    model: TracedModel, shapes: ModelShapes, stored: torch.dtype, states: Mapping[str, int], end: Peak
) -> Peak:
    """Peak of loading: while weights are read, or at the `end` with the optimizer's state.

    Weights are read, converted and quantised one at a time, in the order of their names. A GPU gets each in its final
    type, or in 16 or 32 bits if it quantises it there. Weights in MXFP4 or FP8 are unpacked on the host first.
    """
    config, train, target = model.config, model.setting.train, model.target
    placed, moments = kept_book_bytes(model.setting, cuda=target.foreach), [end]
    on_cpu, as_stored = target.capability is None, stored_format(config) in BITSANDBYTES

    def final_bytes(parameter: ParameterShape) -> int:
        """Bytes of a weight in its final type, with its scales."""
        alone = replace(shapes, parameters=(parameter,), buffer_bytes=())
        sizes = state_bytes(weight_lines(alone, train), granularity_bytes=target.granularity_bytes)
        return sizes[WEIGHTS] + sizes.get(QUANTISATION_STATE, 0)

    for parameter in sorted(shapes.parameters, key=lambda parameter: dot_natural_key(parameter.name)):
        own = final_bytes(parameter)
        unpacking = _unpacking_bytes(parameter, config) if on_cpu else 0
        in_file = UNPACKED if unpacking else stored
        if unpacking:
            unpacked = parameter.values * UNPACKED.itemsize
            moments.append(peak_of({WEIGHTS: placed, FILE: unpacked, LOADING: unpacking}))
        if parameter.experts:
            moments += _loading_experts(
                parameter, train, in_file, placed, own, by_expert=shapes.stored_by_expert, on_cpu=on_cpu
            )
        elif not (as_stored and parameter.linear):
            for file_bytes, loading_bytes in _temporary_bytes(parameter, train, in_file, on_cpu=on_cpu):
                moments.append(peak_of({WEIGHTS: placed + own, FILE: file_bytes, LOADING: loading_bytes}))
        placed += own
    if train.adapted and (train.lora.dora or train.lora.init != "default"):
        adapted = max(adapted_weights(shapes, train), key=lambda parameter: parameter.values)
        moments.append(peak_of({**states, LOADING: _adapter_init_bytes(adapted, train, final_bytes(adapted))}))
    if train.adapted:
        moments.append(peak_of({WEIGHTS: placed, LOADING: _new_rows_bytes(shapes, train, config)}))
        started = {category: size for category, size in states.items() if category != OPTIMIZER}
        moments.append(peak_of({**started, LOADING: _converting_bytes(shapes, train)}))
    return highest(moments)


def _new_rows_bytes(shapes: ModelShapes, train: Train, config: PretrainedConfig) -> int:
    """Temporary bytes of new rows for trained tokens: the old weight, then some of its rows in fp32 for their mean."""
    if max(token_ids(train), default=-1) + 1 < config.get_text_config().vocab_size:
        return 0  # Else rows were added, unless the last token is trained and has one.
    temporary = [0]
    for parameter in (one for one in shapes.parameters if one.of_tokens):
        rows, columns = parameter.shape
        averaged = 0 if base_dtype(train) == torch.float32 else min(MEAN_ROWS, rows) * columns * FP32_BYTES
        temporary.append(max(parameter.values * base_dtype(train).itemsize, averaged))
    return max(temporary)


def _converting_bytes(shapes: ModelShapes, train: Train) -> int:
    """Most bytes beside the final state while weights that are trained in full are converted, one by one.

    They are in the type of the base before, and in that of adapters then.
    """
    before, after = base_dtype(train).itemsize, adapter_dtype(train).itemsize
    if before == after:
        return 0
    names = {one.name for one in (*copied_weights(shapes, train), *trained_parts(shapes, train))}
    most = later = 0
    for parameter in reversed([one for one in shapes.parameters if one.name in names]):
        most = max(most, parameter.values * before - later)
        later += parameter.values * (after - before)
    return most


def _unpacking_bytes(parameter: ParameterShape, config: PretrainedConfig) -> int:
    """Temporary bytes of unpacking a weight, beside the unpacked one; 0 if the files have it in 16 bits or more.

    A linear layer that an FP8 checkpoint has in 16 bits counts too: at most `ROWS_AT_ONCE` of its rows.
    """
    found = stored_format(config)
    if found == MXFP4 and parameter.experts:
        return int(parameter.values // parameter.experts * MXFP4_VALUE_BYTES)
    if found == FP8 and parameter.linear:
        (rows, columns), (height, width) = parameter.shape, fp8_block(config)
        at_once, grid_columns = min(rows, ROWS_AT_ONCE), -(-columns // width)
        scales = (-(-rows // height) + at_once) * grid_columns
        return FP32_BYTES * (at_once * (columns + grid_columns * width) + scales)
    return 0


def _loading_experts(
    parameter: ParameterShape,
    train: Train,
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
    stacked = parameter.values * base_dtype(train).itemsize
    as_read = (
        stacked if by_expert else parameter.values * stored.itemsize if on_cpu and stored != base_dtype(train) else 0
    )
    yield peak_of({WEIGHTS: placed, FILE: as_read, LOADING: stacked})
    if train.method in PACKED_BITS:
        one = parameter.values // parameter.experts
        packing = int(one * (_quantising_bytes(train, on_cpu=on_cpu) + PACKED_EXPERT_BYTES))
        yield peak_of({WEIGHTS: placed + own, LOADING: stacked + packing})


def _adapter_init_bytes(weight: ParameterShape, train: Train, final_bytes: int) -> int:
    """Temporary bytes of initialising an adapter, after all weights are loaded.

    DoRA computes the norms of the weight's rows: the adapter's product, the scaled product and their sum with the
    weight exist at the same time; a quantised weight is copied and dequantised. PiSSA needs the weight in fp32, its
    principal part and the rest; LoftQ the original weight, the quantised one and their difference.
    """
    full_bytes, fp32_bytes = weight.values * base_dtype(train).itemsize, weight.values * FP32_BYTES
    norm_bytes = 3 * full_bytes + (final_bytes + full_bytes if train.method in PACKED_BITS else 0)
    # A frozen weight that is fp32 already is one of the copies.
    copies = ADAPTER_STARTS[train.lora.init].fp32_copies - (
        full_bytes == fp32_bytes and train.method not in PACKED_BITS
    )
    return max(norm_bytes if train.lora.dora else 0, copies * fp32_bytes)


def _temporary_bytes(
    parameter: ParameterShape, train: Train, stored: torch.dtype, *, on_cpu: bool
) -> Iterator[tuple[int, int]]:
    """(bytes as read, other bytes) beside a weight's final bytes, at each moment of loading it."""
    packed = parameter.linear and train.method in PACKED_BITS
    as_read = parameter.values * stored.itemsize if on_cpu and stored != base_dtype(train) else 0
    if not packed:
        yield as_read, 0
        return
    converted = parameter.values * base_dtype(train).itemsize
    if as_read:
        yield as_read, converted
    yield 0, converted + int(parameter.values * _quantising_bytes(train, on_cpu=on_cpu))


def _quantising_bytes(train: Train, *, on_cpu: bool) -> float:
    """Temporary bytes per value while bitsandbytes quantises a weight, beside its input and output."""
    halved = 0 if base_dtype(train) == torch.float16 else HALF_BYTES
    if train.method == "int8_lora":  # fp16 copy; on a CPU also scaled and rounded values.
        return halved + (2 * FP32_BYTES - 1 if on_cpu else 0)
    if not on_cpu:
        return 0
    widened = 0 if base_dtype(train) == torch.float32 else FP32_BYTES
    # Scaled values (fp32), their codes (int32), the codes as bytes, and every second one shifted by 4 bits.
    return widened + 2 * FP32_BYTES + 1.5


# Predict memory outside of the training step: loading, held-out losses, generation, saving.
#
# Forward passes are traced, as the step is. Loading and saving move tensors one by one; their memory is a sum, which
# tests compare with measured loads. Merging needs one weight more than saving.

LOAD, HELDOUT, EVALUATE, GENERATE, SAVE = "load", "heldout", "evaluate", "generate", "save"
REFERENCE = "reference"
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
    in_training: tuple[BatchShape, ...]
    """Candidates for the largest batch of held-out rows during training."""
    evaluation: tuple[BatchShape, ...]
    """The same in stage evaluate."""
    logits_chunk: int
    """Tokens whose logits exist at the same time in stage evaluate."""
    generation: tuple[GenerationShape, ...]
    """Candidates for the largest batch of prompts in stage evaluate; empty if nothing is generated."""
    merged: bool
    """evaluate.merged: also evaluate the merged model, which is not quantised."""
    reference: BatchShape | None = None
    """Largest batch of stage reference; None for objectives without one."""
    continued: bool = False
    """Whether the model before training has adapters, which go on."""


def heldout_shape(max_tokens: int, longest: int) -> BatchShape:
    """The largest batch of held-out rows within a budget of padded tokens, all of them supervised."""
    rows = max(1, max_tokens // longest)
    return BatchShape(rows=rows, length=longest, supervised=rows * longest, packed_lengths=None)


def shapes_carried(
    lengths: np.ndarray,
    attached: Iterable[Attachment],
    max_tokens: int,
    limits: Mapping[str, int] = MappingProxyType({}),
) -> Iterator[BatchShape]:
    """Batches of held-out rows of `lengths` tokens that can have most of what rows carry, of each measure of it.

    They are within a budget of padded tokens. With `limits`, other rows may fill a batch up to them where equal ones
    do not: these have up to a row more.
    """
    for one in attached:
        for measure in one.measures:
            at_once = np.maximum(1, max_tokens // lengths)
            if measure.limit in limits:
                at_once = np.minimum(at_once, -(-limits[measure.limit] // np.maximum(1, measure.values)))
            row = _fullest(measure, at_once)
            rows, length = at_once.item(row), lengths.item(row)
            shapes = _equal_rows(one, row, rows)
            yield BatchShape(rows=rows, length=length, supervised=rows * length, packed_lengths=None, attached=shapes)


def prompts_carried(
    lengths: np.ndarray, attached: Iterable[Attachment], limits: EvaluationLimits
) -> Iterator[GenerationShape]:
    """Batches of prompts of such rows that can have most, of each measure."""
    at_once = np.array([limits.prompts_at_once(length) for length in lengths.tolist()])
    for one in attached:
        for measure in one.measures:
            row = _fullest(measure, at_once)
            rows = at_once.item(row)
            yield GenerationShape(
                rows=rows,
                prompt_tokens=lengths.item(row),
                new_tokens=limits.max_new_tokens,
                attached=_equal_rows(one, row, rows),
            )


def _fullest(measure: Measure, at_once: np.ndarray) -> int:
    """The row of which a batch has most, where so many rows like it fit in one."""
    return int((at_once * measure.values).argmax())


def _equal_rows(attachment: Attachment, row: int, rows: int) -> tuple[AttachedShape, ...]:
    """What a batch of so many rows like one has of an attachment."""
    shape = attachment.shape_of(np.full(rows, row))
    return () if shape is None else (shape,)


def reference_shape(longest: int) -> BatchShape:
    """The largest batch of stage reference."""
    return heldout_shape(ROWS_OF_LONGEST * longest, longest)


def generation_shapes(
    limits: EvaluationLimits, *, prompts: int, longest: int, positions: int | None
) -> tuple[GenerationShape, ...]:
    """Batches of prompts that can need the most memory; none if nothing is generated, or no prompt has room.

    The batch of the longest prompts may leave much of `limits.max_tokens` unused. A batch of one prompt more does not,
    and needs a mask even if the longest prompt is alone in its batch. The longest prompt is assumed to have as many
    tokens as the longest row. `positions` is the model's max_position_embeddings; None if unlimited.
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


def other_phases(model: TracedModel, around: OtherPhases, update: Peak) -> Mapping[str, Peak]:
    """Peaks of load, reference, heldout (during training), evaluate, generate and save on the device.

    Call after `predict`, which refuses untraceable models. `update` is the predicted peak of the optimizer's phase: in
    runs on several GPUs it gives the state of one GPU. Stage evaluate always runs on one GPU.
    """
    load, save = load_and_save(model, around.stored_dtype, update)
    return {
        LOAD: load,
        **({} if around.reference is None else {REFERENCE: _reference(model, around.reference, around.continued)}),
        HELDOUT: _heldout(model, around, save.by_category.get(OPTIMIZER, 0)),
        **_evaluation(model.with_setting(model.setting.on_one_gpu), around),
        SAVE: save,
    }


def load_and_save(model: TracedModel, stored: torch.dtype, update: Peak) -> tuple[Peak, Peak]:
    """Peaks of loading and of saving; `stored` is the type of the weights in their files, `update` as above."""
    setting, target, shapes = model.setting, model.target, model_shapes(model.config)
    if not setting.distributed:
        on_device = setting.with_train(optimizer_in_backward=False)
        lines = state_lines(shapes, on_device, cuda=target.foreach)
        states = dict(state_bytes(lines, granularity_bytes=target.granularity_bytes))
        states.pop(GRADIENTS)
        optimizer_bytes = states.pop(OPTIMIZER, 0)
        end = peak_of({**states, OPTIMIZER: optimizer_bytes})
        return load_peak(model, shapes, stored, states, end), end
    states = {category: update.by_category.get(category, 0) for category in (*STATES, SHARDING)}
    largest = max(parameter.values for parameter in shapes.parameters) * base_dtype(setting.train).itemsize
    # Embedding and head are sharded last: unsharded on the device once, beside the shards of all layers.
    unsharded = largest if setting.mode in SPLIT_WEIGHTS or setting.layout.tensor > 1 else 0
    tied = ties_embedding(model.config)
    loaded = {**states, OPTIMIZER: 0, UNSHARDED: unsharded * (1 if tied else 2)}
    return highest((peak_of(states), peak_of(loaded))), peak_of({**states, UNSHARDED: unsharded})


def _heldout(model: TracedModel, around: OtherPhases, optimizer_bytes: int) -> Peak:
    """Peak of held-out losses during training."""
    # As in the training loop.
    chunk = model.setting.train.loss_chunk or max(shape.rows * shape.length for shape in around.in_training)

    def loss_of(module: nn.Module, batch: Batch, exchange: TokenExchange | None) -> torch.Tensor:
        return summed_loss(module, batch, TokenLoss(chunk), exchange=exchange)

    stages = [model.with_setting(each) for each in model.setting.stages]
    loss = highest(peak_of_loss(stage, shape, loss_of) for stage in stages for shape in around.in_training)
    return peak_of({**loss.by_category, OPTIMIZER: optimizer_bytes})


def _reference(model: TracedModel, shape: BatchShape, continued: bool) -> Peak:
    """Peak of stage reference, which runs on one GPU, without adapters unless these go on."""
    plain = model.with_setting(model.setting.on_one_gpu.with_train(attention="auto", fused_kernels="none"))

    def losses_of(module: nn.Module, batch: Batch, exchange: TokenExchange | None) -> torch.Tensor:
        return token_losses(module, batch, LOGITS_CHUNK)

    return peak_of_loss(plain, shape, losses_of, adapted=continued)


def _evaluation(model: TracedModel, around: OtherPhases) -> dict[str, Peak]:
    """Peaks of stage evaluate, with the merged model if requested."""
    found = _evaluation_of(model, around)
    if around.merged:
        plain = model.with_config(without_quantisation(deepcopy(model.config)))
        merged = plain.with_setting(model.setting.with_train(method="full"))
        found[EVALUATE_MERGED] = highest(_evaluation_of(merged, around).values())
    return found


def _evaluation_of(model: TracedModel, around: OtherPhases) -> dict[str, Peak]:
    """Peaks of evaluating one model."""
    # As in stage evaluate.
    lora = model.setting.train.lora.model_copy(update={"joined": "none"})
    own_code = model.setting.with_train(attention="auto", fused_kernels="none", fused_norms="none", lora=lora)
    plain = model.with_setting(own_code)

    def loss_of(module: nn.Module, batch: Batch, exchange: TokenExchange | None) -> torch.Tensor:
        return token_losses(module, batch, around.logits_chunk)

    loss = highest(peak_of_loss(plain, shape, loss_of) for shape in around.evaluation)
    answers = [peak_of_answers(plain, shape) for shape in around.generation]
    return {EVALUATE: loss} | ({GENERATE: highest(answers)} if answers else {})


def loading_note(load_bytes: int, training_bytes: int) -> str | None:
    """A note if loading the weights needs more memory than training, whose peak decides the verdict."""
    if load_bytes <= training_bytes:
        return None
    return f"loading is predicted to take {readable_size(load_bytes)}, training {readable_size(training_bytes)}"


def reference_note(by_phase: Mapping[str, Peak], training_bytes: int) -> str | None:
    """A note if stage reference needs more memory than training."""
    if REFERENCE not in by_phase or by_phase[REFERENCE].bytes <= training_bytes:
        return None
    needed, training = readable_size(by_phase[REFERENCE].bytes), readable_size(training_bytes)
    return f"stage reference is predicted to take {needed}, training {training}; a lower data.max_length needs less"


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
