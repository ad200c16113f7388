"""Runs that others measured on GPUs: the trace of their tool's step gives the bytes that they measured."""

import pytest

from benchmarks.published_rows import published_rows
from lean_finetune.memory.tool_step.trace_tool import predict_tool

ROWS = {
    # Full, without autocast: the multi-tensor update sets the peak.
    "fms-a100-mistral-7b-full-none-1x8": 0.001,
    # The model's own loss: logits in 16 bits, in fp32 and shifted.
    "fms-a100-mistral-7b-lora-none-1x8": 0.001,
    # Norms in fp32, and hidden states with them.
    "fms-a100-mistral-7b-qlora-baseline-peft-bnb-1x4": 0.001,
    # transformers 4.45: the model returns fp32 logits.
    "fms-granite-powerlm-3b-lora-none-1x4": 0.001,
    # Liger's fused linear cross-entropy, and norms of one kernel.
    "fms-liger-llama-3-8b-lora-foak-fast-kernels-liger-1x8": 0.001,
    "fms-liger-llama-3-8b-lora-foak-fast-kernels-1x4": 0.001,
    # A key/value cache, of which nobody reads anything, and a loss in 16 bits.
    "fms-a100-santacoder-full-none-1x8": 0.001,
    # LitGPT's decoder, and bitsandbytes up to 0.42.
    "litgpt-2023-llama-2-7b-lora-1": 0.01,
    "litgpt-2023-llama-2-13b-qlora-1": 0.02,
    "litgpt-2023-stablelm-alpha-3b-lora-4": 0.02,
}
"""Rows of published_2026.csv with the largest relative error; `python -m benchmarks.published` has all."""


FAST = (
    "fms-a100-mistral-7b-full-none-1x8",
    "fms-granite-powerlm-3b-lora-none-1x4",
    "fms-liger-llama-3-8b-lora-foak-fast-kernels-1x4",
    "litgpt-2023-llama-2-7b-lora-1",
)


@pytest.mark.parametrize("name", [row if row in FAST else pytest.param(row, marks=pytest.mark.slow) for row in ROWS])
def test_the_trace_of_a_tools_step_gives_the_measured_peak(name: str):
    """A loss, a type or a copy that the description of a tool lacks."""
    row = next(row for row in published_rows() if row.id == name)
    assert row.allocated_bytes is not None
    peak_bytes = max(peak.bytes for phase, peak in predict_tool(row.run).items() if phase != "inputs")
    assert peak_bytes == pytest.approx(row.allocated_bytes, rel=ROWS[name])
