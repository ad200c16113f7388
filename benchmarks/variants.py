"""Trace the training step as other projects write it, to compare the prediction with figures that they published.

This project trains with `lean_finetune.step`. Published figures come from other steps: logits of every position,
padding masks, an unused key/value cache, outputs that live until the next step, multi-tensor updates. Each is a field
of `Variant`, off unless a source is known to have it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.masking_utils import eager_mask

from cuda_memory.allocator import CachingAllocator
from lean_finetune.config.schema import Train
from lean_finetune.memory.trace.cuda_kernels import Target
from lean_finetune.memory.trace.memory_trace import INPUTS, WEIGHTS, WORKSPACE, MemoryTrace
from lean_finetune.model.load_model import fake_model
from lean_finetune.model.quantize import quantisation_tensors
from lean_finetune.step.parallel_model import named_trained

CPU = torch.device("cpu")
EAGER = "variant_eager"


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How the training step of a source differs from `lean_finetune.step`."""

    padding_mask: bool = False
    """Rows are padded and masked: no flash attention, and a mask of length × length per row."""
    kv_cache: bool = False
    """The model returns a key/value cache, which nothing reads."""
    kept_outputs: Literal["forward", "step", "next_step"] = "forward"
    """Until the end of what the outputs, logits included, live; `next_step`: until its outputs replace them."""
    eager_attention: bool = False
    """Attention saves scores of length × length for backward."""
    clipped: bool = True
    """The gradients' norm is limited."""
    foreach_update: bool = False
    """AdamW updates with multi-tensor kernels, which need a temporary copy of the parameters."""
    upcast: bool = False
    """peft.prepare_model_for_kbit_training: parameters that are not quantised become fp32."""
    autocast: bool = False
    """The forward pass runs under autocast to bf16."""
    trained: tuple[str, ...] | None = None
    """Train only parameters whose name contains one of these (norms, for example); None = those of the method."""


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A traced run of a variant."""

    peak_bytes: int
    """Peak of allocated tensors, in blocks of the allocator."""
    events: Sequence[tuple[int, int]]
    """(storage, ± bytes)."""
    step_ends: Sequence[int]
    """Number of events until the end of each step."""
    loaded_events: int
    """Number of events until the model is loaded."""


def trace_variant(
    config: PretrainedConfig, spec: Train, variant: Variant, shapes: Sequence[tuple[int, int]], target: Target
) -> Traced:
    """Trace steps of one micro-batch each. `shapes` holds (rows, length)."""
    trace = MemoryTrace(
        granularity_bytes=target.granularity_bytes, rules=target.rules, vocab_size=config.get_text_config().vocab_size
    )
    with FakeTensorMode(allow_non_fake_inputs=True), target.attention():
        model = fake_model(config, spec, CPU)
        for module in model.modules():
            module.__dict__.pop("_cast_input_dtype", None)  # peft's own adapters convert their inputs.
        if variant.upcast:
            _upcast(model)
        if variant.trained is not None:
            _train_only(model, variant.trained)
        if variant.eager_attention:
            model.config._attn_implementation = EAGER  # type: ignore[union-attr]
        model.config.use_cache = variant.kv_cache  # type: ignore[union-attr]
        trace.register([*model.parameters(), *model.buffers(), *quantisation_tensors(model)], WEIGHTS)
        loaded_events = len(trace.events)
        trace.register_bytes(target.constant_bytes // 2, WORKSPACE)  # Two handles, each with its own workspace.
        trace.register_bytes(target.constant_bytes // 2, WORKSPACE)
        with trace.recording():
            ends = _run(trace, model, variant, shapes)
    peak = max(peak.bytes for peak in trace.peaks().values())
    return Traced(peak_bytes=peak, events=tuple(trace.events), step_ends=tuple(ends), loaded_events=loaded_events)


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """A traced run in the allocator. Bytes are of blocks, as PyTorch counts them: up to 1 MiB may be unused in each."""

    loaded_bytes: int
    """Allocated before the first step."""
    allocated_bytes: int
    """At the peak: torch.cuda.max_memory_allocated."""
    reserved_bytes: int
    """At the peak."""


def replayed(traced: Traced, *, emptied_after: Sequence[int] = ()) -> Replayed:
    """Play a run in the allocator. The cache is emptied after some steps, as a few harnesses do."""
    loaded = 0
    allocator = CachingAllocator(expandable=False, capacity_bytes=None)
    handles: dict[int, int] = {}
    for number, (storage, change) in enumerate(traced.events, start=1):
        if change > 0:
            handles[storage] = allocator.allocate(change)
        else:
            allocator.free(handles.pop(storage))
        if number in traced.step_ends and traced.step_ends.index(number) in emptied_after:
            allocator.release_cached()
            allocator.reset_peaks()
        if number == traced.loaded_events:
            loaded = allocator.allocated_bytes
    return Replayed(
        loaded_bytes=loaded,
        allocated_bytes=allocator.peak_allocated_bytes,
        reserved_bytes=allocator.peak_reserved_bytes,
    )


def _run(trace: MemoryTrace, model: nn.Module, variant: Variant, shapes: Sequence[tuple[int, int]]) -> list[int]:
    """Run the steps and return the number of events until the end of each."""
    trained = [parameter for _, parameter in named_trained(model)]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=not variant.foreach_update, foreach=variant.foreach_update)
    outputs: Any = None
    ends = []
    for rows, length in shapes:
        with trace.phase(INPUTS):
            input_ids = torch.empty((rows, length), dtype=torch.int64)
            mask = torch.empty((rows, length), dtype=torch.int64) if variant.padding_mask else None
            labels = input_ids.clone()
            optimizer.zero_grad()
        with trace.phase("forward"), torch.autocast("cpu", dtype=torch.bfloat16, enabled=variant.autocast):
            outputs = model(input_ids=input_ids, attention_mask=mask, labels=labels, num_items_in_batch=1)
            loss = outputs.loss
            if variant.kept_outputs == "forward":
                outputs = None
        with trace.phase("backward"):
            loss.backward()
        if variant.clipped:
            with trace.phase("clip"):
                torch.nn.utils.clip_grad_norm_(trained, 1.0, foreach=True)
        with trace.phase("optimizer"):
            optimizer.step()
        del input_ids, mask, labels
        if variant.kept_outputs == "step":
            outputs = None
        ends.append(len(trace.events))
    return ends


def _upcast(model: nn.Module) -> None:
    """Replace every 16-bit parameter by an fp32 one. Tied parameters stay tied."""
    upcast: dict[int, nn.Parameter] = {}
    halves = [parameter for parameter in model.parameters() if parameter.dtype in (torch.bfloat16, torch.float16)]
    for half in halves:
        upcast[id(half)] = nn.Parameter(half.data.float(), half.requires_grad)
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and id(parameter) in upcast:
                module._parameters[name] = upcast[id(parameter)]


def _train_only(model: nn.Module, names: Sequence[str]) -> None:
    """Freeze all parameters except those whose name contains one of these."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(fragment in name for fragment in names))


def _eager(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Eager attention of transformers: plain matrix products with an fp32 softmax."""
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    scores = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    scores = nn.functional.dropout(scores, p=dropout, training=module.training)
    return torch.matmul(scores, value).transpose(1, 2).contiguous(), scores


AttentionInterface.register(EAGER, _eager)
AttentionMaskInterface.register(EAGER, eager_mask)
