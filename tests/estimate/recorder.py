"""Traces runs of the real training step on fake tensors as timelines, cut into the units of a replay."""

from collections.abc import Sequence

from transformers import PretrainedConfig

from stages.estimate.cut import Timeline
from stages.estimate.explain import trace_origins
from stages.estimate.kernels import Target
from stages.estimate.predict import Setting
from stages.estimate.runs import timeline_of
from stages.estimate.traced_runs import kind_of
from stages.step.batches import BatchShape


def record(
    config: PretrainedConfig, setting: Setting, target: Target, steps: Sequence[Sequence[BatchShape]]
) -> Timeline:
    """Trace every layer in these steps."""
    trace = trace_origins(config, setting, tuple(tuple(step) for step in steps), target)
    layers, vocab_size = config.num_hidden_layers, config.vocab_size
    return timeline_of(trace, kind_of(setting), layers=layers, vocab_size=vocab_size)
