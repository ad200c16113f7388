"""Trained rows of the embedding and the head (train.lora.trainable_tokens), by PEFT's trainable_token_indices.

PEFT copies the whole weight in each forward, and its backward makes a gradient of that size. Here only the trained rows
are computed: an embedding of n rows, and n columns of logits.

Shapes: n trained tokens, V rows of the embedding, D hidden size.
"""

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.trainable_tokens import TrainableTokensLayer
from torch import nn
from torch.autograd.function import once_differentiable
from transformers import PretrainedConfig, PreTrainedModel

from lean_finetune.config.schema import Train
from lean_finetune.model.adapter_init import ADAPTER
from lean_finetune.model.empty_model import token_layers
from lean_finetune.patches.of_models import TRAINED_ROWS
from lean_finetune.pinning.adapter_files import DELTA as DELTA
from lean_finetune.pinning.adapter_files import fault
from lean_finetune.pinning.config_file import ADAPTER_CONFIG

MOST_ADDED = 2**16
"""Tokens that a tokenizer may have beyond the rows of the model's embedding."""
MEAN_ROWS = 4096
"""Rows whose fp32 copies exist at a time while their mean is computed."""


def with_token_ids(train: Train, ids: Sequence[int]) -> Train:
    """Section train with the ids of the trained tokens, which params.yaml may have as text."""
    if not train.lora.trainable_tokens:
        return train
    return train.model_copy(update={"lora": train.lora.model_copy(update={"trainable_tokens": list(ids)})})


def token_ids(train: Train) -> list[int]:
    """The ids of the trained tokens."""
    ids = [token for token in train.lora.trainable_tokens if isinstance(token, int)]
    assert len(ids) == len(train.lora.trainable_tokens), "tokens are still text"
    return ids


def saved_token_ids(adapter: Mapping[str, Any]) -> list[int]:
    """The ids of the trained tokens in adapter_config.json, those of all layers."""
    found = adapter.get("trainable_token_indices") or []
    return sorted({number for ids in (found.values() if isinstance(found, dict) else [found]) for number in ids})


def refuse_far_tokens(directory: Path, adapter: Mapping[str, Any], config: PretrainedConfig) -> None:
    """Raise UserError if an adapter has rows of tokens far beyond the model's: all rows before them would be made."""
    rows, largest = config.get_text_config().vocab_size, max(saved_token_ids(adapter), default=0)
    if largest >= rows + MOST_ADDED:
        raise fault(directory / ADAPTER_CONFIG, f"has a row for token {largest}, and the model has {rows} tokens")


def ids_of_layer(adapter: Mapping[str, Any], layer: str) -> list[int]:
    """The ids of a layer's trained rows, in the order of the rows in the adapter's file."""
    found = adapter.get("trainable_token_indices") or []
    if isinstance(found, dict):
        found = next((ids for name, ids in found.items() if layer == name or layer.endswith(f".{name}")), [])
    return list(found)


def with_rows(config: PretrainedConfig, train: Train) -> PretrainedConfig:
    """The config of the model with the rows that the trained tokens need; unchanged if it has them."""
    needed = max(token_ids(train), default=-1) + 1
    if not train.adapted or needed <= config.get_text_config().vocab_size:
        return config
    changed = deepcopy(config)
    changed.get_text_config().vocab_size = needed
    return changed


@torch.no_grad()
def add_rows(model: PreTrainedModel, ids: Iterable[int]) -> None:
    """Add rows to the embedding and the head for ids that have none, each the mean of the rows before."""
    embedding: Any = model.get_input_embeddings()
    before = len(embedding.weight)
    if (needed := max(ids, default=-1) + 1) <= before:
        return
    model.resize_token_embeddings(needed, mean_resizing=False)
    layers: list[Any] = token_layers(model)
    weights: dict[int, Any] = {id(layer.weight): layer.weight for layer in layers}
    for weight in weights.values():
        weight[before:] = mean_row(weight[:before]).to(weight.dtype)
    if (bias := getattr(layers[-1], "bias", None)) is not None:
        bias[before:] = 0


def mean_row(weight_VD: Any) -> torch.Tensor:
    """The mean of the rows, fp32 (D,)."""
    blocks: tuple[torch.Tensor, ...] = weight_VD.split(MEAN_ROWS)
    return torch.stack([rows.float().sum(0) for rows in blocks]).sum(0) / len(weight_VD)


def token_indices(model: PreTrainedModel, train: Train) -> dict[str, list[int]] | None:
    """PEFT's trainable_token_indices: rows of the embedding, and of a head with its own weight; None without any."""
    if not train.lora.trainable_tokens:
        return None
    embedding, *head = token_layers(model)
    layers = [embedding, *(one for one in head if one.weight is not embedding.weight)]
    names = {path.rpartition(".")[2]: module for path, module in model.named_modules() if module in layers}
    return dict.fromkeys(names, token_ids(train))


class _Head(torch.autograd.Function):
    """Logits of a frozen head with some changed rows: those of the head, plus hidden states times the changes.

    To set the columns instead would take a copy of the gradient. Autograd would add two gradients of the hidden states.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, head: nn.Module, change_nD: torch.Tensor, ids_n: torch.Tensor
    ) -> torch.Tensor:
        output: torch.Tensor = head(hidden)
        ctx.head, ctx.types = head, (hidden.dtype, change_nD.dtype)
        change_nD, hidden = change_nD.to(output.dtype), hidden.to(output.dtype)
        ctx.save_for_backward(hidden, change_nD, ids_n)
        return output.index_add_(-1, ids_n, F.linear(hidden, change_nD))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, change_nD, ids_n = ctx.saved_tensors
        columns = incoming.index_select(-1, ids_n).flatten(0, -2)
        gradient = incoming @ ctx.head.weight.to(incoming.dtype)
        gradient.view(-1, gradient.shape[-1]).addmm_(columns, change_nD)
        return gradient.to(ctx.types[0]), None, (columns.T @ hidden.flatten(0, -2)).to(ctx.types[1]), None


class TrainedRows(TrainableTokensLayer):
    """PEFT's layer, without copies of the weight."""

    def forward_adapters(self, x: torch.Tensor, active_adapters: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The embedding of ids, or the logits of hidden states."""
        if self.disable_adapters or self.merged or not active_adapters:
            return self.base_layer(x)
        delta_nD, (ids_n, order_n) = self.trainable_tokens_delta[ADAPTER], self._ids_on(x.device)
        if isinstance(self.base_layer, nn.Embedding):
            output = self.base_layer(x)
            places = torch.searchsorted(ids_n, x).clamp_(max=len(ids_n) - 1)
            rows = F.embedding(order_n[places], delta_nD.to(output.dtype))
            if (scale := self._get_embed_scale()) is not None:  # Of Gemma.
                rows = rows * scale.to(rows.dtype)
            return torch.where((ids_n[places] == x)[..., None], rows, output)
        weight: Any = self.base_layer.weight
        changed: torch.Tensor = _Head.apply(x, self.base_layer, delta_nD[order_n] - weight[ids_n], ids_n)
        return changed

    def _ids_on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The sorted ids and the places of their rows, copied to the device once."""
        found: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = self.__dict__.setdefault("ids_by_device", {})
        if device not in found:
            ids = self.token_indices[ADAPTER]
            order = sorted(range(len(ids)), key=ids.__getitem__)
            found[device] = (
                torch.tensor([ids[place] for place in order], device=device),
                torch.tensor(order, device=device),
            )
        return found[device]


def compute_rows_alone(model: nn.Module) -> None:
    """Let PEFT's layers of trained tokens compute without copies of the weight; call after adapters are added."""
    for module in model.modules():
        if isinstance(module, TrainableTokensLayer):
            TRAINED_ROWS.give_class(module, TrainedRows)
            if ADAPTER in module.trainable_tokens_original:  # Only to undo a merge, which is done elsewhere here.
                del module.trainable_tokens_original[ADAPTER]
