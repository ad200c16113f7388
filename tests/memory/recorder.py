"""Traces runs of the real training step on fake tensors as timelines, cut into the units of a replay."""

from collections.abc import Sequence

from transformers import PretrainedConfig

from lean_finetune.memory.allocator.cut import Timeline
from lean_finetune.memory.allocator.runs import timeline_of
from lean_finetune.memory.allocator.traced_runs import kind_of
from lean_finetune.memory.predict.peak import Setting
from lean_finetune.memory.predict.peak_explanation import trace_origins
from lean_finetune.memory.trace.cuda_kernels import Target
from lean_finetune.step.batches import BatchShape


def record(
    config: PretrainedConfig, setting: Setting, target: Target, steps: Sequence[Sequence[BatchShape]]
) -> Timeline:
    """Trace every layer in these steps."""
    trace = trace_origins(config, setting, tuple(tuple(step) for step in steps), target)
    layers, vocab_size = config.num_hidden_layers, config.vocab_size
    return timeline_of(trace, kind_of(setting), layers=layers, vocab_size=vocab_size)
