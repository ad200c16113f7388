"""8-bit products: traced as on a GPU, and with checkpointing."""

import pytest

from lean_finetune.memory.predict.peak import predict
from lean_finetune.memory.predict.traced_step import TracedModel
from tests.memory.common import gpu_target, llama, setting_of, shape

SIZES = llama(hidden_size=264, intermediate_size=520, num_hidden_layers=3, vocab_size=1000)
STEPS = ((shape(16, 256, 100),),)


def peak(*, gpu: str = "H100", **model) -> int:
    return predict(TracedModel(SIZES, setting_of(precision="bf16", **model), gpu_target(gpu)), STEPS).peak.bytes


@pytest.mark.parametrize("grad_ckpt", [False, True])
def test_a_gpu_trains_in_8_bits(grad_ckpt: bool):
    """The CPU's way, which unpacks every weight, traced for a GPU; or outliers, which no trace can know, refused."""
    assert peak(method="int8_lora", grad_ckpt=grad_ckpt) != peak(method="lora", grad_ckpt=grad_ckpt)


def test_checkpointing_lets_go_of_the_inputs_of_8_bit_products():
    """Bitsandbytes saves them outside of autograd: 6.5 GiB of an 8B model were not freed."""
    assert peak(method="int8_lora", grad_ckpt=True) < 0.75 * peak(method="int8_lora")
