"""The values that fields of params.yaml take. Without pydantic: training code names them too."""

from typing import Literal

MAX_PIXELS = 89_478_485
"""Most pixels: where Pillow warns of a decompression bomb. A phone's 50 Mpx are below."""
Method = Literal["full", "lora", "qlora", "int8_lora"]
Precision = Literal["bf16", "fp16", "fp32", "pure_bf16"]
AnyPrecision = Literal["auto", "bf16", "fp16", "fp32", "pure_bf16"]
QuantType = Literal["nf4", "fp4"]
AttentionName = Literal["auto", "eager", "sdpa", "flash_attention_2", "flex"]
OffloadActivations = Literal["none", "cpu", "disk"]
CompressActivations = Literal["none", "fp8", "int8"]
OffloadState = Literal["none", "optimizer", "parameters"]
OffloadTo = Literal["cpu", "disk"]
Sharding = Literal["none", "ddp", "zero1", "zero2", "zero3", "hsdp"]
SPLIT_WEIGHTS: frozenset[Sharding] = frozenset({"zero2", "zero3", "hsdp"})
"""Modes in which every GPU stores a shard of each weight."""
FusedKernels = Literal["none", "auto", "liger", "fla"]
FusedNorms = Literal["auto", "none"]
GradCkptPolicy = Literal["full", "first_n", "every_n", "selective"]
LoraInit = str
"""A key of ADAPTER_STARTS."""
LoraExperts = Literal["none", "all"]
LoraJoined = Literal["auto", "none"]
PartMode = Literal["frozen", "lora", "full"]
Router = Literal["frozen", "trained"]
Resume = Literal["exact", "compatible"]
DeviceChoice = Literal["auto", "cpu"]
MemorySnapshot = Literal["never", "on_oom", "first_steps"]
TrackerName = Literal["dvclive", "tensorboard", "wandb", "mlflow"]
ObjectiveName = str
"""A key of OBJECTIVES."""
OptimizerName = str
"""A key of OPTIMIZERS."""
Format = Literal[
    "auto",
    "messages",
    "sharegpt",
    "conversation",
    "alpaca",
    "query_response",
    "prompt_completion",
    "text",
    "alpaca_preference",
    "sharegpt_preference",
    "messages_preference",
    "rejected_response",
    "preference",
]
"""auto, or the name of a row format; the last five are of preference pairs."""
Role = Literal["system", "developer", "user", "assistant", "tool", "tool_call"]
"""Roles that data.columns.roles maps other names to. The text of a tool_call is the JSON of the assistant's calls."""
HUB_PREFIX = "hf://"
"""Start of a `data.source` that is a data set of the Hugging Face Hub."""
ALL_LINEAR = "all-linear"
"""The value of `train.lora.targets` that stands for every linear layer."""
