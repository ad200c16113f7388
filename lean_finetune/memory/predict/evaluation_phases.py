"""Memory of a model that is asked and not trained: held-out losses, and answers with their KV cache.

Shapes: B prompts, T tokens of a prompt, H key/value heads, D head size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from lean_finetune.core.errors import UserError
from lean_finetune.memory.predict.depth_extrapolation import NotRepeated, WindowTrace, deep_peaks, deep_windows
from lean_finetune.memory.predict.layer_structure import find_repetition, with_layers
from lean_finetune.memory.predict.setting import Setting
from lean_finetune.memory.predict.traced_step import CPU, Trace, new_trace
from lean_finetune.memory.trace.cached_fake_mode import CachedFakeMode
from lean_finetune.memory.trace.cuda_kernels import Target
from lean_finetune.memory.trace.fake_distributed import local, shared
from lean_finetune.memory.trace.memory_trace import ADAPTERS, QUANTISATION_STATE, WEIGHTS, MemoryTrace, Peak
from lean_finetune.memory.trace.trace_errors import UNTRACEABLE
from lean_finetune.model.load_model import fake_model
from lean_finetune.model.quantize import quantisation_tensors
from lean_finetune.step.batches import Batch, BatchShape, empty_batch
from lean_finetune.step.loss import causal_lm
from lean_finetune.step.parallel_model import ParallelModel
from lean_finetune.step.run_optimizer import trained_parameters

KV_CACHE = "kv_cache"
"""Category of the keys and values that generation keeps for every token so far."""
Use = Callable[[ParallelModel, MemoryTrace], None]
"""What is done with a shared model, in phases of the trace."""


@dataclass(frozen=True, kw_only=True)
class GenerationShape:
    """The largest batch of prompts that is answered."""

    rows: int
    prompt_tokens: int
    new_tokens: int
    """Longest answer."""


def peak_of_loss(
    config: PretrainedConfig,
    setting: Setting,
    shape: BatchShape,
    target: Target,
    loss: Callable[[nn.Module, Batch], torch.Tensor],
) -> Peak:
    """The peak of one batch through the model in evaluation mode."""

    def use(parallel: ParallelModel, trace: MemoryTrace) -> None:
        with trace.phase("forward"):
            parallel.run(lambda model: loss(model, empty_batch(shape, CPU)))

    return _peak_of_use(config, setting, target, use)


def peak_of_answers(config: PretrainedConfig, setting: Setting, shape: GenerationShape, target: Target) -> Peak:
    """The peak of greedy decoding: of reading the prompts, or of the last token, when the KV cache is longest.

    Raises:
        UserError: PyTorch cannot trace an operation of it.
    """

    def use(parallel: ParallelModel, trace: MemoryTrace) -> None:
        _answer(causal_lm(parallel.model), shape, trace)

    try:
        return _peak_of_use(config, setting, target, use)
    except UNTRACEABLE as error:
        raise UserError(
            f"evaluate.generate_rows: answers of {config.model_type} cannot be traced ({type(error).__name__}: {error}"
            "), so their memory is not known; set evaluate.generate_rows=0"
        ) from None


def _peak_of_use(config: PretrainedConfig, setting: Setting, target: Target, use: Use) -> Peak:
    """The highest peak of what is done with a model, from shallow ones where its layers repeat."""
    repetition, _ = find_repetition(config, setting.model)
    if repetition is not None:
        try:
            shallow = (with_layers(config, depth) for depth in repetition.depths)
            traces = [_traced(WindowTrace, each, setting, target, use) for each in shallow]
            windows = deep_windows(traces, repetition, target.granularity_bytes)
            return _highest(deep_peaks(windows, target.granularity_bytes).by_phase)
        except NotRepeated:
            pass  # All layers are traced: slower, and as right.
    return _highest(_traced(MemoryTrace, config, setting, target, use).peaks())


def _highest(peaks: Any) -> Peak:
    """The highest of the peaks of phases."""
    return max(peaks.values(), key=lambda peak: peak.bytes)


def _traced(kind: type[Trace], config: PretrainedConfig, setting: Setting, target: Target, use: Use) -> Trace:
    """A trace of what is done with a model in evaluation mode."""
    trace = new_trace(kind, config, target)
    with (
        CachedFakeMode(),
        target.attention(),
        shared(fake_model(config, setting.model, CPU), setting.sharing, trace, CPU) as parallel,
    ):
        model = parallel.model.eval()
        trace.register([local(tensor) for tensor in (*model.parameters(), *model.buffers())], WEIGHTS)
        trace.register(quantisation_tensors(model), QUANTISATION_STATE)
        if setting.model.method != "full":
            trace.register([local(tensor) for tensor in trained_parameters(model)], ADAPTERS)
        trace.begin_steps(model)
        with trace.recording(), torch.no_grad(), setting.model.autocast("cpu"):
            use(parallel, trace)
    return trace


def _answer(lm: PreTrainedModel, shape: GenerationShape, trace: MemoryTrace) -> None:
    """Read the prompts, then make the last token, as `generate` calls the model; its own loop reads values."""
    B, T = shape.rows, shape.prompt_tokens
    asked = [torch.empty((B, T), dtype=torch.int64) for _ in range(2)]  # Tokens and mask, the caller's.
    with trace.phase("prompts"):
        cache = DynamicCache(config=lm.config.get_text_config())
        scores_BV = _forward(lm, T, T, asked[1], cache)
        _hold_cache(cache, trace)
    if shape.new_tokens == 1:
        return
    # Every answer's last token is made by the call before it would be read.
    longest = T + shape.new_tokens - 1
    cache = _grown(lm, cache, longest - 1)
    _hold_cache(cache, trace)
    told_BT = torch.empty((B, longest), dtype=torch.int64)
    with trace.phase("last token"):
        _forward(lm, longest, 1, torch.ones_like(told_BT), cache)
        _hold_cache(cache, trace)
    del asked, scores_BV, told_BT  # Until here the loop holds them: what was asked and told, the scores before.


def _forward(lm: Any, tokens: int, new: int, mask_BT: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
    """One call of the model over the last `new` of `tokens` tokens; the scores of what comes next, fp32 (B, V)."""
    positions_BT = mask_BT.cumsum(-1) - 1
    last_alone = {"logits_to_keep": 1} if lm._supports_logits_to_keep() else {}
    output = lm(
        input_ids=torch.empty((mask_BT.shape[0], new), dtype=torch.int64),
        # A prompt alone has no padding, and transformers makes no mask of scores then: it looks, which no trace can.
        attention_mask=mask_BT if len(mask_BT) > 1 else None,
        position_ids=positions_BT if new == tokens else positions_BT[:, -new:].clone(),
        past_key_values=cache,
        use_cache=True,
        **last_alone,
    )
    return output.logits[:, -1].to(copy=True, dtype=torch.float32)


def _grown(lm: PreTrainedModel, cache: DynamicCache, tokens: int) -> DynamicCache:
    """A cache of so many tokens, the last of them appended on its own: layers with a window drop what is before it."""
    grown = DynamicCache(config=lm.config.get_text_config())
    for number, layer in enumerate(cache.layers):
        if not isinstance(layer, DynamicLayer):  # A state of constant size, as linear attention keeps.
            grown.layers[number] = layer
            continue
        for count in (tokens - 1, 1):
            key, value = (states.new_empty((*states.shape[:2], count, states.shape[3])) for states in _kept(layer))
            grown.update(key, value, number)
    return grown


def _hold_cache(cache: DynamicCache, trace: MemoryTrace) -> None:
    """Count the cache as such."""
    for layer in cache.layers:
        if isinstance(layer, DynamicLayer):
            trace.register(_kept(layer), KV_CACHE)


def _kept(layer: DynamicLayer) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a layer that has seen tokens."""
    assert layer.keys is not None and layer.values is not None
    return layer.keys, layer.values
