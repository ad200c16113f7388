"""What the switches for activations save on an 8B model, predicted."""

import pytest

from lean_finetune.memory.predict.peak import Prediction, predict
from tests.memory.common import LLAMA_3_1_8B, gpu_target, setting_of, shape

STEPS = ((shape(1, 2048, 2047),),)


def predicted(**changes) -> Prediction:
    """LoRA in bf16 on one H100, one row of 2048 tokens."""
    setting = setting_of(precision="bf16", loss_chunk=512, **changes)
    return predict(LLAMA_3_1_8B, setting, STEPS, gpu_target("H100"))


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
