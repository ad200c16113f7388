"""Which activations layers save and which they recompute (train.grad_ckpt, train.sequence_tiles)."""

from collections.abc import Callable, Iterable
from functools import partial
from inspect import signature
from typing import Any, cast

import torch
import torch.nn.attention.varlen  # noqa: F401 (registers an operation named below)
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from lean_finetune.config.schema import Train
from lean_finetune.core.errors import UserError
from lean_finetune.core.optional_bitsandbytes import operations
from lean_finetune.model.dropout import has_dropout
from lean_finetune.model.empty_model import decoder_layers
from lean_finetune.model.experts.experts_forward import has_experts
from lean_finetune.model.experts.grouped_matmul import GROUPED_MATMULS
from lean_finetune.patches.of_models import TILES

aten = torch.ops.aten

# Matmuls with a weight → position of their input among the arguments. Matmuls of two activations (the scores of
# unfused attention) are not among them, since their outputs are the largest.
MATMULS = {
    **{aten.mm.default: 0, aten.addmm.default: 1, **dict.fromkeys(GROUPED_MATMULS, 0)},
    **dict.fromkeys(operations("gemm_4bit"), 0),
}
FUSED_ATTENTION = {
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.torch_attn._varlen_attn.default,
}

MLP_NAMES = ("mlp", "feed_forward")
"""Names of MLPs in decoder layers."""


def enable_checkpointing(model: PreTrainedModel, train: Train) -> None:
    """Recompute decoder layers in backward if `train` says so (Chen et al. 2016, arXiv 1604.06174).

    Raises:
        UserError: the model does not support it.
    """
    if not train.grad_ckpt:
        return
    # Only dropout needs the random state (5 KB per layer, and on CUDA a copy from the device).
    dropout = has_dropout(model.config, train)
    # bitsandbytes' 8-bit matmul saves its inputs where non-reentrant checkpointing does not see them.
    reentrant = train.method == "int8_lora"
    kwargs: dict[str, Any] = {"use_reentrant": reentrant, "preserve_rng_state": dropout}
    if reentrant:  # Else inputs need no gradient, and adapters in recomputed layers would get none.
        model.enable_input_require_grads()
    if train.grad_ckpt_policy == "selective":
        rank = train.lora.rank if train.adapted else 0
        if train.lora.experts == "all":
            rank = max(rank, train.lora.expert_rank)
        kwargs["context_fn"] = partial(create_selective_checkpoint_contexts, partial(_keep_products, rank))
        # Saved outputs stay on the device under train.offload_activations, as in versions before torch 2.15.
        if "respect_saved_tensors_hooks" in signature(checkpoint).parameters:
            kwargs["respect_saved_tensors_hooks"] = False
    if not model.supports_gradient_checkpointing:
        raise UserError(
            f"train.grad_ckpt: {model.config.model_type} does not support recomputing layers; got true; set it to "
            "false, or use train.offload_activations"
        )
    recompute_layers(model, kwargs)
    for number, layer in enumerate(m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)):
        layer.gradient_checkpointing = number % train.recomputed_every == 0
    if train.grad_ckpt_layers is not None:
        for layer in _layers_after(model, train.grad_ckpt_layers):
            layer.gradient_checkpointing = False


def _layers_after(model: PreTrainedModel, first: int) -> Iterable[GradientCheckpointingLayer]:
    """The decoder's layers after the `first` ones; raises UserError if there are none."""
    layers, name = decoder_layers(model), model.config.model_type
    if layers is None:
        raise UserError(
            f"train.grad_ckpt_policy: first_n needs one list of layers, which {name} has not; got first_n; use full"
        )
    if first >= len(layers):
        raise UserError(
            f"train.grad_ckpt_layers: must be below the {len(layers)} layers of the model; got {first}; lower it, or "
            "use train.grad_ckpt_policy=full"
        )
    return cast(Iterable[GradientCheckpointingLayer], layers[first:])


def recompute_layers(model: PreTrainedModel, options: dict[str, Any]) -> None:
    """Recompute every decoder layer in backward; `options` are those of torch.utils.checkpoint."""
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(options)
    else:  # transformers < 5.20
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def _keep_products(
    rank: int, context: SelectiveCheckpointContext, operation: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """Save outputs that are expensive to recompute per byte: of matmuls with weights and of fused attention.

    A matmul over at most `rank` values is that of an adapter's second matrix: large for the little work it takes.
    """
    place = MATMULS.get(operation)
    expensive = operation in FUSED_ATTENTION or (place is not None and args[place].shape[-1] > rank)
    return CheckpointPolicy.MUST_SAVE if expensive else CheckpointPolicy.PREFER_RECOMPUTE


def enable_tiles(model: PreTrainedModel, train: Train) -> None:
    """Run the MLPs and norms of decoder layers in `train.sequence_tiles` tiles; not norms inside attention.

    They compute one tile of the tokens after the other and save its input alone. Backward recomputes a tile, so the
    activations of one tile exist at a time, and autograd sums the gradients of weights over the tiles. Tiled MLPs:
    Bekman et al. 2025, arXiv 2506.13996, section 3.1.

    Raises:
        UserError: the model or another switch does not work with tiles.
    """
    if train.sequence_tiles is None:
        return
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    children = [child for layer in layers for child in layer.named_children() if _takes_hidden_alone(child[1])]
    mlps = [child for name, child in children if name in MLP_NAMES]
    _refuse_tiles(model, train, mlps)
    norms = [child for _, child in children if type(child).__name__.endswith("Norm")]
    dropout = has_dropout(model.config, train)
    for module in (*mlps, *norms):
        TILES.give_method(module, partial(_in_tiles, module.forward, train.sequence_tiles, dropout))


def _takes_hidden_alone(module: nn.Module) -> bool:
    """Whether a module takes hidden states alone; RWKV's, which mix tokens, take more."""
    return len(signature(module.forward).parameters) == 1


def _refuse_tiles(model: PreTrainedModel, train: Train, mlps: list[nn.Module]) -> None:
    """Raise UserError if tiles do not work with the model or with another switch."""
    name, reason = model.config.model_type, ""
    if has_experts(model):
        reason = f"tiles dense MLPs, and {name} is a mixture of experts"
    elif not mlps:
        reason = f"finds no module {' or '.join(MLP_NAMES)} in the layers of {name}"
    elif train.method == "int8_lora":
        reason = "has no effect with train.method=int8_lora: bitsandbytes' 8-bit matmuls save what tiles recompute"
    elif train.grad_ckpt_policy == "selective":
        reason = "has no effect with train.grad_ckpt_policy=selective, which saves the matmuls that tiles recompute"
    if reason:
        raise UserError(f"train.sequence_tiles: {reason}; got {train.sequence_tiles}; leave it blank")


def _in_tiles(
    forward: Callable[[torch.Tensor], torch.Tensor], tiles: int, dropout: bool, hidden_BTD: torch.Tensor
) -> torch.Tensor:
    """`forward` of hidden states (B, T, D), or (T, D) in families that flatten rows, ⌈T / tiles⌉ tokens at a time."""
    outputs = [
        checkpoint(forward, tile, use_reentrant=False, preserve_rng_state=dropout)
        for tile in hidden_BTD.chunk(tiles, dim=-2)
    ]
    return torch.cat(outputs, dim=-2)
