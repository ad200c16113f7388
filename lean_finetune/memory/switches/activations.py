"""Memory switches of activations and logits."""

from collections.abc import Iterable, Mapping
from importlib.util import find_spec

from lean_finetune.memory.switches.switch import PLACES, ROUNDED, SAME, Support, Switch, Values
from lean_finetune.memory.trace.memory_trace import ACTIVATIONS, LOGITS
from lean_finetune.memory.trace.setting import Setting

TILES = 8
LOSS_CHUNK_TOKENS = 512
"""Logits of this many tokens are a small part of the peak, so advice offers no smaller chunk."""
SMALL_CHUNK_TOKENS = 128
"""On a GPU of 8 GB they are a tenth of it."""


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
