"""Find, bound and load a tuned model: an adapter on its quantised base, or a full model."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from lean_finetune.commands.tuned.base_weights import adapter_weights, usual_weights
from lean_finetune.commands.tuned.tuned_files import (
    check_weights,
    named_by_option,
    read_adapter,
    refuse_reward_model,
)
from lean_finetune.config.schema import BaseWeights
from lean_finetune.core.errors import UsageFault
from lean_finetune.model.attention_choice import generation_attention
from lean_finetune.model.beside.whole_config import any_beside, whole_config
from lean_finetune.model.load_model import read_generation_config
from lean_finetune.model.model_config import max_positions, read_config
from lean_finetune.model.trained_rows import refuse_far_tokens, saved_token_ids
from lean_finetune.pinning.adapter_files import adapter_tensors
from lean_finetune.pinning.config_file import ADAPTER_CONFIG, refuse_no_model
from lean_finetune.pinning.hub import download, list_files
from lean_finetune.pinning.locate import FileVersions, versions_in
from lean_finetune.pinning.model_files import CONFIG_FILES, INDEX, shard_names
from lean_finetune.run.assets import Assets


@dataclass(frozen=True, kw_only=True)
class TunedModel:
    """A tuned model on disk."""

    directory: Path
    """Tokenizer, and the adapter or the weights."""
    adapter: Mapping[str, Any] | None
    """adapter_config.json; None for a full model."""
    base: Path
    """Directory of the base's weights; `directory` for a full model."""
    weights: BaseWeights
    reason: str
    """Why the base is stored as `weights` says."""
    config: PretrainedConfig
    read: FileVersions
    """The files of `directory` and `base`, before any was read."""

    def refuse_change(self) -> None:
        """Raise UserError if a file was replaced meanwhile: what was read may be of two models."""
        with named_by_option():
            self.read.refuse_change("run the command again")

    def whole(self) -> "TunedModel":
        """The same, to be loaded with its parts beside decoder and head."""
        return replace(self, config=whole_config(self.config))

    def load(self, device: torch.device) -> nn.Module:
        """The model, ready to answer.

        Raises:
            UserError: weights are missing, do not fit, or changed.
        """
        with named_by_option():
            assets = Assets(directory=self.base, adapter=None if self.adapter is None else self.directory)
            model = assets.load(self.config, self.weights, device, generation_attention(self.config))
        self.refuse_change()
        return model

    @property
    def base_name(self) -> str:
        """The hub id or directory of the base; of a full model, its own directory."""
        return str((self.adapter or {}).get("base_model_name_or_path") or self.directory)

    @property
    def base_revision(self) -> str | None:
        """The base's commit on the hub; None for a directory."""
        return (self.adapter or {}).get("revision")

    def weight_files(self) -> list[str]:
        """Names of the base's files with config and weights."""
        names = [*CONFIG_FILES, INDEX, *shard_names(self.base)]
        return [name for name in names if (self.base / name).is_file()]

    @property
    def architecture(self) -> str:
        """The model's class; empty if config.json names none. It is written into files of other programs."""
        names = self.config.architectures
        first = names[0] if isinstance(names, list) and names else None
        return first if isinstance(first, str) and first.isidentifier() else ""

    @property
    def vocabulary(self) -> int | None:
        """Number of tokens for which the model has embeddings; None if its config does not say."""
        size = getattr(self.config.get_text_config(), "vocab_size", None)
        return max(size, 1 + max(saved_token_ids(self.adapter or {}), default=-1)) if isinstance(size, int) else None

    @property
    def positions(self) -> int | None:
        """Tokens that the model can read; None without a limit."""
        return max_positions(self.config)


def find_tuned(directory: Path, bits: str | None) -> TunedModel:
    """The tuned model of a directory. The base of an adapter is fetched from the hub if it is not on this machine.

    `bits` stores an adapter's base in 4, 8 or 16 bits; None means as in training, or 4 if another program trained it.

    Raises:
        UserError: there is no model, or its base is gone.
    """
    read = versions_in(directory)
    if (directory / ADAPTER_CONFIG).is_file():
        adapter = read_adapter(directory)
        weights, reason = adapter_weights(directory, bits)
        base = base_directory(adapter)
        read = FileVersions({**read.versions, **versions_in(base).versions})
        with named_by_option():
            config = read_config(base, whole=any_beside(adapter_tensors(directory)))
            refuse_far_tokens(directory, adapter, config)
            check_weights(base)
            read_generation_config(base)
        return TunedModel(
            directory=directory, adapter=adapter, base=base, weights=weights, reason=reason, config=config, read=read
        )
    refuse_no_model(directory)
    if bits is not None:
        raise UsageFault(f"--bits: has an effect only on an adapter's base; {directory} is a full model; leave it out")
    weights = usual_weights("full")
    with named_by_option():
        config = read_config(directory)
        refuse_reward_model(directory, any("SequenceClassification" in name for name in config.architectures or ()))
        check_weights(directory)
        read_generation_config(directory)
    return TunedModel(
        directory=directory,
        adapter=None,
        base=directory,
        weights=weights,
        reason="a full model",
        config=config,
        read=read,
    )


def base_directory(adapter: Mapping[str, Any]) -> Path:
    """The directory of an adapter's base, with config and weights; of a hub id, they are downloaded.

    Raises:
        UserError: the hub cannot be reached, or has no such files.
    """
    name, revision = adapter["base_model_name_or_path"], adapter.get("revision")
    if os.path.isdir(name):
        return Path(name)
    commit, files = list_files("--model", name, "model", revision)
    fetch = partial(download, "--model", name, "model", commit)
    small = [file for file in (*CONFIG_FILES, INDEX) if file in files]
    return fetch([*small, *shard_names(fetch(small))])
