"""A memory switch, and the switches of activations and of several GPUs."""

import json
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal

from lean_finetune.config.field_types import SPLIT_WEIGHTS, Sharding
from lean_finetune.config.parallel_layout import Dimension
from lean_finetune.islands.tower import TOWER
from lean_finetune.memory.trace.memory_trace import ACTIVATIONS, LOGITS
from lean_finetune.memory.trace.setting import Setting

Values = Mapping[str, Any]
"""Values by dotted key of params.yaml."""
SAME, ROUNDED, UNCLIPPED, SMALLER_STEPS, OTHER_WEIGHTS, SMALLER_PARTS, LESS_DATA = range(7)
EFFECTS = (
    "same training result",
    "different rounding: the loss may differ slightly",
    "no gradient clipping",
    "smaller optimizer steps without gradient clipping",
    "trains different weights",
    f"changes the data: {TOWER.smaller}",
    "rows are truncated to fewer tokens",
)
"""Effects on learning, the least harmful first."""


@dataclass(frozen=True, kw_only=True)
class Support:
    """What the device can do."""

    cuda: bool
    native_bf16: bool
    host_ram_known: bool = False
    """RAM of the host may be what is missing."""
    small_chunks: bool = False
    """Small chunks of the loss are worth trying: the search has time for them."""


Variants = Callable[[Setting, Support], Iterable[Values]]
"""Values to try for a setting. Values equal to the setting's own are ignored, and those that a rule refuses."""


@dataclass(frozen=True, kw_only=True)
class Switch:
    """A way to change the memory of a run. `memory/advice/switches.py` lists all of them."""

    name: str
    parameters: tuple[str, ...]
    """Dotted keys that it owns: `("train.method",)`. Its variants may reset keys of other switches too."""
    lighter: Variants
    """Variants for advice, each with less memory than the one before."""
    shown: Variants = lambda setting, support: ()
    """Variants for switches.csv, heavier ones too."""
    effect: int
    """Index in EFFECTS."""
    ease: int
    """Rank of the first variant, 1 is the easiest. It decides between candidates of equal speed."""
    excludes: frozenset[str] = frozenset()
    """Names of switches that it is not combined with."""
    one_micro_batch: bool = False
    """Needs optimizer steps of a single micro-batch."""
    saves: str | None = None
    """Memory category that it reduces, if it is only one: it can never save more than all of that category."""
    changes_states: bool = True
    """Changes the bytes of weights, gradients or optimizer state."""
    other_memory: Literal["same", "not less", "unknown"] = "unknown"
    """Memory besides these states and `saves`, compared with a weaker variant. A safe default for a new switch."""
    words: Callable[[Setting], Mapping[str, str]] = lambda setting: {}
    """What it does in a run, in words by what they are about; nothing where it is off. For `lean-finetune plan`."""
    time: Callable[[Setting, float], float] = lambda setting, more_micro_batches: 1.0
    """Assumed factor on the time of a step, if `step_cost` does not compute what the switch costs.

    The second argument is the number of micro-batches relative to the run without changes.
    """


def flags_of(values: Values) -> tuple[str, ...]:
    """Overrides for `dvc exp run -S`."""
    return tuple(f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in values.items())


def set_options(flags: Iterable[str]) -> str:
    """Overrides as command-line options."""
    return shlex.join(word for flag in flags for word in ("-S", flag))


# Memory switches of activations and logits.

TILES = 8
LOSS_CHUNK_TOKENS = 512
"""Logits of this many tokens are a small part of the peak, so advice offers no smaller chunk."""
SMALL_CHUNK_TOKENS = 128
"""On a GPU of 8 GB they are a tenth of it."""


PLACES = {"cpu": "the host", "disk": "disk"}
"""Where something is offloaded to, in words."""
RECOMPUTED: Values = {"train.grad_ckpt": True, "train.grad_ckpt_policy": "full", "train.grad_ckpt_layers": None}
"""Every layer recomputes its activations."""


def _lighter_activations(setting: Setting, support: Support) -> Iterable[Values]:
    """Recompute all but matmuls and attention, then all, then store layer inputs in host memory."""
    if not setting.train.grad_ckpt:
        yield {"train.grad_ckpt": True, "train.grad_ckpt_policy": "selective"}
    yield RECOMPUTED
    if support.cuda and setting.train.offload_activations == "none":
        yield {**RECOMPUTED, "train.offload_activations": "cpu"}


def _shown_activations(setting: Setting, support: Support) -> Iterable[Values]:
    if not setting.train.grad_ckpt:
        return [{"train.grad_ckpt": True}]
    return [{**RECOMPUTED, "train.grad_ckpt": False}, *_lighter_activations(setting, support)]


def _words_of_activations(setting: Setting) -> Mapping[str, str]:
    """What is recomputed, and where layers' inputs are stored."""
    train = setting.train
    recomputed = {
        "full": "checkpointing",
        "first_n": f"checkpointing of the first {train.grad_ckpt_layers} layers",
        "every_n": f"checkpointing of one layer in {train.grad_ckpt_every}",
        "selective": "selective checkpointing",
    }[train.grad_ckpt_policy]
    words = {"checkpointing": recomputed if train.grad_ckpt else "no checkpointing"}
    if train.offload_activations != "none":
        words["activations"] = f"activations on {PLACES[train.offload_activations]}"
    return words


def _tiles(setting: Setting, support: Support) -> Iterable[Values]:
    """MLPs in tiles: the intermediate values of an MLP, the largest of a recomputed layer, exist a tile at a time."""
    train = setting.train
    if train.sequence_tiles is None and train.offload_activations == train.compress_activations == "none":
        yield {"train.sequence_tiles": TILES}


def _compressed_activations(setting: Setting, support: Support) -> Iterable[Values]:
    """Saved activations in 8 bits. On a CPU it takes longer than recomputing."""
    if support.cuda and setting.train.compress_activations == "none" and setting.train.sequence_tiles is None:
        yield {"train.compress_activations": "int8"}


def _shown_fused_kernels(setting: Setting, support: Support) -> Iterable[Values]:
    """Kernels of this project, and of packages that are installed; a trace refuses families without their code."""
    if setting.train.fused_kernels != "none":
        yield {"train.fused_kernels": "none"}
    elif support.cuda:
        yield {"train.fused_kernels": "auto"}
        for kernels, package in (("liger", "liger_kernel"), ("fla", "fla")):
            if find_spec(package):
                yield {"train.fused_kernels": kernels}


def _lighter_loss_chunk(setting: Setting, support: Support) -> Iterable[Values]:
    if setting.train.loss_chunk is None:
        yield {"train.loss_chunk": LOSS_CHUNK_TOKENS}
    if support.small_chunks and (setting.train.loss_chunk or SMALL_CHUNK_TOKENS + 1) > SMALL_CHUNK_TOKENS:
        yield {"train.loss_chunk": SMALL_CHUNK_TOKENS}


ACTIVATION_SWITCHES = [
    Switch(
        name="activations",
        parameters=(
            "train.grad_ckpt",
            "train.grad_ckpt_policy",
            "train.grad_ckpt_layers",
            "train.offload_activations",
        ),
        lighter=_lighter_activations,
        shown=_shown_activations,
        words=_words_of_activations,
        effect=SAME,
        ease=1,
        saves=ACTIVATIONS,
        changes_states=False,
        other_memory="same",
    ),
    Switch(
        name="fused_kernels",
        parameters=("train.fused_kernels",),
        lighter=lambda setting, support: (),  # Not advised: not measured on a GPU.
        shown=_shown_fused_kernels,
        effect=ROUNDED,
        ease=3,
    ),
    Switch(
        name="tiles",
        parameters=("train.sequence_tiles",),
        lighter=_tiles,
        shown=_tiles,
        words=lambda setting: (
            {} if (tiles := setting.train.sequence_tiles) is None else {"tiles": f"MLPs in {tiles} tiles"}
        ),
        effect=SAME,
        ease=3,
        excludes=frozenset({"compression"}),
        saves=ACTIVATIONS,
        changes_states=False,
    ),
    Switch(
        name="compression",
        parameters=("train.compress_activations",),
        lighter=_compressed_activations,
        shown=_compressed_activations,
        words=lambda setting: (
            {}
            if (codes := setting.train.compress_activations) == "none"
            else {"compression": f"activations in 8 bits ({codes})"}
        ),
        effect=ROUNDED,
        ease=6,
        saves=ACTIVATIONS,
        changes_states=False,
        other_memory="same",
    ),
    Switch(
        name="loss_chunk",
        parameters=("train.loss_chunk",),
        lighter=_lighter_loss_chunk,
        shown=lambda setting, support: [
            {"train.loss_chunk": LOSS_CHUNK_TOKENS if setting.train.loss_chunk is None else None}
        ],
        words=lambda setting: {
            "loss": f"loss in chunks of {chunk} tokens" if (chunk := setting.train.loss_chunk) else "all logits at once"
        },
        effect=SAME,
        ease=4,
        saves=LOGITS,
        changes_states=False,
        other_memory="same",
    ),
]


# Memory switches of several GPUs: sharding, and context, tensor and pipeline parallelism.

LIGHTER_SHARDING: Mapping[Sharding, tuple[Sharding, ...]] = {
    "none": (),
    "ddp": ("zero1", "zero2", "zero3"),
    "zero1": ("zero2", "zero3"),
    "zero2": ("zero3",),
    "zero3": (),
    "hsdp": ("zero3",),
}
"""Modes with less memory per GPU than a mode, the most similar first."""
COMMUNICATION_TIME: Mapping[Sharding, float] = {"zero1": 1.02, "zero2": 1.05, "zero3": 1.10, "hsdp": 1.08}
"""Assumed factor on the time of a step: weights are communicated too, mostly while layers compute."""
NODE_DIVISORS = (2, 4, 8)
"""Sizes of train.tensor_parallel that advice tries."""
EXCHANGE_TIME = 1.15
"""Assumed factor on the time of a step: tokens and heads are exchanged before and after attention of each layer."""
STAGES_TIME = 1.10
"""Assumed factor on the time of a step, besides the pipeline's bubble: stages are never equally long."""
MOST_STAGES = 4
"""Each stage is traced, so no more are tried."""


def _lighter_sharding(setting: Setting, support: Support) -> Iterable[Values]:
    """Modes with smaller shards; at last, weights and gradients in host memory too."""
    values: Values = {}
    train = setting.train
    for mode in LIGHTER_SHARDING[setting.mode]:
        if mode != "zero1" or not train.adapted:  # Optimizer state of adapters is too small to be worth sharding.
            values = {"train.sharding": mode, "train.shard_group_gpus": None}
            yield values
    if support.cuda and setting.gpus > 1 and train.offload != "parameters":
        yield {**values, "train.offload": "parameters", "train.offload_to": "cpu"}
        if support.host_ram_known and not train.adapted:
            yield {**values, "train.offload": "parameters", "train.offload_to": "disk"}


def _context_parallel(setting: Setting, support: Support) -> Iterable[Values]:
    """The tokens of each row on two GPUs, or on the eight GPUs of a usual node."""
    sizes = sorted({2, min(NODE_DIVISORS[-1], setting.gpus)})
    return ({"train.context_parallel": size} for size in sizes if size > setting.layout.context)


def _words_of_layout(dimension: Dimension, setting: Setting) -> Mapping[str, str]:
    """Words on a dimension of the mesh of GPUs."""
    count = getattr(setting.layout, dimension)
    return {dimension: f"{dimension} parallel over {count} GPUs"} if count > 1 else {}


def _communication_time(setting: Setting, more_micro_batches: float) -> float:
    """Assumed time of a step relative to ddp: the links between GPUs are unknown."""
    mode = setting.mode
    # Sharded weights are gathered for each micro-batch.
    times = more_micro_batches if mode in SPLIT_WEIGHTS else 1.0
    return 1 + times * (COMMUNICATION_TIME.get(mode, 1.0) - 1)


def _smaller_parts(setting: Setting, support: Support) -> Iterable[Values]:
    """More GPUs for each matmul; if these are all GPUs, none share weights by train.sharding."""
    for size in (size for size in NODE_DIVISORS if size > setting.layout.tensor):
        alone: Values = {"train.sharding": "none", "train.shard_group_gpus": None} if size == setting.gpus else {}
        yield {"train.tensor_parallel": size, **alone}


def _divided_layers(setting: Setting, support: Support) -> Iterable[Values]:
    """A stage on each GPU."""
    if 1 < setting.gpus <= MOST_STAGES:
        yield {"train.pipeline_stages": setting.gpus, "train.sharding": "none", "train.shard_group_gpus": None}


PARALLEL_SWITCHES = [
    Switch(
        name="sharding",
        parameters=("train.sharding", "train.shard_group_gpus"),
        lighter=_lighter_sharding,
        words=lambda setting: {} if (mode := setting.train.sharding) == "none" else {"sharding": mode},
        effect=SAME,
        ease=9,
        other_memory="not less",
        time=_communication_time,
    ),
    Switch(
        name="stages",
        parameters=("train.pipeline_stages",),
        lighter=_divided_layers,
        words=partial(_words_of_layout, "pipeline"),
        effect=SAME,
        ease=10,
        time=lambda setting, more: STAGES_TIME if setting.layout.pipeline > 1 else 1.0,
    ),
    Switch(
        name="tensor_parallel",
        parameters=("train.tensor_parallel",),
        lighter=_smaller_parts,
        words=partial(_words_of_layout, "tensor"),
        effect=SAME,
        ease=10,
        excludes=frozenset({"sharding", "method"}),
    ),
    Switch(
        name="context_parallel",
        parameters=("train.context_parallel",),
        lighter=_context_parallel,
        words=partial(_words_of_layout, "context"),
        effect=SAME,
        ease=10,
        changes_states=False,
        time=lambda setting, more: EXCHANGE_TIME if setting.layout.context > 1 else 1.0,
    ),
]
