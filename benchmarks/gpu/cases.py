"""The configurations that are measured on a GPU: models × methods × memory switches × shapes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from transformers import PretrainedConfig, Qwen2Config

from benchmarks.specs import joined, llama, model_spec, padded
from lean_finetune.config.field_types import Method, OptimizerName, Precision
from lean_finetune.memory.predict.setting import Setting
from lean_finetune.memory.predict.traced_shapes import TracedSteps
from lean_finetune.model.model_spec import ModelSpec
from lean_finetune.step.batches import BatchShape

MODELS: Mapping[str, PretrainedConfig] = {
    "Llama-3.1-8B": llama(4096, 14336, layers=32, heads=32, kv_heads=8, max_position_embeddings=131072),
    "Llama-3.2-3B": llama(
        3072, 8192, layers=28, heads=24, kv_heads=8, head_dim=128, tied=True, max_position_embeddings=131072
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
    "tiny": llama(64, 128, layers=2, heads=4, kv_heads=2, vocabulary=256, tied=True),
    "tiny, untied": llama(64, 128, layers=2, heads=4, kv_heads=2, vocabulary=256),
}
BIG = ("Llama-3.1-8B", "Llama-3.2-3B", "Qwen2.5-1.5B")


def _padded(rows: int, length: int) -> BatchShape:
    """Padded rows, half of whose positions are trained."""
    return padded(rows, length, rows * length // 2)


def _joined(*lengths: int) -> BatchShape:
    """Joined rows, half of whose positions are trained."""
    return joined(lengths, sum(lengths) // 2)


# Two micro-batches add to gradients; a second step runs with the optimizer state and caches of the first.
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


@dataclass(frozen=True, kw_only=True)
class GpuCase:
    """A run whose memory is measured."""

    model: str
    method: Method
    grad_ckpt: bool = True
    optimizer: OptimizerName = "adamw"
    layout: str
    """A name in LAYOUTS."""
    loss_chunk: int | None = 512
    precision: Precision = "bf16"
    more: tuple[tuple[str, Any], ...] = ()
    """More parameters: fields of ModelSpec or of Setting, with their values."""

    @property
    def name(self) -> str:
        """A name that no other case has."""
        switches = f"{'ckpt' if self.grad_ckpt else 'no ckpt'}, {self.optimizer}, chunk {self.loss_chunk}"
        precision = "" if self.precision == "bf16" else f", {self.precision}"
        more = "".join(f", {key}={value}" for key, value in self.more)
        return f"{self.model}, {self.method}{precision}, {switches}, {self.layout}{more}"

    @property
    def setting(self) -> Setting:
        """The setting that is traced and run."""
        names = {each.name for each in fields(ModelSpec)}
        of_model = {key: value for key, value in self.more if key in names}
        of_setting = {"max_grad_norm": 1.0} | {key: value for key, value in self.more if key not in names}
        spec = model_spec(self.method, self.precision, grad_ckpt=self.grad_ckpt, **of_model)
        return Setting(model=spec, optimizer=self.optimizer, loss_chunk=self.loss_chunk, **of_setting)


SMALL_SWITCHES: tuple[tuple[Method, str, tuple[tuple[str, Any], ...]], ...] = (
    ("full", "tiny, one a step", (("optimizer_in_backward", True), ("max_grad_norm", None))),
    ("qlora", "tiny", (("lora_dora", True), ("quant_type", "fp4"), ("double_quant", False))),
    ("int8_lora", "tiny", ()),
    ("lora", "tiny", (("grad_ckpt_policy", "selective"), ("attention", "eager"))),
)
"""Switches for which a CPU can show that models are built as they are predicted."""
MATRIX: tuple[tuple[Method, bool, str], ...] = (
    ("lora", True, "1 x 2048"),
    ("lora", True, "falling"),
    ("lora", True, "joined"),
    ("lora", False, "1 x 2048"),
    ("full", True, "4 x 1024"),
    ("full", True, "rising"),
)
OPTIMIZERS: tuple[OptimizerName, ...] = ("adamw", "adamw_8bit")
SWITCH_OPTIMIZERS: tuple[OptimizerName, ...] = ("lion_8bit", "adafactor", "ademamix_8bit")


def cases() -> Iterator[GpuCase]:
    """The memory cases of a GPU."""
    for optimizer in OPTIMIZERS:
        for model in BIG:
            for method, grad_ckpt, layout in MATRIX:
                yield GpuCase(model=model, method=method, grad_ckpt=grad_ckpt, optimizer=optimizer, layout=layout)
    for model in BIG:
        for grad_ckpt, layout in ((True, "4 x 1024"), (True, "joined"), (False, "1 x 2048"), (True, "rising")):
            yield GpuCase(model=model, method="qlora", grad_ckpt=grad_ckpt, layout=layout)
        yield GpuCase(model=model, method="lora", layout="4 x 1024", loss_chunk=None)
    yield from switches()


def switches() -> Iterator[GpuCase]:
    """One case for each switch that the matrix leaves out, on the largest model."""
    case = partial(GpuCase, model="Llama-3.1-8B", layout="1 x 2048")
    for more in (
        {"grad_ckpt_policy": "selective"},
        {"grad_ckpt_policy": "every_n"},
        {"offload_activations": "cpu"},
        {"quant_type": "fp4", "double_quant": False},
        {"lora_dora": True},
        {"attention": "flash_attention_2"},
    ):
        yield case(method="qlora", more=tuple(more.items()))
    yield case(method="qlora", optimizer="paged_adamw_8bit")
    yield case(method="int8_lora")
    yield case(method="lora", precision="pure_bf16")
    for name in SWITCH_OPTIMIZERS:
        yield case(method="full", optimizer=name)
    yield case(method="full", more=(("offload", "optimizer"),))
    in_backward = (("optimizer_in_backward", True), ("max_grad_norm", None))
    yield GpuCase(
        model="Llama-3.1-8B", method="full", optimizer="adamw_8bit", layout="1 x 2048 a step", more=in_backward
    )


def small_cases() -> Iterator[GpuCase]:
    """Memory cases that a CPU measures in seconds, to show that the benchmark works."""
    yield GpuCase(model="tiny", method="full", grad_ckpt=False, layout="tiny")
    yield GpuCase(model="tiny", method="lora", layout="tiny joined")
    yield GpuCase(model="tiny", method="qlora", layout="tiny")
    for method, layout, more in SMALL_SWITCHES:
        yield GpuCase(model="tiny", method=method, layout=layout, precision="fp32", more=more)


@dataclass(frozen=True, kw_only=True)
class SpeedCase:
    """A training step that is timed: one micro-batch, with every position but each row's last trained."""

    name: str
    model: str = "Llama-3.1-8B"
    method: Method
    rows: int
    length: int
    """Tokens of each row."""
    optimizer: OptimizerName = "adamw_8bit"
    grad_ckpt: bool = True
    loss_chunk: int = 512
    offload: bool = False
    """Activations go to pinned host memory."""

    @property
    def config(self) -> PretrainedConfig:
        """Configuration of the model."""
        return MODELS[self.model]

    @property
    def shape(self) -> BatchShape:
        """Shape of the micro-batch."""
        return padded(self.rows, self.length, self.rows * (self.length - 1))

    @property
    def setting(self) -> Setting:
        """The setting that is trained."""
        return Setting(
            model=model_spec(self.method, grad_ckpt=self.grad_ckpt),
            optimizer=self.optimizer,
            loss_chunk=self.loss_chunk,
            max_grad_norm=1.0,
            offload_activations="cpu" if self.offload else "none",
        )


LORA_4096, QLORA_LEAST = "LoRA, 1 x 4096", "QLoRA, 2 x 2048, everything on"
_PAGED: OptimizerName = "paged_adamw_8bit"
SPEED_CASES = (
    SpeedCase(name=LORA_4096, method="lora", rows=1, length=4096, optimizer="adamw", grad_ckpt=False),
    SpeedCase(name=QLORA_LEAST, method="qlora", rows=2, length=2048, optimizer=_PAGED, loss_chunk=256, offload=True),
    SpeedCase(name="QLoRA, 2 x 2048", method="qlora", rows=2, length=2048),
    SpeedCase(name="QLoRA, 1 x 8192", method="qlora", rows=1, length=8192),
    SpeedCase(name="full bf16, 2 x 2048", method="full", rows=2, length=2048),
)
_small = partial(SpeedCase, model="tiny, untied", rows=2, length=64, loss_chunk=32)
SMALL_SPEED_CASES = (
    _small(name="LoRA, 2 x 64", method="lora", optimizer="adamw", grad_ckpt=False),
    _small(name="full bf16, 2 x 64", method="full"),
    _small(name="QLoRA, 2 x 64", method="qlora"),
)
