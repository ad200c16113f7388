"""A small run on an H100, for the tests of advice."""

from typing import Any

from transformers import LlamaConfig

from lean_finetune.memory.advice.step_cost import Costs
from lean_finetune.memory.advice.workload import Workload, full_batch, largest_steps
from lean_finetune.memory.devices import resolve_gpu
from lean_finetune.memory.predict.peak import predict
from lean_finetune.memory.trace.cuda_kernels import target_of
from tests.memory.common import llama, setting_of

CONFIG = llama(
    hidden_size=128, intermediate_size=256, num_hidden_layers=3, vocab_size=2048, max_position_embeddings=1024
)
H100, _ = resolve_gpu("H100")
TARGET = target_of(H100)


def costs_of(run: Workload) -> Costs:
    return Costs(run, H100, TARGET)


def workload(
    *,
    config: LlamaConfig = CONFIG,
    max_tokens: int = 1024,
    longest: int = 256,
    mode: Any = "bucketed",
    tokens_per_step: int = 4096,
    **setting: Any,
) -> Workload:
    full = full_batch(mode, longest, max_tokens=max_tokens, fixed_rows=4)
    return Workload(
        config=config,
        setting=setting_of(**setting),
        steps=largest_steps(full, several=tokens_per_step > max_tokens),
        mode=mode,
        max_tokens=max_tokens,
        fixed_rows=4,
        longest=longest,
        tokens_per_step=tokens_per_step,
        micro_batches_per_step=tokens_per_step // max_tokens,
        unpadded_tokens_per_step=tokens_per_step,
    )


def peak_of(run: Workload) -> int:
    """The predicted peak in bytes."""
    return predict(run.config, run.setting, run.steps, TARGET).peak.bytes
