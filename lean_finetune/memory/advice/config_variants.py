"""Settings that differ in a switch, without what it excludes."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lean_finetune.config.field_types import Method, Precision, Sharding
from lean_finetune.config.optimizers import OPTIMIZERS
from lean_finetune.config.sharding_rules import CUTTING, GATHERING
from lean_finetune.memory.predict.setting import Setting

LIGHTER: Mapping[Method, tuple[Method, ...]] = {
    "full": ("lora", "qlora"),
    "lora": ("qlora",),
    "int8_lora": ("qlora",),
    "qlora": (),
}
"""Methods that hold less than one, the nearest first."""
PLAIN: Mapping[str, str] = {
    "lora_init": "train.lora.init=default",
    "lora_dora": "train.lora.dora=false",
    "lora_dropout": "train.lora.dropout=0.0",
    "lora_rslora": "train.lora.rslora=false",
    "quant_type": "train.quant.type=nf4",
    "double_quant": "train.quant.double=true",
}
"""Flags that put back what not every method reads, by the field of the model's spec."""
FULL_POLICY = "train.grad_ckpt_policy=full"
NO_MASTERS = "train.master_weights=false"
SHARED_FURTHER: Mapping[Sharding, tuple[Sharding, ...]] = {
    "none": (),
    "ddp": ("zero1", "zero2", "zero3"),
    "zero1": ("zero2", "zero3"),
    "zero2": ("zero3",),
    "zero3": (),
    "hsdp": ("zero3",),
}
"""Modes in which a GPU holds less than in one, the nearest first."""
AFTER_BACKWARD = "train.optimizer_in_backward=false"


def with_method(setting: Setting, method: Method) -> tuple[Setting, tuple[str, ...]]:
    """The setting with another method, and the flags that lead there: what only the method it had reads is put back."""
    model, flags = setting.model, [f"train.method={method}"]
    plain: dict[str, Any] = {"lora_init": "default", "lora_dora": False}
    if method == "full":
        plain |= {"lora_dropout": 0.0, "lora_rslora": False}
    if method != "qlora":
        plain |= {"quant_type": "nf4", "double_quant": True}
    if model.adapted:
        flags += [PLAIN[name] for name, value in plain.items() if getattr(model, name) != value]
    if setting.master_weights:
        flags.append(NO_MASTERS)
    if setting.optimizer_in_backward:
        flags.append(AFTER_BACKWARD)
    changed = replace(model, method=method, **plain)
    return replace(setting, model=changed, master_weights=False, optimizer_in_backward=False), tuple(flags)


def with_precision(setting: Setting, precision: Precision) -> tuple[Setting, tuple[str, ...]]:
    """The setting in another type, and the flags that lead there: master weights belong to bf16."""
    flags = (f"train.precision={precision}",) + ((NO_MASTERS,) if setting.master_weights else ())
    in_backward = setting.optimizer_in_backward and precision != "fp16"
    flags += (AFTER_BACKWARD,) if setting.optimizer_in_backward and not in_backward else ()
    model = replace(setting.model, precision=precision)
    return replace(setting, model=model, master_weights=False, optimizer_in_backward=in_backward), flags


def without_checkpoints(setting: Setting) -> tuple[Setting, tuple[str, ...]]:
    """The setting that recomputes nothing, and the flags that lead there: a policy belongs to recomputation."""
    model = replace(setting.model, grad_ckpt=False, grad_ckpt_policy="full")
    flags = ("train.grad_ckpt=false",) + (() if setting.model.grad_ckpt_policy == "full" else (FULL_POLICY,))
    return replace(setting, model=model), flags


def lighter_activations(setting: Setting, *, cuda: bool) -> list[tuple[Setting, tuple[str, ...]]]:
    """Settings that keep less for backward on the device, each less than the one before, and the flags to each.

    Products kept, nothing kept but layers' inputs, these on the host of a GPU.
    """
    model, flags = setting.model, () if setting.model.grad_ckpt else ("train.grad_ckpt=true",)
    found: list[tuple[Setting, tuple[str, ...]]] = []
    if not model.grad_ckpt and model.method != "int8_lora":
        selective = replace(model, grad_ckpt=True, grad_ckpt_policy="selective")
        found.append((replace(setting, model=selective), (*flags, "train.grad_ckpt_policy=selective")))
    if model.grad_ckpt and model.grad_ckpt_policy != "full":
        flags = (FULL_POLICY,)
    full = replace(setting, model=replace(model, grad_ckpt=True, grad_ckpt_policy="full"))
    if full != setting:
        found.append((full, flags))
    if cuda and setting.offload_activations == "none":
        found.append((replace(full, offload_activations="cpu"), (*flags, "train.offload_activations=cpu")))
    return found


def lighter_state(setting: Setting, *, cuda: bool) -> list[tuple[Setting, tuple[str, ...]]]:
    """The setting with its optimizer on the host of a GPU, where state is large and the host can make the update."""
    optimizer = OPTIMIZERS[setting.optimizer]
    if not cuda or setting.model.adapted or setting.offload != "none" or optimizer.paged or optimizer.foreach:
        return []
    return [(replace(setting, offload="optimizer"), ("train.offload=optimizer",))]


def lighter_sharing(setting: Setting, *, cuda: bool) -> list[tuple[Setting, tuple[str, ...]]]:
    """Settings in which each of several GPUs holds less, each less than the one before, and the flags to each.

    Last, what is cut is kept in the host's memory.
    """
    sharing = setting.sharing
    found: list[tuple[Setting, tuple[str, ...]]] = []
    if sharing is None:
        return found
    for mode in SHARED_FURTHER[sharing.spec.mode]:
        # 8-bit weights cannot be cut; the state of adapters is too small to be dealt out.
        if (mode in CUTTING and setting.model.method == "int8_lora") or (mode == "zero1" and setting.model.adapted):
            continue
        spec = replace(sharing.spec, mode=mode, group_gpus=None)
        grouped = () if sharing.spec.group_gpus is None else ("train.shard_group_gpus=null",)
        found.append((replace(setting, sharing=replace(sharing, spec=spec)), (f"train.sharding={mode}", *grouped)))
    last, flags = found[-1] if found else (setting, ())
    cut = last.sharing is not None and last.sharing.spec.mode in GATHERING
    if cuda and cut and setting.offload != "parameters" and not OPTIMIZERS[setting.optimizer].paged:
        found.append((parts_away(last), (*flags, "train.offload=parameters")))
    return found


def parts_away(setting: Setting) -> Setting:
    """The shared setting with what is cut in the host's memory."""
    assert setting.sharing is not None
    sharing = replace(setting.sharing, spec=replace(setting.sharing.spec, offload_weights=True))
    return replace(setting, offload="parameters", sharing=sharing)


def updated_in_backward(setting: Setting) -> tuple[Setting, tuple[str, ...]] | None:
    """The setting whose weights are updated in backward, and the flags that lead there; None where that is refused."""
    model = setting.model
    if model.method != "full" or model.precision == "fp16" or setting.sharing or setting.optimizer_in_backward:
        return None
    flags = ["train.optimizer_in_backward=true"]
    if setting.max_grad_norm is not None:
        flags.append("train.max_grad_norm=null")
    optimizer = OPTIMIZERS[setting.optimizer]
    if optimizer.foreach and optimizer.use_instead is not None:
        setting = replace(setting, optimizer=optimizer.use_instead)
        flags.append(f"train.optimizer={optimizer.use_instead}")
    return replace(setting, optimizer_in_backward=True, max_grad_norm=None), tuple(flags)
