"""`fit --from` on several GPUs: the step as the tool shares it."""

from dataclasses import replace

import pytest
from transformers import LlamaForCausalLM

from cuda_memory.units import MIB
from lean_finetune.config.load import COMMON_PARAMS, load_params, with_flags
from lean_finetune.memory.advice.as_tool import AsTool, predict_as_tool
from lean_finetune.memory.advice.full_rows import full_rows_run
from lean_finetune.memory.advice.margins import MARGINS
from lean_finetune.memory.advice.run import Run
from lean_finetune.memory.devices import resolve_gpu
from tests.memory.common import llama

KEYS = {"dtype": "bfloat16", "bf16": True, "optim": "adamw_torch", "use_liger_kernel": True}


def run_with(sharding: str, **more: int) -> Run:
    flags = ["train.method=full", "hardware.num_gpus=8", f"train.sharding={sharding}", "data.max_length=64"]
    flags += ["bucket.max_tokens=128", *(f"train.{key}={value}" for key, value in more.items())]
    params = with_flags(load_params(COMMON_PARAMS), flags)
    return full_rows_run(params, llama(dtype="bfloat16", max_position_embeddings=128), resolve_gpu("A100-80GB")[0])


def test_fsdp1_and_ddp_are_traced_with_the_margin_of_several_gpus():
    """Eight GPUs' run answered as that of one, or not at all."""
    sharded = predict_as_tool(run_with("zero3"), "TRL", {**KEYS, "fsdp": "full_shard auto_wrap"})
    whole = predict_as_tool(run_with("ddp"), "TRL", KEYS)
    assert isinstance(sharded, AsTool) and isinstance(whole, AsTool)
    for found in (sharded, whole):  # With 256 MiB of NCCL's buffers and the CUDA context.
        assert found.reserved_bytes is not None and found.process_bytes is not None
        assert found.peak.bytes < found.reserved_bytes == found.process_bytes - (141 + 256) * MIB
    assert sharded.run.sharing is not None and sharded.run.sharing.kind == "fsdp1"
    assert whole.run.sharing is not None and whole.run.sharing.kind == "ddp"
    assert sharded.peak.by_category["weights"] < whole.peak.by_category["weights"] / 3  # fp32 of an eighth.
    assert sharded.margin is whole.margin is MARGINS["tool_several_gpus"]


def test_ddps_buckets_are_a_cause():
    """The bytes that a second GPU costs, which adds no room for weights."""
    config = llama(hidden_size=256, intermediate_size=1024, dtype="bfloat16", max_position_embeddings=128)
    found = predict_as_tool(replace(run_with("ddp"), config=config), "TRL", KEYS)
    assert isinstance(found, AsTool)
    gradients = 2 * LlamaForCausalLM(config).num_parameters()  # In the type of the weights.
    (bucket,) = (cause.bytes for cause in found.causes() if cause.what.startswith("DDP's buckets"))
    assert bucket == pytest.approx(gradients, rel=0.01)


@pytest.mark.parametrize(
    ("tool", "keys", "run", "why"),
    [
        ("TRL", {"deepspeed": "ds.json"}, run_with("zero3"), "DeepSpeed's stage is not known from ds.json"),
        (
            "Axolotl",
            {"fsdp": ["full_shard"], "fsdp_version": 2},
            run_with("zero3"),
            "FSDP2 shares weights there as here",
        ),
        ("torchtune", {}, run_with("zero3"), "how torchtune shares a step"),
        ("TRL", {}, run_with("zero3", context_parallel=2), "how TRL shares a step"),
    ],
)
def test_what_is_not_described_says_so(tool, keys, run, why):
    """A step of one GPU taken for that of several."""
    assert why in str(predict_as_tool(run, tool, {**KEYS, **keys}))
