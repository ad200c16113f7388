"""The rows of benchmarks/facts/published_2026.csv: runs of other tools with their measured memory, as runs to trace."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from transformers import (
    FalconConfig,
    GemmaConfig,
    GPTBigCodeConfig,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PhiConfig,
    PretrainedConfig,
)

from benchmarks.estimate_facts import read_facts
from lean_finetune.config.schema import Train
from lean_finetune.memory.devices import resolve_gpu
from lean_finetune.memory.tool_step.sharing import Sharing, under_fsdp1
from lean_finetune.memory.tool_step.tool_step import Loss, ToolStep
from lean_finetune.memory.tool_step.trace_tool import ToolRun
from lean_finetune.memory.trace.cuda_kernels import target_of
from tests.kit.specs import changed, llama, train_of

FILE = "published_2026.csv"
WITHOUT_VERSION = ("litgpt-hub",)
"""Recipes whose rows do not say which version of the tool ran: their settings are not known."""


def _llama(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int, **more: Any
) -> LlamaConfig:
    return llama(hidden, inner, layers=layers, heads=heads, kv_heads=kv_heads, vocabulary=vocabulary, **more)


def _of(kind: Any, **values: Any) -> PretrainedConfig:
    """A configuration: some classes take arguments that are not among their fields."""
    config: PretrainedConfig = kind(**values)
    return config


def _mistral(kind: type[PretrainedConfig], **more: Any) -> PretrainedConfig:
    return _of(
        kind,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=32000,
        max_position_embeddings=32768,
        sliding_window=None,
        **more,
    )


def _phi(hidden: int, layers: int, rotated: float) -> PretrainedConfig:
    return _of(
        PhiConfig,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=32,
        vocab_size=51200,
        partial_rotary_factor=rotated,
        max_position_embeddings=2048,
    )


def _gemma(hidden: int, inner: int, layers: int, heads: int, kv_heads: int) -> PretrainedConfig:
    return _of(
        GemmaConfig,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=256,
        vocab_size=256000,
        max_position_embeddings=8192,
    )


MODELS: Mapping[str, PretrainedConfig] = {
    "llama-2-7b": _llama(4096, 11008, 32, 32, 32, 32000, max_position_embeddings=4096),
    "llama-2-13b": _llama(5120, 13824, 40, 40, 40, 32000, max_position_embeddings=4096),
    "llama-2-70b": _llama(8192, 28672, 80, 64, 8, 32000, max_position_embeddings=4096),
    "llama-3-8b": _llama(4096, 14336, 32, 32, 8, 128256, max_position_embeddings=8192),
    "llama-3.2-1b": _llama(2048, 8192, 16, 32, 8, 128256, tied=True, max_position_embeddings=131072),
    "llama-3.2-3b": _llama(3072, 8192, 28, 24, 8, 128256, tied=True, max_position_embeddings=131072),
    "tiny-llama-1.1b": _llama(2048, 5632, 22, 32, 4, 32000, max_position_embeddings=2048),
    "yi-34b": _llama(7168, 20480, 60, 56, 8, 64000, max_position_embeddings=4096),
    "mistral-7b": _mistral(MistralConfig),
    "mixtral-8x7b": _mistral(MixtralConfig, num_local_experts=8, num_experts_per_tok=2),
    "powerlm-3b": _of(
        GraniteConfig,
        hidden_size=2304,
        intermediate_size=9216,
        num_hidden_layers=40,
        num_attention_heads=36,
        num_key_value_heads=36,
        vocab_size=49152,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    ),
    "santacoder": _of(
        GPTBigCodeConfig,
        n_embd=2048,
        n_head=16,
        n_layer=24,
        n_inner=8192,
        vocab_size=49280,
        n_positions=2048,
        multi_query=True,
        activation_function="gelu_fast",
    ),
    "phi-1.5": _phi(2048, 24, 0.5),
    "phi-2": _phi(2560, 32, 0.4),
    "phi-3-mini": _of(
        Phi3Config,
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        vocab_size=32064,
        max_position_embeddings=4096,
        pad_token_id=32000,
    ),
    "gemma-2b": _gemma(2048, 16384, 18, 8, 1),
    "gemma-7b": _gemma(3072, 24576, 28, 16, 16),
    "stablelm-alpha-3b": _of(
        GPTNeoXConfig,
        hidden_size=4096,
        intermediate_size=16384,
        num_hidden_layers=16,
        num_attention_heads=32,
        vocab_size=50688,
        max_position_embeddings=4096,
        rotary_pct=0.25,
    ),
    "falcon-7b": _of(
        FalconConfig,
        hidden_size=4544,
        ffn_hidden_size=18176,
        num_hidden_layers=32,
        num_attention_heads=71,
        multi_query=True,
        vocab_size=65024,
        parallel_attn=True,
        bias=False,
        new_decoder_architecture=False,
        alibi=False,
    ),
}
"""Sizes from the models' config.json."""

_TRAINER = ToolStep(tool="TRL", foreach_update=True, reentrant=True)
"""transformers' Trainer of 2024: AdamW updates with multi-tensor kernels, checkpointing is reentrant."""
_LITGPT = ToolStep(
    tool="LitGPT",
    decoder="litgpt",
    loss="chunked_logits",
    autocast=False,
    outputs_in_fp32=True,
    adapters="16 bits",
    foreach_update=True,
)


def step_of_recipe(recipe: str, method: str) -> ToolStep:
    """The training step of a row's recipe."""
    if recipe.startswith("litgpt"):
        quantised = method == "qlora"
        return changed_step(_LITGPT, old_4bit=quantised, stable_embedding=quantised and recipe == "litgpt-hub")
    if recipe.startswith("torchtune"):
        return ToolStep(
            tool="torchtune",
            loss="chunked_head",
            cross_entropy="in place",
            compiled_head=True,
            fused_layers="norms and MLPs",
            copied_keys=True,
            autocast=False,
            adapters="16 bits",
        )
    if recipe == "fsdp_qlora":
        return changed_step(_TRAINER, tool="fsdp_qlora", loss="fp32_logits", autocast=False, adapters="16 bits")
    # fms-acceleration used transformers 4.48 for the first file and 4.45 for the others. GPTBigCode has another loss.
    table, _, plugins = recipe.partition(": ")
    loss: Loss = "shifted_logits" if table == "fms" else "fp32_logits"
    loss = "logits_in_16_bits" if "GPTBigCode" in plugins else "liger" if "liger" in plugins else loss
    fast = "foak" in plugins
    mixed = table == "fms-liger" or "bnb" in plugins
    return changed_step(
        _TRAINER,
        loss=loss,
        autocast=mixed,
        outputs_in_fp32=mixed,
        fused_layers="norms" if fast else "none",
        cross_entropy="in place" if fast and loss != "liger" else "PyTorch",
        kept_outputs=("c_attn",) if "GPTBigCode" in plugins else (),
        fp32_parts="norms" if plugins.startswith("baseline-peft-bnb") else "none",
    )


def changed_step(step: ToolStep, **changes: Any) -> ToolStep:
    """The step with other values."""
    return ToolStep(**{**vars(step), **changes})


@dataclass(frozen=True, kw_only=True)
class PublishedRow:
    """A run that somebody measured."""

    id: str
    source: str
    gpu: str
    gpus: int
    method: str
    recipe: str
    run: ToolRun
    """On one GPU of the run."""
    allocated_bytes: int | None
    reserved_bytes: int | None
    process_bytes: int | None
    ran: bool
    """False: it ran out of memory."""
    more: str
    note: str

    @property
    def settings_known(self) -> bool:
        """Whether the row says all that decides its memory."""
        return self.recipe not in WITHOUT_VERSION


def published_rows() -> list[PublishedRow]:
    """All rows, in the order of the file."""
    return [_row(values) for values in read_facts(FILE)]


def _row(values: Mapping[str, str]) -> PublishedRow:
    def size(name: str) -> int | None:
        return int(values[f"{name}_bytes"]) if values[f"{name}_bytes"] else None

    gpus, train = int(values["gpus"]), _train(values)
    device, _ = resolve_gpu(values["gpu"])
    step, sharing = step_of_recipe(values["recipe"], values["method"]), None
    if gpus > 1:
        kind: Literal["fsdp1", "fsdp1_no_shard"] = "fsdp1_no_shard" if train.sharding == "ddp" else "fsdp1"
        # fsdp_qlora checkpoints layers after FSDP1 wrapped them, so inside its units.
        inside = values["recipe"] == "fsdp_qlora"
        sharing = Sharing(kind=kind, gpus=gpus, mixed_precision=step.autocast, recomputed_outside=not inside)
        step = under_fsdp1(step, train, sharing)
    run = ToolRun(
        step=step,
        config=MODELS[values["model"]],
        train=train,
        sharing=sharing,
        target=target_of(device),
        rows=int(values["rows"]),
        length=int(values["length"]),
    )
    return PublishedRow(
        id=values["id"],
        source=values["source"],
        gpu=values["gpu"],
        gpus=gpus,
        method=values["method"],
        recipe=values["recipe"],
        run=run,
        allocated_bytes=size("allocated"),
        reserved_bytes=size("reserved"),
        process_bytes=size("process"),
        ran=values["outcome"] == "ran",
        more=values["more"],
        note=values["note"],
    )


def _train(values: Mapping[str, str]) -> Train:
    method: Any = values["method"]
    more = dict(pair.split("=") for pair in values["more"].split())
    train = train_of(method, rank=int(values["rank"] or 16), grad_ckpt=not values["recipe"].startswith("litgpt"))
    changes: dict[str, Any] = {
        "optimizer": values["optimizer"],
        "max_grad_norm": 1.0 if values["recipe"].startswith("fms") else None,
        "optimizer_in_backward": more.get("optimizer_in_backward") == "True",
        "sharding": more.get("sharding", "none"),
        "offload": more.get("offload", "none"),
    }
    if method != "full":
        changes |= {"lora_targets": values["targets"].split("+"), "lora_dropout": float(values["dropout"])}
    if method == "qlora":
        changes["quant_double"] = values["recipe"].startswith(("fms", "torchtune")) or "quant_double" in more
    return changed(train, **changes)
