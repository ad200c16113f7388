"""What is measured on a GPU, in order of worth."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from transformers import PretrainedConfig

from benchmarks.gpu.model_configs import MODELS
from lean_finetune.config.field_types import FusedKernels, Method, OptimizerName, Precision
from lean_finetune.memory.predict.traced_step import TracedSteps
from lean_finetune.memory.trace.setting import Setting
from lean_finetune.step.batches import BatchShape
from tests.kit.specs import joined, padded, train_of


def _padded(rows: int, length: int) -> BatchShape:
    """Padded rows, half of whose positions are trained."""
    return padded(rows, length, rows * length // 2)


def _joined(*lengths: int) -> BatchShape:
    """Packed rows, half of whose positions are trained."""
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
class MemoryCase:
    """A run whose memory is predicted and measured."""

    seconds = 30
    """Measured on an H100 with imports: 23 to 54, of which about 15 are imports, which now run ahead."""
    model: str
    method: Method
    grad_ckpt: bool = True
    optimizer: OptimizerName = "adamw"
    layout: str
    """A name in LAYOUTS."""
    loss_chunk: int | None = 512
    precision: Precision = "bf16"
    expandable: bool = True
    """Whether the allocator's segments grow."""
    more: tuple[tuple[str, Any], ...] = ()
    """More parameters of section train (see `changed`), with their values."""

    @property
    def name(self) -> str:
        """A name that no other case has."""
        switches = f"{'ckpt' if self.grad_ckpt else 'no ckpt'}, {self.optimizer}, chunk {self.loss_chunk}"
        precision = "" if self.precision == "bf16" else f", {self.precision}"
        more = "".join(f", {key}={value}" for key, value in self.more) + ("" if self.expandable else ", fixed segments")
        return f"{self.model}, {self.method}{precision}, {switches}, {self.layout}{more}"

    @property
    def setting(self) -> Setting:
        """The setting that is traced and run."""
        own = {"max_grad_norm": 1.0, "optimizer": self.optimizer, "loss_chunk": self.loss_chunk, **dict(self.more)}
        return Setting(train=train_of(self.method, self.precision, grad_ckpt=self.grad_ckpt, **own))


SMALL_SWITCHES: tuple[tuple[Method, str, tuple[tuple[str, Any], ...]], ...] = (
    ("full", "tiny, one a step", (("optimizer_in_backward", True), ("max_grad_norm", None))),
    ("qlora", "tiny", (("lora_dora", True), ("quant_type", "fp4"), ("quant_double", False))),
    ("int8_lora", "tiny", ()),
    ("lora", "tiny", (("grad_ckpt_policy", "selective"), ("attention", "eager"))),
)
"""Switches for which a CPU can show that models are built as they are predicted."""
_llama = partial(MemoryCase, model="Llama-3.1-8B")
FIRST = (
    _llama(method="lora", layout="4 x 1024"),
    _llama(method="qlora", layout="joined"),
    MemoryCase(model="Llama-3.2-3B", method="full", layout="4 x 1024"),
    _llama(method="int8_lora", layout="4 x 1024"),
    _llama(method="lora", layout="1 x 2048", grad_ckpt=False),
    _llama(method="qlora", layout="1 x 2048", grad_ckpt=False),
    MemoryCase(model="Qwen2.5-1.5B", method="full", layout="1 x 2048", grad_ckpt=False),
    _llama(method="int8_lora", layout="1 x 2048", grad_ckpt=False),
    _llama(method="lora", layout="rising"),
    _llama(method="qlora", layout="falling"),
    _llama(method="full", layout="1 x 2048", optimizer="adamw_8bit"),
    MemoryCase(model="Llama-3.2-3B", method="int8_lora", layout="falling"),
)
"""Every method with and without checkpointing, over rows of one length, of several lengths, and joined."""
FUSED = (
    _llama(method="lora", layout="1 x 2048", grad_ckpt=False, more=(("fused_kernels", "liger"),)),
    MemoryCase(
        model="Qwen2.5-1.5B", method="full", layout="1 x 2048", grad_ckpt=False, more=(("fused_kernels", "liger"),)
    ),
    _llama(method="qlora", layout="joined", more=(("fused_kernels", "liger"),)),
)
"""Cases of FIRST with Liger-Kernel, which the machine needs."""
EXPERTS = (
    MemoryCase(model="Qwen3-30B-A3B, 4 layers", method="lora", layout="1 x 2048"),
    MemoryCase(model="Qwen3-30B-A3B, 4 layers", method="lora", layout="1 x 2048", more=(("lora_experts", "all"),)),
    MemoryCase(model="Qwen3-30B-A3B, 4 layers", method="full", layout="1 x 2048", optimizer="adamw_8bit"),
    MemoryCase(model="gpt-oss-20b, 4 layers", method="lora", layout="1 x 2048", precision="fp16"),
    MemoryCase(model="tiny experts", method="full", layout="tiny"),
)
OFFLOAD = (
    _llama(method="lora", layout="4 x 1024", grad_ckpt=False, more=(("offload_activations", "cpu"),)),
    _llama(method="qlora", layout="4 x 1024", more=(("offload_activations", "cpu"),)),
    MemoryCase(model="Llama-3.2-3B", method="full", layout="4 x 1024", more=(("offload", "optimizer"),)),
    _llama(method="qlora", layout="1 x 2048", optimizer="paged_adamw_8bit"),
)
SEGMENTS = (
    _llama(method="lora", layout="rising", expandable=False),
    _llama(method="qlora", layout="falling", expandable=False),
    MemoryCase(model="Llama-3.2-3B", method="full", layout="4 x 1024", expandable=False),
)
"""Cases of FIRST in the other kind of segments."""
SWITCHES: Sequence[Mapping[str, Any]] = (
    {"grad_ckpt_policy": "selective"},
    {"grad_ckpt_policy": "every_n"},
    {"quant_type": "fp4", "quant_double": False},
    {"lora_dora": True},
    {"attention": "flash_attention_2"},
)


def _rest() -> Iterator[MemoryCase]:
    """Switches that the other cases leave out, and other models and optimizers."""
    for more in SWITCHES:
        yield _llama(method="qlora", layout="1 x 2048", more=tuple(more.items()))
    yield _llama(method="lora", layout="4 x 1024", loss_chunk=None)
    yield _llama(method="lora", layout="1 x 2048", precision="pure_bf16")
    for name in ("adamw_8bit", "lion_8bit", "adafactor", "ademamix_8bit"):
        yield MemoryCase(model="Llama-3.2-3B", method="full", layout="rising", optimizer=name)
    in_backward = (("optimizer_in_backward", True), ("max_grad_norm", None))
    yield _llama(method="full", optimizer="adamw_8bit", layout="1 x 2048 a step", more=in_backward)
    for model in ("Llama-3.2-3B", "Qwen2.5-1.5B"):
        for method in ("lora", "qlora"):
            for layout in ("falling", "joined"):
                yield MemoryCase(model=model, method=method, layout=layout)


def small_cases() -> Iterator[MemoryCase]:
    """Memory cases that a CPU measures in seconds, to show that the benchmark works."""
    yield MemoryCase(model="tiny", method="full", grad_ckpt=False, layout="tiny")
    yield MemoryCase(model="tiny", method="lora", layout="tiny joined")
    yield MemoryCase(model="tiny", method="qlora", layout="tiny")
    for method, layout, more in SMALL_SWITCHES:
        yield MemoryCase(model="tiny", method=method, layout=layout, precision="fp32", more=more)


@dataclass(frozen=True, kw_only=True)
class SpeedCase:
    """A training step that is timed: one micro-batch, with every position but each row's last trained."""

    seconds = 25
    """Measured: ten steps of LoRA, with imports, loading and the products that give the rate of the device."""
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
    kernels: FusedKernels = "auto"
    """train.fused_kernels, whose default is none until a GPU has run these kernels."""
    more: tuple[tuple[str, Any], ...] = ()
    """More parameters of section train (see `changed`), with their values."""

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
        train = train_of(
            self.method,
            grad_ckpt=self.grad_ckpt,
            fused_kernels=self.kernels,
            optimizer=self.optimizer,
            loss_chunk=self.loss_chunk,
            max_grad_norm=1.0,
            offload_activations="cpu" if self.offload else "none",
            **dict(self.more),
        )
        return Setting(train=train)


LORA_4096, QLORA_LEAST = "LoRA, 1 x 4096", "QLoRA, 2 x 2048, everything on"
_PAGED: OptimizerName = "paged_adamw_8bit"
SPEED_CASES = (
    SpeedCase(name=LORA_4096, method="lora", rows=1, length=4096, optimizer="adamw", grad_ckpt=False),
    SpeedCase(name=QLORA_LEAST, method="qlora", rows=2, length=2048, optimizer=_PAGED, loss_chunk=256, offload=True),
    SpeedCase(name="QLoRA, 2 x 2048", method="qlora", rows=2, length=2048),
    SpeedCase(name="QLoRA, 1 x 8192", method="qlora", rows=1, length=8192),
    SpeedCase(name="full bf16, 2 x 2048", method="full", rows=2, length=2048),
)
FUSED_SPEED = SpeedCase(
    name=f"{LORA_4096}, Liger", method="lora", rows=1, length=4096, optimizer="adamw", grad_ckpt=False, kernels="liger"
)
"""The first of them with Liger-Kernel."""
_small = partial(SpeedCase, model="tiny, untied", rows=2, length=64, loss_chunk=32)
SMALL_SPEED_CASES = (
    _small(name="LoRA, 2 x 64", method="lora", optimizer="adamw", grad_ckpt=False),
    _small(name="full bf16, 2 x 64", method="full"),
    _small(name="QLoRA, 2 x 64", method="qlora"),
)


@dataclass(frozen=True, kw_only=True)
class SwitchesCase:
    """A step that is timed with switches on and off, interleaved in one process."""

    seconds = 60
    speed: SpeedCase
    changes: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]
    """Names of variants with the fields of `speed` that they change."""

    @property
    def name(self) -> str:
        """A name that no other case has."""
        return f"switches: {self.speed.name}"

    @property
    def variants(self) -> Sequence[str]:
        """Names of the variants, in the order of a round."""
        return [name for name, _ in self.changes]

    def variant(self, name: str) -> SpeedCase:
        """The step of a variant."""
        return replace(self.speed, **dict(dict(self.changes)[name]))


_Change = tuple[str, tuple[tuple[str, Any], ...]]
_NO_NORMS = ("fused_norms", "none")
_OFF = (("kernels", "none"), ("more", (("lora_joined", "none"), _NO_NORMS)))
_ALL_ON: _Change = ("all on", ())
_ALL_OFF: _Change = ("all off", _OFF)
_NO_CKPT: _Change = ("without checkpointing", (("grad_ckpt", False),))
_NO_CKPT_OFF: _Change = ("without checkpointing, all off", (("grad_ckpt", False), *_OFF))
SWITCHES_CASES = (
    SwitchesCase(
        speed=SPEED_CASES[0],
        changes=(
            _ALL_OFF,
            ("joined alone", (("kernels", "none"), ("more", (_NO_NORMS,)))),
            ("joined and norms", (("kernels", "none"),)),
            _ALL_ON,
        ),
    ),
    SwitchesCase(speed=SPEED_CASES[2], changes=(_ALL_OFF, _ALL_ON, _NO_CKPT_OFF, _NO_CKPT)),
    SwitchesCase(speed=SPEED_CASES[4], changes=(_ALL_OFF, _ALL_ON, _NO_CKPT, ("adamw", (("optimizer", "adamw"),)))),
)
"""LoRA, QLoRA and full."""


@dataclass(frozen=True, kw_only=True)
class _ToolCase:
    """The same step by another tool."""

    prefix: ClassVar[str]
    speed: SpeedCase

    @property
    def name(self) -> str:
        """A name that no other case has."""
        return self.prefix + self.speed.name


@dataclass(frozen=True, kw_only=True)
class TrlCase(_ToolCase):
    """The same step by TRL."""

    seconds = 35
    prefix = "TRL: "


@dataclass(frozen=True, kw_only=True)
class UnslothCase(_ToolCase):
    """The same step by Unsloth, which compiles layers first."""

    seconds = 90
    prefix = "Unsloth: "


@dataclass(frozen=True, kw_only=True)
class ProfileCase:
    """Where the time of a step goes."""

    seconds = 40
    speed: SpeedCase

    @property
    def name(self) -> str:
        """A name that no other case has."""
        return f"profile: {self.speed.name}"


@dataclass(frozen=True, kw_only=True)
class LoadCase:
    """A checkpoint of several files that is loaded, and quantised by the methods that do so."""

    seconds = 60
    model: str
    method: Method

    @property
    def name(self) -> str:
        """A name that no other case has."""
        return f"loading: {self.model}, {self.method}"


@dataclass(frozen=True, kw_only=True)
class KernelsCase:
    """Kernels of this project, compared with those they replace."""

    seconds = 15
    name: str = "kernels"


@dataclass(frozen=True, kw_only=True)
class TestsCase:
    """The tests that need a GPU, among them the recovery of a run whose memory ends."""

    seconds = 90
    name: str = "tests marked gpu"


Case = MemoryCase | SpeedCase | SwitchesCase | TrlCase | UnslothCase | ProfileCase | LoadCase | KernelsCase | TestsCase


def gpu_cases() -> list[Case]:
    """All cases of a GPU, in order of worth."""
    pairs: list[list[Case]] = [[case, TrlCase(speed=case)] for case in SPEED_CASES]
    lora, least, qlora, qlora_long, full = pairs
    loading = [LoadCase(model="Llama-3.2-3B", method=method) for method in ("full", "qlora", "int8_lora")]
    cases: list[Case] = [
        KernelsCase(),
        *SWITCHES_CASES,
        *[*lora, *qlora, *full],
        *[UnslothCase(speed=SPEED_CASES[number]) for number in (2, 0)],
        *[ProfileCase(speed=SPEED_CASES[number]) for number in (0, 2, 4)],
        FUSED_SPEED,
        *FIRST,
        *[FUSED[0], EXPERTS[1], OFFLOAD[2], OFFLOAD[0]],  # One of each kind, before the others of these kinds.
        *[*least, *qlora_long],
        *[*FUSED, *EXPERTS, *OFFLOAD, *SEGMENTS],
        TestsCase(),
        *loading,
        *_rest(),
    ]
    return list(dict.fromkeys(cases))


def fake_cases() -> list[Case]:
    """Small cases of each kind but tests, for a CPU."""
    memory = [*list(small_cases())[:3], MemoryCase(model="tiny experts", method="lora", layout="tiny")]
    speed = SMALL_SPEED_CASES[0]
    switches = SwitchesCase(speed=SMALL_SPEED_CASES[2], changes=(_ALL_OFF, _ALL_ON))
    return [
        *memory,
        switches,
        ProfileCase(speed=speed),
        speed,
        LoadCase(model="tiny, untied", method="qlora"),
        KernelsCase(),
    ]
