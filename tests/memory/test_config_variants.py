"""Settings one switch away: none that params.yaml would refuse, and the flags lead to what was predicted."""

import pytest

from lean_finetune.memory.advice.config_variants import with_method, with_precision
from lean_finetune.memory.predict.peak import predict
from tests.memory.common import CPU_TARGET, setting_of, shape
from tests.memory.test_state_formulas import llama


@pytest.mark.parametrize(
    ("changes", "flags"),
    [
        ({"method": "lora"}, ("train.method=qlora",)),
        ({"method": "lora", "lora_dora": True}, ("train.method=qlora", "train.lora.dora=false")),
        ({"method": "lora", "lora_init": "pissa"}, ("train.method=qlora", "train.lora.init=default")),
        (
            {"method": "full", "precision": "bf16", "master_weights": True},
            ("train.method=qlora", "train.master_weights=false"),
        ),
        (
            {"method": "full", "optimizer_in_backward": True, "max_grad_norm": None},
            ("train.method=qlora", "train.optimizer_in_backward=false"),
        ),
    ],
    ids=str,
)
def test_another_method_leaves_behind_what_it_excludes(changes, flags):
    """Advice to set a flag that is refused, or a trace of a form that is not built."""
    found, told = with_method(setting_of(**changes), "qlora")
    assert told == flags
    kept = {key: value for key, value in changes.items() if key in ("precision", "max_grad_norm")}
    plain = setting_of(method="qlora", **kept)
    steps = ((shape(2, 32, 40),),)
    peaks = [predict(llama(tied=True), setting, steps, CPU_TARGET).peak.bytes for setting in (found, plain)]
    assert peaks[0] == peaks[1]


@pytest.mark.parametrize(
    ("changes", "method", "flags"),
    [
        ({"quant_type": "fp4", "double_quant": False}, "lora", ("train.quant.type=nf4", "train.quant.double=true")),
        ({"lora_dropout": 0.1, "lora_rslora": True}, "full", ("train.lora.dropout=0.0", "train.lora.rslora=false")),
        ({"lora_dropout": 0.1, "lora_rslora": True}, "lora", ()),
    ],
    ids=str,
)
def test_what_another_method_does_not_read_is_put_back(changes, method, flags):
    """Advice to set a flag beside which another one would be refused as without effect."""
    found, told = with_method(setting_of(method="qlora", **changes), method)
    assert told == (f"train.method={method}", *flags)
    assert found == setting_of(method=method, **({} if flags else changes))


def test_another_type_leaves_master_weights_behind():
    found, told = with_precision(setting_of(method="full", precision="bf16", master_weights=True), "fp32")
    assert found == setting_of(method="full") and told == ("train.precision=fp32", "train.master_weights=false")


def test_fp16_leaves_updates_in_backward_behind():
    setting = setting_of(method="full", optimizer_in_backward=True, max_grad_norm=None)
    found, told = with_precision(setting, "fp16")
    assert found == setting_of(method="full", precision="fp16", max_grad_norm=None)
    assert told == ("train.precision=fp16", "train.optimizer_in_backward=false")
    assert with_precision(setting, "bf16")[0].optimizer_in_backward
