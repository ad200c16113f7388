"""A small run on an H100, for the tests of advice."""

from typing import Any

import torch
from transformers import PretrainedConfig

from lean_finetune.config.load import load_params, with_flags
from lean_finetune.config.schema import Params
from lean_finetune.memory.advice.full_rows import full_batch, largest_steps
from lean_finetune.memory.advice.run import Run
from lean_finetune.memory.devices import resolve_gpu
from lean_finetune.memory.trace.cuda_kernels import target_of
from lean_finetune.memory.trace.setting import Setting
from tests.conftest import ROOT
from tests.memory.common import llama, setting_of

CONFIG = llama(
    hidden_size=128, intermediate_size=256, num_hidden_layers=3, vocab_size=2048, max_position_embeddings=1024
)
PARAMS = with_flags(load_params(ROOT / "params.yaml"), ["run.progress=false"])
H100, _ = resolve_gpu("H100")
TARGET = target_of(H100)


def params_of(setting: Setting) -> Params:
    """Parameters that lead to a setting."""
    hardware = PARAMS.hardware.model_copy(update={"num_gpus": setting.gpus})
    return PARAMS.model_copy(update={"train": setting.train, "hardware": hardware})


def workload(
    *,
    config: PretrainedConfig = CONFIG,
    max_tokens: int = 1024,
    longest: int = 256,
    mode: Any = "bucketed",
    tokens_per_step: int = 4096,
    **setting: Any,
) -> Run:
    bucket = PARAMS.bucket.model_copy(update={"mode": mode, "max_tokens": max_tokens, "fixed_rows": 4})
    trained = setting_of(tokens_per_step=tokens_per_step, **setting)
    data = PARAMS.data.model_copy(update={"max_length": longest})
    return Run(
        params=params_of(trained).model_copy(update={"data": data, "bucket": bucket}),
        device=H100,
        config=config,
        setting=trained,
        stored=torch.bfloat16,
        bucket=bucket,
        steps=largest_steps(full_batch(bucket, longest), several=tokens_per_step > max_tokens),
        longest=longest,
        tokens_per_step=tokens_per_step,
        micro_batches_per_step=tokens_per_step // max_tokens,
    )


def peak_of(run: Run) -> int:
    """The predicted peak in bytes."""
    return run.predict().peak.bytes
