"""Predict the memory of evaluation: held-out losses, and generation with its KV cache.

Shapes: B prompts, T tokens of a prompt, H key/value heads, D head size.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from lean_finetune.core.errors import UserError
from lean_finetune.memory.predict.depth_extrapolation import NotRepeated, WindowTrace, deep_peaks, deep_windows
from lean_finetune.memory.predict.layer_repetition import find_repetition, with_layers
from lean_finetune.memory.predict.traced_step import CPU, Trace, TracedModel, new_trace
from lean_finetune.memory.trace.alike_parts import part_loop, skipping_parts
from lean_finetune.memory.trace.cached_fake_mode import UNTRACEABLE
from lean_finetune.memory.trace.cuda_kernels import without_launches
from lean_finetune.memory.trace.fake_batches import TEXT_ALONE, FakeBatches, Given
from lean_finetune.memory.trace.memory_trace import ADAPTERS, QUANTISATION_STATE, WEIGHTS, MemoryTrace, Peak
from lean_finetune.memory.trace.registered_state import shared
from lean_finetune.model.attention.kernels import TokenExchange
from lean_finetune.model.load_model import fake_model
from lean_finetune.model.precision import autocast
from lean_finetune.model.quantize import quantisation_tensors
from lean_finetune.rows.attachment import AttachedShape
from lean_finetune.step.batches import Batch, BatchShape
from lean_finetune.step.loss import causal_lm
from lean_finetune.step.parallel_model import ParallelModel, local, named_trained

KV_CACHE = "kv_cache"
"""Category of the KV cache."""
Use = Callable[[ParallelModel, MemoryTrace], None]
"""Runs a model, in phases of the trace."""


@dataclass(frozen=True, kw_only=True)
class GenerationShape:
    """A batch of prompts to answer."""

    rows: int
    prompt_tokens: int
    new_tokens: int
    """Length of the longest answer."""
    attached: tuple[AttachedShape, ...] = ()
    """What the prompts carry besides tokens; empty for that of the row with most."""


def peak_of_loss(
    model: TracedModel,
    shape: BatchShape,
    loss: Callable[[nn.Module, Batch, TokenExchange | None], torch.Tensor],
    *,
    adapted: bool = True,
) -> Peak:
    """Peak of computing the loss of one batch in evaluation mode; `adapted`: with the adapters of the method."""

    def use(parallel: ParallelModel, trace: MemoryTrace) -> None:
        with trace.phase("forward"):
            make = partial(model.fakes.like_worst, shape, parallel.layout.context)
            parallel.run(lambda module: loss(module, make(), parallel.exchange))

    return _peak_of_use(model, use, adapted=adapted)


def peak_of_answers(model: TracedModel, shape: GenerationShape) -> Peak:
    """Peak of greedy decoding: at the prefill, or at the last token, when the KV cache is longest.

    Raises:
        UserError: PyTorch cannot trace an operation.
    """
    try:
        return _peak_of_use(
            model, lambda parallel, trace: _answer(causal_lm(parallel.model), shape, trace, model.fakes)
        )
    except UNTRACEABLE as error:
        raise UserError(
            f"evaluate.generate_rows: answers of {model.config.model_type} cannot be traced ({type(error).__name__}: "
            f"{error}), so their memory is not known; set evaluate.generate_rows=0"
        ) from None


def _peak_of_use(model: TracedModel, use: Use, *, adapted: bool = True) -> Peak:
    """Highest peak of `use`, extrapolated from shallow models if the layers repeat."""
    train = model.setting.train.with_value("grad_ckpt_layers", None)  # Nothing is recomputed, so all layers are alike.
    model = model.with_setting(replace(model.setting, train=train))
    repetition, _ = find_repetition(model.config, train)
    granularity_bytes = model.target.granularity_bytes
    if repetition is not None and model.setting.layout.pipeline == 1:
        try:
            shallow = (model.with_config(with_layers(model.config, depth)) for depth in repetition.depths)
            traces = [_traced(WindowTrace, each, use, adapted) for each in shallow]
            windows = deep_windows(traces, repetition, granularity_bytes)
            return highest(deep_peaks(windows, granularity_bytes)[0].values())
        except NotRepeated:
            pass  # Trace all layers: slower, same result.
    return highest(_traced(MemoryTrace, model, use, adapted).peaks().values())


def peak_of(by_category: Mapping[str, int]) -> Peak:
    """A moment's memory, from its bytes by category."""
    return Peak(bytes=sum(by_category.values()), by_category=dict(sorted(by_category.items())))


def highest(peaks: Iterable[Peak]) -> Peak:
    """The peak with the most bytes."""
    return max(peaks, key=lambda peak: peak.bytes)


def _traced(kind: type[Trace], model: TracedModel, use: Use, adapted: bool) -> Trace:
    """Trace `use` of a model in evaluation mode."""
    return skipping_parts(partial(_traced_in, kind, model, use, adapted))


def _traced_in(kind: type[Trace], model: TracedModel, use: Use, adapted: bool, skip: bool) -> Trace:
    """`_traced`; `skip`: without running parts of a loop that are alike."""
    trace, setting, target = new_trace(kind, model), model.setting, model.target
    with (
        model.fakes.mode(),
        target.attention(),
        without_launches(setting.train.fused_kernels, target.multiprocessors, target.capability),
        shared(fake_model(model.config, setting.train, CPU, adapted=adapted), setting, trace, CPU) as parallel,
    ):
        module = parallel.model.eval()
        trace.register([local(tensor) for tensor in (*module.parameters(), *module.buffers())], WEIGHTS)
        trace.register(quantisation_tensors(module), QUANTISATION_STATE)
        if setting.train.adapted and adapted:
            trace.register([local(tensor) for _, tensor in named_trained(module)], ADAPTERS)
        trace.begin_steps(module)
        with (
            trace.recording(),
            part_loop(trace, skip=skip, all_events=False),
            torch.no_grad(),
            autocast(setting.train, "cpu"),
        ):
            use(parallel, trace)
    return trace


def _answer(lm: PreTrainedModel, shape: GenerationShape, trace: MemoryTrace, fakes: FakeBatches = TEXT_ALONE) -> None:
    """Call the model as `generate` does, for the prompts and for the last token; `generate` itself reads values.

    `fakes` give each prompt what the shape carries besides tokens, or the worst row.
    """
    B, T = shape.rows, shape.prompt_tokens
    prompts_BT, mask_BT = (torch.empty((B, T), dtype=torch.int64) for _ in range(2))  # Kept by the caller.
    prompts = BatchShape(rows=B, length=T, supervised=0, packed_lengths=None, attached=shape.attached)
    given = fakes.of_worst(prompts)
    with trace.phase("prompts"):
        cache = DynamicCache(config=lm.config.get_text_config())
        scores_BV = _forward(lm, T, T, mask_BT, cache, given)
        _register_cache(cache, trace)
    if shape.new_tokens == 1:
        return
    # The call before the last token is read creates it.
    longest = T + shape.new_tokens - 1
    cache = _grow(lm, cache, longest - 1)
    _register_cache(cache, trace)
    tokens_BT = torch.empty((B, longest), dtype=torch.int64)
    with trace.phase("last token"):
        _forward(lm, longest, 1, torch.ones_like(tokens_BT), cache)
        _register_cache(cache, trace)
    del prompts_BT, mask_BT, scores_BV, tokens_BT  # `generate` keeps them until here.


def _forward(
    lm: Any,
    tokens: int,
    new: int,
    mask_BT: torch.Tensor,
    cache: DynamicCache,
    given: Given | None = None,
) -> torch.Tensor:
    """Run the model on the last `new` of `tokens` tokens; returns the scores of the next token, fp32 (B, V).

    `given` are token ids, and the model's other arguments.
    """
    positions_BT = mask_BT.cumsum(-1) - 1
    last_alone = {"logits_to_keep": 1} if lm._supports_logits_to_keep() else {}
    ids_BT, others = (torch.empty((mask_BT.shape[0], new), dtype=torch.int64), {}) if given is None else given
    own_positions = positions_BT if new == tokens else positions_BT[:, -new:].clone()
    arguments: dict[str, Any] = {"position_ids": own_positions, **others}
    output = lm(
        input_ids=ids_BT,
        # One prompt has no padding, so transformers creates no mask; it would check the values, which are fake.
        attention_mask=mask_BT if len(mask_BT) > 1 else None,
        past_key_values=cache,
        use_cache=True,
        **arguments,
        **last_alone,
    )
    return output.logits[:, -1].to(copy=True, dtype=torch.float32)


def _grow(lm: PreTrainedModel, cache: DynamicCache, tokens: int) -> DynamicCache:
    """A cache of `tokens` tokens, the last one appended separately, so that sliding-window layers drop older ones."""
    grown = DynamicCache(config=lm.config.get_text_config())
    for number, layer in enumerate(cache.layers):
        if not isinstance(layer, DynamicLayer):  # State of constant size, as in linear attention.
            grown.layers[number] = layer
            continue
        for count in (tokens - 1, 1):
            key, value = (
                states.new_empty((*states.shape[:2], count, states.shape[3])) for states in _keys_values(layer)
            )
            grown.update(key, value, number)
    return grown


def _register_cache(cache: DynamicCache, trace: MemoryTrace) -> None:
    """Register the cache under its category."""
    for layer in cache.layers:
        if isinstance(layer, DynamicLayer):
            trace.register(_keys_values(layer), KV_CACHE)


def _keys_values(layer: DynamicLayer) -> tuple[torch.Tensor, torch.Tensor]:
    assert layer.keys is not None and layer.values is not None
    return layer.keys, layer.values
