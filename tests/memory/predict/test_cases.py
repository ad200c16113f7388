"""Published out-of-memory cases on one GPU, each with its predicted peak: the cases this project started from."""

from typing import Any

import pytest
from transformers import LlamaConfig

from cuda_memory.units import GIB
from lean_finetune.memory.devices import resolve_gpu
from lean_finetune.memory.predict.peak import Prediction, predict
from lean_finetune.memory.predict.process_memory import host_state_bytes
from lean_finetune.memory.predict.traced_step import TracedModel
from lean_finetune.memory.trace.setting import Setting
from tests.kit.specs import llama
from tests.memory.common import LLAMA_3_1_8B, LLAMA_3_1_70B, gpu_target, setting_of, shape

LLAMA_2_7B = llama(4096, 11008, layers=32, heads=32, kv_heads=32, vocabulary=32000)
FULL: dict[str, Any] = {"method": "full", "precision": "bf16", "grad_ckpt": True}
COPIES = {**FULL, "master_weights": True}
IN_4_BITS: dict[str, Any] = {"method": "qlora", "lora_rank": 16, "loss_chunk": 512}
QLORA = {**IN_4_BITS, "grad_ckpt": True, "optimizer": "adamw_8bit"}
IN_BACKWARD = {**COPIES, "max_grad_norm": None, "optimizer_in_backward": True, "offload": "optimizer"}


def peak_gib(config: LlamaConfig, setting: Setting, gpu: str, length: int) -> float:
    """The predicted peak of tensors for one row of a length, half of it trained."""
    return predict(TracedModel(config, setting, gpu_target(gpu)), ((shape(1, length, length // 2),),)).peak.bytes / GIB


def memory_gib(gpu: str) -> float:
    return resolve_gpu(gpu)[0].memory_bytes / GIB


SHARDS = {**FULL, "sharding": "zero3", "gpus": 8, "offload": "parameters"}
UNCHUNKED = {"method": "full", "loss_chunk": None}
# Model, GPU, tokens of the row, GiB, whether they fit, setting.
CASES: list[tuple[LlamaConfig, str, int, float, bool, dict[str, Any]]] = [
    # OpenRLHF's run, out of memory at 128 tokens: 16 bytes a parameter, however short the rows.
    (LLAMA_3_1_8B, "A100-80GB", 128, 119.7, False, {**FULL, "precision": "fp32"}),
    (LLAMA_3_1_8B, "A100-80GB", 128, 59.9, True, FULL),
    # With updates in backward the GPU has the weights and the largest gradient.
    (LLAMA_3_1_8B, "RTX-4090", 128, 16.0, True, IN_BACKWARD),
    # bf16, checkpointing and an 8-bit optimizer save more than half.
    (LLAMA_3_1_8B, "A100-80GB", 2048, 119.7, False, {**UNCHUNKED, "precision": "fp32"}),
    (LLAMA_3_1_8B, "A100-80GB", 2048, 45.1, True, {**FULL, **UNCHUNKED, "optimizer": "adamw_8bit"}),
]
SLOW_CASES: list[tuple[LlamaConfig, str, int, float, bool, dict[str, Any]]] = [
    # OpenRLHF's run with offload: of 16 bytes a parameter 4 stay on the GPU and 12 go to the host.
    (LLAMA_3_1_8B, "A100-80GB", 128, 121.6, False, COPIES),
    (LLAMA_3_1_8B, "A100-80GB", 128, 29.9, True, {**COPIES, "offload": "optimizer"}),
    # FSDP2 with CPU offload: a GPU has the running layers, activations and logits.
    (LLAMA_3_1_8B, "A100-80GB", 2048, 5.3, True, SHARDS),
    (LLAMA_3_1_70B, "A6000", 2048, 41.8, True, {**QLORA, "precision": "bf16"}),
    (LLAMA_2_7B, "P4", 512, 4.9, True, QLORA),
]


@pytest.mark.parametrize(
    ("config", "gpu", "length", "gib", "fits", "changes"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES)],
)
def test_a_published_case_is_predicted(config, gpu, length, gib, fits, changes):
    """A run predicted to fit that runs out of memory, or the reverse."""
    peak = peak_gib(config, setting_of(**changes), gpu, length)
    assert peak == pytest.approx(gib, abs=0.06) and (peak < memory_gib(gpu)) is fits


def test_an_optimizer_on_the_host_takes_12_bytes_a_parameter_there():
    host_gib = host_state_bytes(LLAMA_3_1_8B, setting_of(**COPIES, offload="optimizer")) / GIB
    assert round(host_gib, 1) == 91.8 and round(host_gib - 12 * 8_030_261_248 / GIB, 1) == 2.0


@pytest.mark.slow
def test_qlora_70b_fits_one_48_gb_card_up_to_a_length():
    """A 70B predicted to fit a card that runs out of memory in the middle of a run."""
    setting = setting_of(precision="bf16", **QLORA)
    low, high = (peak_gib(LLAMA_3_1_70B, setting, "A6000", length) for length in (5376, 5632))
    assert low < memory_gib("A6000") < high


def predicted(**changes: Any) -> Prediction:
    """LoRA in bf16 on one H100, one row of 2048 tokens."""
    setting = setting_of(precision="bf16", loss_chunk=512, **changes)
    return predict(TracedModel(LLAMA_3_1_8B, setting, gpu_target("H100")), ((shape(1, 2048, 2047),),))


@pytest.mark.parametrize("method", ["lora", pytest.param("qlora", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_policies_lie_between_keeping_everything_and_keeping_nothing(method: str):
    """A policy that costs time and saves nothing."""
    saved, every_4th, every_2nd, first_16, selective, full = (
        predicted(method=method, **changes).peak.bytes
        for changes in (
            {},
            {"grad_ckpt": True, "grad_ckpt_policy": "every_n", "grad_ckpt_every": 4},
            {"grad_ckpt": True, "grad_ckpt_policy": "every_n"},
            {"grad_ckpt": True, "grad_ckpt_policy": "first_n", "grad_ckpt_layers": 16},
            {"grad_ckpt": True, "grad_ckpt_policy": "selective"},
            {"grad_ckpt": True},
        )
    )
    assert saved > every_4th > every_2nd >= first_16 > full
    assert saved > selective > full
    assert saved - every_2nd == pytest.approx((saved - full) / 2, rel=0.1)


def test_offload_takes_the_inputs_of_recomputed_layers_off_the_device():
    """Offloaded activations counted on the device, or not counted on the host."""
    stay, away = (predicted(method="qlora", grad_ckpt=True, offload_activations=where) for where in ("none", "cpu"))
    hidden_bytes = 2048 * 4096 * 2
    final_norm_bytes = hidden_bytes  # Beside the inputs of 32 layers; and what has a value per token.
    assert stay.offloaded_bytes == 0
    assert 0 <= away.offloaded_bytes - (32 * hidden_bytes + final_norm_bytes) < 1 << 20
    # Less what a layer's backward has besides: gradients of adapters, and the scales of a weight that is unpacked.
    assert stay.peak.bytes - away.peak.bytes == pytest.approx(31 * hidden_bytes, rel=0.12)
