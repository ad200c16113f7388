"""The configurations that are measured on a GPU: models × methods × memory switches × shapes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from transformers import LlamaConfig, PretrainedConfig, Qwen2Config

from lean_finetune.config.field_types import Method, OptimizerName, Precision
from lean_finetune.memory.predict.peak import Setting
from lean_finetune.memory.predict.traced_shapes import TracedSteps
from lean_finetune.model.model_spec import ModelSpec
from lean_finetune.step.batches import BatchShape


def small_llama(*, tied: bool) -> LlamaConfig:
    """Small enough for a CPU; `tied`, its head is the input embedding."""
    return LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
    )


MODELS: Mapping[str, PretrainedConfig] = {
    "Llama-3.1-8B": LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=131072,
        tie_word_embeddings=False,
    ),
    "Llama-3.2-3B": LlamaConfig(
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=28,
        num_attention_heads=24,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128256,
        max_position_embeddings=131072,
        tie_word_embeddings=True,
    ),
    "Qwen2.5-1.5B": Qwen2Config(
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        vocab_size=151936,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    ),
    "tiny": small_llama(tied=True),
}
BIG = ("Llama-3.1-8B", "Llama-3.2-3B", "Qwen2.5-1.5B")
LORA_RANK, LOSS_CHUNK = 16, 512


@dataclass(frozen=True, kw_only=True)
class GpuCase:
    """One measurement."""

    model: str
    method: Method
    grad_ckpt: bool
    optimizer: OptimizerName
    layout: str
    """A name in LAYOUTS."""
    loss_chunk: int | None = LOSS_CHUNK
    precision: Precision = "bf16"
    more: tuple[tuple[str, Any], ...] = ()
    """Further parameters: fields of ModelSpec or of Setting, with their values."""

    @property
    def name(self) -> str:
        """What tells it from all others."""
        switches = f"{'ckpt' if self.grad_ckpt else 'no ckpt'}, {self.optimizer}, chunk {self.loss_chunk}"
        precision = "" if self.precision == "bf16" else f", {self.precision}"
        more = "".join(f", {key}={value}" for key, value in self.more)
        return f"{self.model}, {self.method}{precision}, {switches}, {self.layout}{more}"

    @property
    def setting(self) -> Setting:
        """What is traced and run."""
        names = {each.name for each in fields(ModelSpec)}
        of_model = {key: value for key, value in self.more if key in names}
        of_setting = {key: value for key, value in self.more if key not in names}
        spec = ModelSpec(
            method=self.method,
            precision=self.precision,
            grad_ckpt=self.grad_ckpt,
            lora_rank=LORA_RANK,
            lora_alpha=2 * LORA_RANK,
            lora_dropout=0.0,
            lora_targets=("all-linear",),
            seed=0,
            **of_model,
        )
        return Setting(
            model=spec,
            optimizer=self.optimizer,
            loss_chunk=self.loss_chunk,
            **{"max_grad_norm": 1.0, **of_setting},
        )


def _padded(rows: int, length: int) -> BatchShape:
    """Rows padded to each other, half of the positions trained."""
    return BatchShape(rows=rows, length=length, supervised=rows * length // 2, joined_lengths=None)


def _joined(*lengths: int) -> BatchShape:
    """Rows joined without padding, half of the positions trained."""
    total = sum(lengths)
    return BatchShape(rows=1, length=total, supervised=total // 2, joined_lengths=lengths)


# Two micro-batches, then another step: the second meets gradients, the step after meets what the first one left.
LAYOUTS: Mapping[str, TracedSteps] = {
    "1 x 2048": ((_padded(1, 2048), _padded(1, 2048)), (_padded(1, 2048),)),
    "1 x 2048 a step": ((_padded(1, 2048),), (_padded(1, 2048),)),
    "4 x 1024": ((_padded(4, 1024), _padded(3, 1000)), (_padded(4, 1024),)),
    "falling": ((_padded(2, 2048), _padded(5, 800), _padded(13, 312)), (_padded(31, 128), _padded(2, 2040))),
    "rising": ((_padded(31, 128), _padded(13, 312)), (_padded(5, 800), _padded(2, 2040)), (_padded(2, 2048),)),
    "joined": ((_joined(1500, 1000, 700, 500, 300, 96), _joined(2048, 1024, 512, 400)), (_joined(2048, 2048),)),
    "tiny": ((_padded(4, 96), _padded(2, 128)), (_padded(6, 64),)),
    "tiny, one a step": ((_padded(4, 96),), (_padded(2, 128),)),
    "tiny joined": ((_joined(128, 64, 40), _joined(100, 20)),),
}


SMALL_SWITCHES: tuple[tuple[Method, str, tuple[tuple[str, Any], ...]], ...] = (
    ("full", "tiny, one a step", (("optimizer_in_backward", True), ("max_grad_norm", None))),
    ("qlora", "tiny", (("lora_dora", True), ("quant_type", "fp4"), ("double_quant", False))),
    ("int8_lora", "tiny", ()),
    ("lora", "tiny", (("grad_ckpt_policy", "selective"), ("attention", "eager"))),
)
"""Switches of which a CPU shows that they are built and predicted alike."""


def cases() -> Iterator[GpuCase]:
    """The matrix."""
    for optimizer in ("adamw", "adamw_8bit"):
        for model in BIG:
            for method, grad_ckpt, layout in (
                ("lora", True, "1 x 2048"),
                ("lora", True, "falling"),
                ("lora", True, "joined"),
                ("lora", False, "1 x 2048"),
                ("full", True, "4 x 1024"),
                ("full", True, "rising"),
            ):
                yield _case(model, method, grad_ckpt, optimizer, layout)
    for model in BIG:
        for grad_ckpt, layout in ((True, "4 x 1024"), (True, "joined"), (False, "1 x 2048"), (True, "rising")):
            yield _case(model, "qlora", grad_ckpt, "adamw", layout)
        yield GpuCase(model=model, method="lora", grad_ckpt=True, optimizer="adamw", layout="4 x 1024", loss_chunk=None)
    yield from switches()


def switches() -> Iterator[GpuCase]:
    """One case for each switch that the matrix leaves out, on the largest model."""
    recomputed = partial(GpuCase, model="Llama-3.1-8B", grad_ckpt=True, layout="1 x 2048")
    for more in (
        {"grad_ckpt_policy": "selective"},
        {"grad_ckpt_policy": "every_n"},
        {"offload_activations": "cpu"},
        {"quant_type": "fp4", "double_quant": False},
        {"lora_dora": True},
        {"attention": "flash_attention_2"},
    ):
        yield recomputed(method="qlora", optimizer="adamw", more=tuple(more.items()))
    yield recomputed(method="qlora", optimizer="paged_adamw_8bit")
    yield recomputed(method="int8_lora", optimizer="adamw")
    yield recomputed(method="lora", optimizer="adamw", precision="pure_bf16")
    for name in ("lion_8bit", "adafactor", "ademamix_8bit"):
        yield recomputed(method="full", optimizer=name)
    host: dict[str, Any] = {"offload": "optimizer"}
    yield recomputed(method="full", optimizer="adamw", more=tuple(host.items()))
    one_by_one: dict[str, Any] = {"optimizer_in_backward": True, "max_grad_norm": None}
    alone = partial(recomputed, method="full", layout="1 x 2048 a step")
    yield alone(optimizer="adamw_8bit", more=tuple(one_by_one.items()))


def small_cases() -> Iterator[GpuCase]:
    """What a CPU measures in seconds, to see that the benchmark works."""
    for method, grad_ckpt, layout in (("full", False, "tiny"), ("lora", True, "tiny joined"), ("qlora", True, "tiny")):
        yield _case("tiny", method, grad_ckpt, "adamw", layout)
    for method, layout, more in SMALL_SWITCHES:
        yield GpuCase(
            model="tiny", method=method, grad_ckpt=True, optimizer="adamw", layout=layout, precision="fp32", more=more
        )


def _case(model: str, method: str, grad_ckpt: bool, optimizer: str, layout: str) -> GpuCase:
    """A case from plain names."""
    return GpuCase(
        model=model,
        method=method,  # type: ignore[arg-type]
        grad_ckpt=grad_ckpt,
        optimizer=optimizer,
        layout=layout,
    )
