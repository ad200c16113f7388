"""The training step as other projects write it, traced: for back-tests against figures that they measured.

What is trained here is `lean_finetune.step`; nothing of this file is. Published figures come from other steps: a
forward pass through the whole model with logits of every position, padding masks, a key/value cache that nobody reads,
outputs kept until the next step, multi-tensor updates. Each of these is an option with a name, off unless a source is
known to have it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.masking_utils import eager_mask

from lean_finetune.memory.allocator.caching_allocator import CachingAllocator
from lean_finetune.memory.trace.cuda_kernels import Target
from lean_finetune.memory.trace.memory_trace import INPUTS, WEIGHTS, WORKSPACE, MemoryTrace
from lean_finetune.model.load_model import fake_model
from lean_finetune.model.model_spec import ModelSpec
from lean_finetune.model.quantize import quantisation_tensors
from lean_finetune.step.run_optimizer import trained_parameters

CPU = torch.device("cpu")
EAGER = "back_test_eager"


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How a source's step differs from the one of `lean_finetune.step`."""

    padding_mask: bool = False
    """Rows are padded and the model is told by a mask: no flash attention, and a mask of length × length per row."""
    kv_cache: bool = False
    """Keys and values are kept for a generation that never comes."""
    kept_outputs: bool = False
    """The outputs, logits among them, live until those of the next step replace them."""
    eager_attention: bool = False
    """Scores of length × length are made and kept for backward."""
    foreach_update: bool = False
    """AdamW by multi-tensor kernels, which hold a copy of the parameters for a moment."""
    upcast: bool = False
    """peft.prepare_model_for_kbit_training: parameters that are not packed become fp32."""
    autocast: bool = False
    """The forward pass runs under autocast to bf16."""
    trained: tuple[str, ...] | None = None
    """Only parameters whose name holds one of these are trained (norms, say); None = those of the method."""


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A traced run of a variant."""

    peak_bytes: int
    """Of tensors, in blocks of the allocator."""
    events: Sequence[tuple[int, int]]
    """(storage, ± bytes)."""
    step_ends: Sequence[int]
    """Events until the end of each step."""


def trace_variant(
    config: PretrainedConfig, spec: ModelSpec, variant: Variant, shapes: Sequence[tuple[int, int]], target: Target
) -> Traced:
    """Trace steps of one micro-batch each; `shapes` are rows and length."""
    trace = MemoryTrace(
        granularity_bytes=target.granularity_bytes, rules=target.rules, vocab_size=config.get_text_config().vocab_size
    )
    with FakeTensorMode(allow_non_fake_inputs=True), target.attention():
        model = fake_model(config, spec, CPU)
        if variant.upcast:
            _upcast(model)
        if variant.trained is not None:
            _train_only(model, variant.trained)
        if variant.eager_attention:
            model.config._attn_implementation = EAGER  # type: ignore[union-attr]
        model.config.use_cache = variant.kv_cache  # type: ignore[union-attr]
        trace.hold([*model.parameters(), *model.buffers(), *quantisation_tensors(model)], WEIGHTS)
        trace.hold_bytes(target.constant_bytes // 2, WORKSPACE)  # Two handles, each with a workspace of its own.
        trace.hold_bytes(target.constant_bytes // 2, WORKSPACE)
        with trace.recording():
            ends = _run(trace, model, variant, shapes)
    peak = max(peak.bytes for peak in trace.peaks().values())
    return Traced(peak_bytes=peak, events=tuple(trace.events), step_ends=tuple(ends))


def reserved_bytes(traced: Traced, *, emptied_after: Sequence[int]) -> int:
    """The most that is reserved; the cache is emptied after the named steps, which some harnesses do."""
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
    return allocator.peak_reserved_bytes


def _run(trace: MemoryTrace, model: nn.Module, variant: Variant, shapes: Sequence[tuple[int, int]]) -> list[int]:
    """The steps; returns the number of events until the end of each."""
    trained = trained_parameters(model)
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
            if not variant.kept_outputs:
                outputs = None
        with trace.phase("backward"):
            loss.backward()
        with trace.phase("clip"):
            torch.nn.utils.clip_grad_norm_(trained, 1.0, foreach=True)
        with trace.phase("optimizer"):
            optimizer.step()
        del input_ids, mask, labels
        ends.append(len(trace.events))
    return ends


def _upcast(model: nn.Module) -> None:
    """Every 16-bit parameter in fp32; what is tied stays tied."""
    made: dict[int, nn.Parameter] = {}
    before = [parameter for parameter in model.parameters() if parameter.dtype in (torch.bfloat16, torch.float16)]
    for half in before:
        made[id(half)] = nn.Parameter(half.data.float(), half.requires_grad)
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and id(parameter) in made:
                module._parameters[name] = made[id(parameter)]


def _train_only(model: nn.Module, names: Sequence[str]) -> None:
    """Freeze all parameters but those whose name holds one of these."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in names))


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
    """Attention as three products, with a softmax in fp32: what transformers calls eager."""
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
