"""Qwen's QLoRA step on GPTQ weights: `finetune_qlora_single_gpu.sh` of QwenLM/Qwen, traced.

AutoGPTQ unpacks the weights of each product with PyTorch operations, and autograd keeps the unpacked fp16 weight until
the product's backward. DeepSpeed's ZeRO 2 in fp16 keeps the adapters in fp16, with fp32 copies and moments, and has two
buffers for gradients in each backward. The model computes its loss in fp16 on a copy of the logits.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from transformers import PretrainedConfig

from benchmarks.variants import CPU, Traced
from lean_finetune.config.schema import Train
from lean_finetune.memory.trace.cuda_kernels import Target
from lean_finetune.memory.trace.memory_trace import INPUTS, OPTIMIZER, WEIGHTS, WORKSPACE, MemoryTrace
from lean_finetune.model.load_model import fake_model
from lean_finetune.step.parallel_model import named_trained
from tests.kit.specs import changed

GROUP, PACKED = 128, 8
"""Rows of a weight that share scales; 4-bit values in an int32."""
BUCKET_BYTES = 2 * 200_000_000
"""`reduce_bucket_size` of the script's ds_config_zero2.json, in fp16; `overlap_comm` takes two."""
DROPOUT = 0.05
STATE_BYTES = 12
"""fp32 copy and AdamW's moments of each trained value."""


class GptqLinear(nn.Module):
    """A linear layer of AutoGPTQ without its own kernels, which serve inference (qlinear_cuda_old.py)."""

    weights: torch.Tensor
    zeros: torch.Tensor
    scales: torch.Tensor
    shifts: torch.Tensor

    def __init__(self, inputs: int, outputs: int, *, bias: bool):
        """Weights without values."""
        super().__init__()
        self.in_features, self.out_features = inputs, outputs
        sizes = {
            "weights": ((inputs // PACKED, outputs), torch.int32),
            "zeros": ((inputs // GROUP, outputs // PACKED), torch.int32),
            "scales": ((inputs // GROUP, outputs), torch.half),
            "groups": ((inputs,), torch.int32),
            "shifts": ((1, PACKED), torch.int32),
        }
        for name, (shape, dtype) in sizes.items():
            self.register_buffer(name, torch.empty(shape, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(outputs, dtype=torch.half), requires_grad=False) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Unpack in int32, convert to int8, subtract the zeros, scale, multiply."""
        zeros = torch.bitwise_right_shift(self.zeros.unsqueeze(2).expand(-1, -1, PACKED), self.shifts[None])
        zeros = (zeros.to(torch.int8) + 1).reshape(-1, 1, self.out_features)
        weight = torch.bitwise_right_shift(self.weights.unsqueeze(1).expand(-1, PACKED, -1), self.shifts[..., None])
        weight = weight.to(torch.int8).reshape(-1, GROUP, self.out_features)
        weight = self.scales[:, None] * (weight - zeros)
        out = torch.matmul(x.reshape(-1, self.in_features).half(), weight.reshape(-1, self.out_features))
        out = out.reshape(*x.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias


def trace_gptq(config: PretrainedConfig, spec: Train, shapes: Sequence[tuple[int, int]], target: Target) -> Traced:
    """Trace steps of one micro-batch each. `shapes` holds (rows, length)."""
    spec = changed(spec, method="lora", precision="fp16", lora_dropout=DROPOUT)
    trace = MemoryTrace(granularity_bytes=target.granularity_bytes, rules=target.rules, vocab_size=config.vocab_size)
    with FakeTensorMode(allow_non_fake_inputs=True), target.attention():
        model = fake_model(config, spec, CPU)
        for module in list(model.modules()):
            module.__dict__.pop("_cast_input_dtype", None)  # peft's own adapters convert their inputs.
            if hasattr(module, "lora_A"):
                base: Any = module.base_layer
                module.base_layer = GptqLinear(base.in_features, base.out_features, bias=base.bias is not None)
        trained = [parameter for _, parameter in named_trained(model)]
        for parameter in trained:
            parameter.data = parameter.data.half()
        model.config.use_cache = False  # type: ignore[union-attr]
        trace.register([*model.parameters(), *model.buffers()], WEIGHTS)
        loaded_events = len(trace.events)
        trace.register_bytes(STATE_BYTES * sum(parameter.numel() for parameter in trained), OPTIMIZER)
        for _ in range(2):
            trace.register_bytes(target.constant_bytes // 2, WORKSPACE)
        with trace.recording():
            ends = [_step(trace, model, trained, shape) for shape in shapes]
    peak = max(peak.bytes for peak in trace.peaks().values())
    return Traced(peak_bytes=peak, events=tuple(trace.events), step_ends=tuple(ends), loaded_events=loaded_events)


def _step(trace: MemoryTrace, model: nn.Module, trained: list[nn.Parameter], shape: tuple[int, int]) -> int:
    """Run forward and backward and return the number of events until then."""
    with trace.phase(INPUTS):
        input_ids = torch.empty(shape, dtype=torch.int64)
        labels = input_ids.clone()
    with trace.phase("forward"):
        outputs = model(input_ids=input_ids)
        shifted = outputs.logits[..., :-1, :].contiguous()
        loss = F.cross_entropy(shifted.flatten(0, 1), labels[..., 1:].contiguous().flatten())
        del shifted
    with trace.phase("backward"):
        buckets = [torch.empty(BUCKET_BYTES, dtype=torch.uint8) for _ in range(2)]
        loss.backward()
        buckets.clear()
    for parameter in trained:
        parameter.grad = None
    return len(trace.events)
