"""Memory switches of activations and logits."""

from collections.abc import Iterable
from importlib.util import find_spec

from lean_finetune.memory.advice.switch import ROUNDED, SAME, Support, Switch, Values
from lean_finetune.memory.predict.setting import Setting
from lean_finetune.memory.trace.memory_trace import ACTIVATIONS, LOGITS

DIVIDING = frozenset({"tensor_parallel", "context_parallel"})
"""Switches that divide tokens or products among GPUs: not tried together with switches of saved activations."""
TILES = 8
LOSS_CHUNK_TOKENS = 512
"""Logits of this many tokens are a small part of the peak, so advice offers no smaller chunk."""


def _lighter_activations(setting: Setting, support: Support) -> Iterable[Values]:
    """Recompute all but matmuls and attention, then all, then store layer inputs in host memory."""
    full = {"train.grad_ckpt": True, "train.grad_ckpt_policy": "full"}
    if not setting.train.grad_ckpt and setting.train.method != "int8_lora":
        yield {"train.grad_ckpt": True, "train.grad_ckpt_policy": "selective"}
    yield full
    if support.cuda and setting.train.offload_activations == "none":
        yield {**full, "train.offload_activations": "cpu"}


def _shown_activations(setting: Setting, support: Support) -> Iterable[Values]:
    if not setting.train.grad_ckpt:
        return [{"train.grad_ckpt": True}]
    return [{"train.grad_ckpt": False, "train.grad_ckpt_policy": "full"}, *_lighter_activations(setting, support)]


def _plain_layers(setting: Setting) -> bool:
    """Whether a GPU computes complete rows and layers with the model's code, unchanged."""
    divided = (setting.tensor_parallel, setting.context, setting.pipeline_stages) != (1, 1, 1)
    return setting.train.fused_kernels == "none" and not divided


def _tiles(setting: Setting, support: Support) -> Iterable[Values]:
    """MLPs in tiles: the intermediate values of an MLP, the largest of a recomputed layer, exist a tile at a time."""
    saved_here = setting.train.offload_activations == setting.train.compress_activations == "none"
    if setting.train.sequence_tiles is None and _plain_layers(setting) and saved_here:
        yield {"train.sequence_tiles": TILES}


def _compressed_activations(setting: Setting, support: Support) -> Iterable[Values]:
    """Saved activations in 8 bits. On a CPU it takes longer than recomputing."""
    free = setting.train.compress_activations == "none" and setting.train.sequence_tiles is None
    if support.cuda and free and _plain_layers(setting):
        yield {"train.compress_activations": "int8"}


def _shown_fused_kernels(setting: Setting, support: Support) -> Iterable[Values]:
    """Liger's kernels where they are installed; a family that they do not support is refused when it is traced."""
    if setting.train.fused_kernels != "none":
        yield {"train.fused_kernels": "none"}
    elif support.cuda and find_spec("liger_kernel") and setting.train.grad_ckpt_policy != "selective":
        yield {"train.fused_kernels": "liger"}


def _lighter_loss_chunk(setting: Setting, support: Support) -> Iterable[Values]:
    return [{"train.loss_chunk": LOSS_CHUNK_TOKENS}] if setting.train.loss_chunk is None else []


def _shown_loss_chunk(setting: Setting, support: Support) -> Iterable[Values]:
    if setting.tensor_parallel > 1:  # It needs the chunked loss.
        return []
    return [{"train.loss_chunk": LOSS_CHUNK_TOKENS if setting.train.loss_chunk is None else None}]


ACTIVATION_SWITCHES = [
    Switch(
        name="activations",
        parameters=("train.grad_ckpt", "train.grad_ckpt_policy", "train.offload_activations"),
        lighter=_lighter_activations,
        shown=_shown_activations,
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
        effect=SAME,
        ease=3,
        excludes=DIVIDING | {"compression"},
        saves=ACTIVATIONS,
        changes_states=False,
    ),
    Switch(
        name="compression",
        parameters=("train.compress_activations",),
        lighter=_compressed_activations,
        shown=_compressed_activations,
        effect=ROUNDED,
        ease=6,
        excludes=DIVIDING,
        saves=ACTIVATIONS,
        changes_states=False,
        other_memory="same",
    ),
    Switch(
        name="loss_chunk",
        parameters=("train.loss_chunk",),
        lighter=_lighter_loss_chunk,
        shown=_shown_loss_chunk,
        effect=SAME,
        ease=4,
        saves=LOGITS,
        changes_states=False,
        other_memory="same",
    ),
]
