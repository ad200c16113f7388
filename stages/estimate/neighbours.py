"""Settings that differ in a method or a type, without what those exclude."""

from collections.abc import Mapping
from dataclasses import replace

from stages.estimate.predict import Setting
from stages.params import Method, Precision

LIGHTER: Mapping[Method, tuple[Method, ...]] = {
    "full": ("lora", "qlora"),
    "lora": ("qlora",),
    "int8_lora": ("qlora",),
    "qlora": (),
}
"""Methods that hold less than one, the nearest first."""
PLAIN_START = "train.lora.init=default"
PLAIN_LENGTHS = "train.lora.dora=false"
NO_MASTERS = "train.master_weights=false"


def with_method(setting: Setting, method: Method) -> tuple[Setting, tuple[str, ...]]:
    """The setting with another method, and the flags that lead there: starts and DoRA belong to the method they had."""
    flags = [f"train.method={method}"]
    model = replace(setting.model, method=method, lora_init="default", lora_dora=False)
    if setting.model.lora_init != "default" and setting.model.adapted:
        flags.append(PLAIN_START)
    if setting.model.lora_dora and setting.model.adapted:
        flags.append(PLAIN_LENGTHS)
    if setting.master_weights:
        flags.append(NO_MASTERS)
    return replace(setting, model=model, master_weights=False), tuple(flags)


def with_precision(setting: Setting, precision: Precision) -> tuple[Setting, tuple[str, ...]]:
    """The setting in another type, and the flags that lead there: master weights belong to bf16."""
    flags = (f"train.precision={precision}",) + ((NO_MASTERS,) if setting.master_weights else ())
    return replace(setting, model=replace(setting.model, precision=precision), master_weights=False), flags
