"""How models are trained where a benchmark is about something else."""

from lean_finetune.model.model_spec import ModelSpec

FP32_LORA = ModelSpec(
    method="lora",
    precision="fp32",
    grad_ckpt=False,
    lora_rank=8,
    lora_alpha=16,
    lora_dropout=0.0,
    lora_targets=("all-linear",),
    seed=1,
)
