"""Published out-of-memory cases on one GPU, each with its predicted peak: the cases this project started from."""

from dataclasses import replace
from typing import Any

import pytest
from transformers import LlamaConfig

from lean_finetune.core.units import GIB
from lean_finetune.distributed.sharding_modes import ShardSpec
from lean_finetune.memory.advice.switches import weights_on_host
from lean_finetune.memory.devices import resolve_gpu
from lean_finetune.memory.predict.peak import Prediction, predict
from lean_finetune.memory.predict.setting import Setting
from lean_finetune.memory.predict.state_formulas import host_state_bytes
from lean_finetune.memory.trace.fake_distributed import Sharing
from tests.memory.common import LLAMA_3_1_8B, LLAMA_3_1_70B, gpu_target, llama, setting_of, shape

LLAMA_2_7B = llama(
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=32,
    vocab_size=32000,
)
QLORA: dict[str, Any] = {
    "method": "qlora",
    "grad_ckpt": True,
    "optimizer": "adamw_8bit",
    "lora_rank": 16,
    "loss_chunk": 512,
}


def peak_gib(config: LlamaConfig, setting: Setting, gpu: str, length: int) -> float:
    """Return the predicted peak of tensors for one row of a length, half of it trained."""
    return predict(config, setting, ((shape(1, length, length // 2),),), gpu_target(gpu)).peak.bytes / GIB


def memory_gib(gpu: str) -> float:
    return resolve_gpu(gpu)[0].memory_bytes / GIB


def test_llama_8b_full_fits_80_gb_in_bf16_alone_and_not_with_fp32_copies():
    """OpenRLHF's run, out of memory at 128 tokens: 16 bytes a parameter take 119.7 GiB, however short the rows."""
    fp32, bf16 = (
        peak_gib(LLAMA_3_1_8B, setting_of(method="full", precision=p, grad_ckpt=True), "A100-80GB", 128)
        for p in ("fp32", "bf16")
    )
    assert round(fp32, 1) == 119.7 and fp32 > memory_gib("A100-80GB")
    assert round(bf16, 1) == 59.9 and bf16 < memory_gib("A100-80GB")


@pytest.mark.slow
def test_llama_8b_full_with_fp32_copies_fits_80_gb_with_its_optimizer_on_the_host():
    """OpenRLHF's run with offload: of 16 bytes a parameter 4 stay on the GPU and 12 go to the host."""
    setting = setting_of(method="full", precision="bf16", grad_ckpt=True, master_weights=True)
    without, on_host = (
        peak_gib(LLAMA_3_1_8B, replace(setting, offload=place), "A100-80GB", 128) for place in ("none", "optimizer")
    )
    assert round(without, 1) == 121.6 and without > memory_gib("A100-80GB")
    assert round(on_host, 1) == 29.9 and on_host < memory_gib("A100-80GB")
    host_gib = host_state_bytes(LLAMA_3_1_8B, replace(setting, offload="optimizer")) / GIB
    assert round(host_gib, 1) == 91.8 and round(host_gib - 12 * 8_030_261_248 / GIB, 1) == 2.0


def test_llama_8b_full_fits_24_gb_with_updates_in_backward_on_the_host():
    """Gradients and optimizer state counted on the GPU, which only holds the weights and the largest gradient."""
    setting = setting_of(
        method="full",
        precision="bf16",
        grad_ckpt=True,
        master_weights=True,
        max_grad_norm=None,
        optimizer_in_backward=True,
        offload="optimizer",
    )
    assert 17.9 < peak_gib(LLAMA_3_1_8B, setting, "RTX-4090", 128) < 18.0 < memory_gib("RTX-4090")


@pytest.mark.slow
def test_llama_8b_full_takes_6_gib_of_each_gpu_with_its_shards_on_the_host():
    """FSDP2 with CPU offload: shards counted on a GPU, which only holds the running layers, activations and logits."""
    one_gpu = setting_of(method="full", precision="bf16", grad_ckpt=True)
    spec = ShardSpec(mode="zero3")
    shared = replace(one_gpu, sharing=Sharing(spec=spec, gpus=8, accumulates_gradients=False))
    assert round(peak_gib(LLAMA_3_1_8B, weights_on_host(shared), "A100-80GB", 2048), 1) == 5.9


def test_bf16_checkpointing_and_an_8_bit_optimizer_save_more_than_half():
    """Three common switches recommended for a saving that they do not have."""
    start = setting_of(method="full", precision="fp32", loss_chunk=None)
    basic = setting_of(method="full", precision="bf16", grad_ckpt=True, optimizer="adamw_8bit", loss_chunk=None)
    before, after = (peak_gib(LLAMA_3_1_8B, setting, "A100-80GB", 2048) for setting in (start, basic))
    assert round(before, 1) == 119.7 and round(after, 1) == 45.1
    assert after < 0.5 * before


@pytest.mark.slow
def test_qlora_70b_fits_one_48_gb_card_up_to_a_length():
    """A 70B predicted to fit a card that runs out of memory in the middle of a run."""
    setting = setting_of(precision="bf16", **QLORA)
    lengths = (2048, 5376, 5632)
    peaks = [peak_gib(LLAMA_3_1_70B, setting, "A6000", length) for length in lengths]
    assert round(peaks[0], 1) == 41.8
    assert peaks[1] < memory_gib("A6000") < peaks[2]


@pytest.mark.slow
def test_qlora_7b_fits_a_p4_in_fp32():
    """A refusal without a remedy: in fp32, with the weights in 4 bits, the card is large enough."""
    peak = peak_gib(LLAMA_2_7B, setting_of(precision="fp32", **QLORA), "P4", 512)
    assert round(peak, 1) == 4.9 and peak < memory_gib("P4")


def predicted(**changes: Any) -> Prediction:
    """LoRA in bf16 on one H100, one row of 2048 tokens."""
    setting = setting_of(precision="bf16", loss_chunk=512, **changes)
    return predict(LLAMA_3_1_8B, setting, ((shape(1, 2048, 2047),),), gpu_target("H100"))


@pytest.mark.parametrize("method", ["lora", pytest.param("qlora", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_policies_lie_between_keeping_everything_and_keeping_nothing(method: str):
    """A policy that costs time and saves nothing."""
    saved, every_4th, every_2nd, selective, full = (
        predicted(method=method, **changes).peak.bytes
        for changes in (
            {},
            {"grad_ckpt": True, "grad_ckpt_policy": "every_n", "grad_ckpt_every": 4},
            {"grad_ckpt": True, "grad_ckpt_policy": "every_n"},
            {"grad_ckpt": True, "grad_ckpt_policy": "selective"},
            {"grad_ckpt": True},
        )
    )
    assert saved > every_4th > every_2nd > full
    assert saved > selective > full
    assert saved - every_2nd == pytest.approx((saved - full) / 2, rel=0.1)


def test_offload_takes_the_inputs_of_recomputed_layers_off_the_device():
    """Offloaded activations counted on the device, or not counted on the host."""
    stay, away = (predicted(method="qlora", grad_ckpt=True, offload_activations=where) for where in ("none", "cpu"))
    hidden_bytes = 2048 * 4096 * 2
    final_norm_bytes = 2 * hidden_bytes  # In fp32, beside the inputs of 32 layers; and what has a value per token.
    assert stay.offloaded_bytes == 0
    assert 0 <= away.offloaded_bytes - (32 * hidden_bytes + final_norm_bytes) < 1 << 20
    assert stay.peak.bytes - away.peak.bytes == pytest.approx(31 * hidden_bytes, rel=0.1)
