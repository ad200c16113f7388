"""The training steps of other tools, by the keys of their configurations.

Read in TRL 1.10, LLaMA-Factory, Axolotl, torchtune, LitGPT and ms-swift of mid-2026, with transformers 5 and peft 0.21.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from lean_finetune.config.other_tools import tables
from lean_finetune.config.schema import Train
from lean_finetune.core.errors import UserError
from lean_finetune.memory.tool_step.tool_step import Loss, ToolStep

Keys = Mapping[str, Any]
"""Values of a configuration by dotted key, with the tool's defaults."""
LIGER: Literal["norms and MLPs"] = "norms and MLPs"
FP32 = ("float32", "fp32", "fp32-true", "32-true")
TYPES = (*FP32, "bfloat16", "bf16", "float16", "fp16", "auto")
"""Values of `dtype`."""


def _mixed(keys: Keys) -> bool:
    return bool(keys.get("bf16") not in (None, False, "full") or keys.get("fp16"))


def _type(keys: Keys, name: str) -> str | None:
    """The type of weights by a key; None if it is not set. Raises UserError for another value."""
    given = keys.get(name)
    if given is None:
        return None
    value = str(given).removeprefix("torch.")
    if value not in TYPES:
        raise UserError(f"{name}: must be one of {', '.join(TYPES)}; got {given!r}; correct it")
    return value


def _foreach(optimizer: object) -> bool:
    """Whether this AdamW of PyTorch updates with multi-tensor kernels: unless it is fused."""
    return optimizer == "adamw_torch"


def _trl(keys: Keys, train: Train) -> ToolStep:
    """The model is loaded in fp32 unless `dtype` says otherwise; adapters of 4-bit models are bf16. DPO: TRL 1.16."""
    liger = bool(keys.get("use_liger_kernel"))
    named: str = keys.get("loss_type") or ("liger" if liger else "chunked_nll")
    loss: Loss = "chunked_nll" if named == "chunked_nll" else "liger" if liger else "logits"
    stored = _type(keys, "dtype") or _type(keys, "torch_dtype") or "float32"
    return ToolStep(
        tool="TRL",
        loss=loss,
        autocast=_mixed(keys),
        outputs_in_fp32=_mixed(keys),
        logits_measured=loss == "logits",
        offloaded="all" if keys.get("activation_offloading") else "none",
        weights="fp32" if stored in FP32 else "16 bits",
        adapters="16 bits" if train.method in ("qlora", "int8_lora") else "fp32",
        foreach_update=_foreach(keys.get("optim")),
        fused_layers=LIGER if liger else "none",
        reentrant=bool(keys.get("gradient_checkpointing_kwargs.use_reentrant")),
    )


def _llama_factory(keys: Keys, train: Train) -> ToolStep:
    """Trained parameters are fp32 unless `pure_bf16`; checkpointing is reentrant by default."""
    pure, liger = bool(keys.get("pure_bf16")), bool(keys.get("enable_liger_kernel"))
    mixed = _mixed(keys) and not pure
    return ToolStep(
        tool="LLaMA-Factory",
        loss="liger" if liger else "logits",
        autocast=mixed,
        outputs_in_fp32=mixed,
        weights="16 bits" if pure or train.adapted else "fp32",
        adapters="16 bits" if pure else "fp32",
        fp32_parts="norms" if keys.get("upcast_layernorm") else "none",
        head_output_in_fp32=bool(keys.get("upcast_lmhead_output")),
        foreach_update=_foreach(keys.get("optim")),
        fused_layers=LIGER if liger else "none",
        reentrant=keys.get("use_reentrant_gc") is not False,
    )


def _axolotl(keys: Keys, train: Train) -> ToolStep:
    """Norms, embedding and head that k-bit preparation makes fp32 are converted back to 16 bits."""
    plugins = str(keys.get("plugins", ""))
    liger = "liger" in plugins.lower()
    cut = "cut_cross_entropy" in plugins or bool(keys.get("cut_cross_entropy"))
    fused = liger and bool(keys.get("liger_fused_linear_cross_entropy"))
    loss: Loss = "cut_cross_entropy" if cut else "liger" if fused else "logits"
    return ToolStep(
        tool="Axolotl",
        loss=loss,
        autocast=_mixed(keys),
        outputs_in_fp32=_mixed(keys),
        foreach_update=_foreach(keys.get("optimizer")),
        fused_layers=LIGER if liger and keys.get("liger_rms_norm") else "none",
        offloaded="all" if keys.get("activation_offloading") is True else "none",
        reentrant=keys.get("gradient_checkpointing_kwargs.use_reentrant") is not False,
    )


def _torchtune(keys: Keys, train: Train) -> ToolStep:
    """Everything has the type `dtype`; losses of torchtune work in eight chunks, in fp32 unless they are compiled.

    `compile` compiles layers one by one: norms, rotary embedding and SwiGLU are a kernel each, and save no more than
    those of Liger (counted with PyTorch's partitioner: 16 tensors of tokens × hidden size a layer of Llama).
    """
    compiled = bool(keys.get("compile"))
    loss = str(keys.get("loss._component_", "")).rpartition(".")[2]
    with_head = compiled and loss == "LinearCrossEntropyLoss"
    return ToolStep(
        tool="torchtune",
        loss="fp32_logits_alone" if loss == "CrossEntropyLoss" else "chunked_head",
        compiled_head=with_head,
        cross_entropy="PyTorch" if not compiled else "in place" if with_head else "compiled",
        fused_layers=LIGER if compiled else "none",
        copied_keys=True,
        offloaded="decoder" if keys.get("enable_activation_offloading") else "none",
        autocast=False,
        weights="fp32" if _type(keys, "dtype") in FP32 else "16 bits",
        adapters="16 bits",
        foreach_update=not keys.get("optimizer.fused"),
    )


def _litgpt(keys: Keys, train: Train) -> ToolStep:
    """Its own decoder without checkpointing; Fabric returns logits in fp32; bitsandbytes must be 0.42."""
    quantised = train.method == "qlora"
    return ToolStep(
        tool="LitGPT",
        decoder="litgpt",
        loss="chunked_logits" if train.adapted else "fp32_logits",
        autocast=str(keys.get("precision", "")).endswith("mixed"),
        outputs_in_fp32=True,
        weights="fp32" if keys.get("precision") in FP32 else "16 bits",
        adapters="16 bits",
        foreach_update=True,
        old_4bit=quantised,
        adapted_head=bool(keys.get("lora_head")),
        stable_embedding=quantised,
    )


def _ms_swift(keys: Keys, train: Train) -> ToolStep | None:
    """Weights have the type `torch_dtype`, adapters peft's; DDP alone recomputes without reentrance. ms-swift 4.6.

    Logits are computed at trained positions: all of them, as rows count as full.
    """
    if keys.get("tuner_backend") == "unsloth" or train.context_parallel > 1:
        return None
    liger, reentrant = bool(keys.get("use_liger_kernel")), keys.get("gradient_checkpointing_kwargs.use_reentrant")
    return ToolStep(
        tool="ms-swift",
        loss="liger" if liger else "logits",
        outputs_in_fp32=True,
        weights="fp32" if _type(keys, "torch_dtype") in FP32 else "16 bits",
        adapters="16 bits" if keys.get("lora_dtype") in ("bfloat16", "float16") else "fp32",
        foreach_update=_foreach(keys.get("optim")),
        fused_layers=LIGER if liger else "none",
        reentrant=train.sharding != "ddp" if reentrant is None else bool(reentrant),
    )


STEPS: Mapping[str, Callable[[Keys, Train], ToolStep | None]] = {
    "TRL": _trl,
    "LLaMA-Factory": _llama_factory,
    "Axolotl": _axolotl,
    "torchtune": _torchtune,
    "LitGPT": _litgpt,
    "ms-swift": _ms_swift,
}
"""By the name of the tool."""


def step_of(tool: str, keys: Keys, train: Train) -> ToolStep | None:
    """The training step of a tool; None if it is not described here."""
    describe = STEPS.get(tool)
    if describe is None:
        return None
    if not train.goal.compares:
        return describe(keys, train)
    table = next(one for one in tables() if one["tool"] == tool)
    loss = table["objectives"].get(train.objective, {}).get("loss")
    if loss is None or (step := describe(keys, train)) is None:
        return None
    # accelerate's tools keep a second model in full fine-tuning.
    of_reference: Literal["adapters off", "second model"] = "adapters off" if train.adapted else "second model"
    reference = of_reference if train.goal.has_reference else "none"
    return replace(step, loss=loss, logits_measured=False, reference=reference)
