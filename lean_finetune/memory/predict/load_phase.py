"""Predict memory while a model is loaded: weights are read, converted and quantised one by one, in order of names."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from transformers import PretrainedConfig
from transformers.core_model_loading import dot_natural_key

from lean_finetune.config.adapter_starts import ADAPTER_STARTS
from lean_finetune.config.train_schema import Train
from lean_finetune.memory.predict.evaluation_phases import highest, peak_of
from lean_finetune.memory.predict.state_formulas import (
    FP32_BYTES,
    PACKED_BITS,
    ModelShapes,
    ParameterShape,
    adapted_weights,
    state_bytes,
    weight_lines,
)
from lean_finetune.memory.trace.cuda_kernels import Target
from lean_finetune.memory.trace.memory_trace import QUANTISATION_STATE, WEIGHTS, Peak
from lean_finetune.model.experts.grouped_products import BLOCK_WEIGHTS
from lean_finetune.model.files.quantized_checkpoint import (
    BITSANDBYTES,
    FP8,
    MXFP4,
    ROWS_AT_ONCE,
    UNPACKED,
    fp8_block,
    stored_format,
)
from lean_finetune.model.precision import base_dtype

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
    config: PretrainedConfig,
    shapes: ModelShapes,
    train: Train,
    stored: torch.dtype,
    target: Target,
    states: Mapping[str, int],
    end: Peak,
) -> Peak:
    """Peak of loading: while weights are read, or at the `end` with the optimizer's state.

    Weights are read, converted and quantised one at a time, in the order of their names. A GPU gets each in its final
    type, or in 16 or 32 bits if it quantises it there. Weights in MXFP4 or FP8 are unpacked on the host first.
    """
    placed, moments = 0, [end]
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
    return highest(moments)


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
