"""What a run starts from: the files of its model on this machine, and what they say about it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from transformers import PretrainedConfig

from lean_finetune.config.schema import BaseWeights, Params, Train
from lean_finetune.model.adapters import load_adapter
from lean_finetune.model.continued_adapter import refuse_other_adapter
from lean_finetune.model.load_model import load_base
from lean_finetune.model.model_config import read_config
from lean_finetune.model.trained_rows import add_rows, with_rows, with_token_ids
from lean_finetune.pinning.locate import (
    FileVersions,
    adapter_directory,
    config_directory,
    find_adapter,
    find_model,
    find_tokenizer,
    model_directory,
    verify_adapter,
    verify_files,
)
from lean_finetune.pinning.model_files import trained_ids
from lean_finetune.pinning.read_locks import read_model_lock
from lean_finetune.rows.attachment import Attachment, need_whole_model


@dataclass(frozen=True, kw_only=True)
class Assets:
    """The model that a run starts from, as files on this machine."""

    directory: Path
    """Of the base: its config, tokenizer and weights, as far as the run needs them."""
    adapter: Path | None = None
    """Directory of the adapter that goes on."""
    trained_tokens: Sequence[int] = ()
    """Ids of train.lora.trainable_tokens."""
    lock: Mapping[str, Any] = field(default_factory=dict)
    """What stage pin wrote of them; empty for files that are not pinned."""

    @classmethod
    def pinned(cls, model_lock: Path, *, weights: bool = True) -> Self:
        """Read locks/model.json. Files of a hub model are downloaded; without `weights`, all files but the weights.

        Raises:
            UserError: the lock is damaged, a file is gone (`ModelFault`), or the hub cannot be reached.
        """
        lock = read_model_lock(model_lock)
        directory, tokens = (model_directory if weights else config_directory)(lock), lock.get("trained_tokens", ())
        return cls(directory=directory, adapter=adapter_directory(lock), trained_tokens=tokens, lock=lock)

    @classmethod
    def named(cls, p: Params) -> Self:
        """Find the files that parameters name, for a prediction.

        Of a hub model, only config.json is downloaded. The tokenizer is too if trained tokens are given as text.

        Raises:
            UserError: there are no such files, a token is not in the vocabulary, or the hub cannot be reached.
        """
        directory, tokens = find_model(p.model.name, p.model.revision), p.train.lora.trainable_tokens
        ids = sorted({token for token in tokens if isinstance(token, int)})
        if len(ids) < len(tokens):
            ids = trained_ids(find_tokenizer(p.model.name, p.model.revision), tokens)
        adapter = None if p.model.adapter is None else find_adapter(p.model.adapter, p.model.adapter_revision)
        return cls(directory=directory, adapter=adapter, trained_tokens=ids)

    def verify(self, others: Mapping[str, str] | None = None) -> tuple[FileVersions, FileVersions]:
        """Compare the files of base and adapter with their pinned hashes; `others` are further files of the base.

        Returns their versions, of base and adapter.

        Raises:
            UserError: a file is missing or changed, as `ModelFault`.
        """
        base = verify_files(self.directory, {**self.lock["files"], **(others or {})})
        return base, verify_adapter(self.lock, self.adapter)

    def with_token_ids(self, train: Train) -> Train:
        """The section with the ids of its trained tokens."""
        return with_token_ids(train, self.trained_tokens)

    def config(self, train: Train, attached: Iterable[Attachment] = ()) -> PretrainedConfig:
        """Read the config of the model that a run builds, with the parts that its rows need.

        Raises:
            UserError: as `read_config`.
        """
        return read_config(self.directory, scores=train.scores, whole=need_whole_model(attached))

    def config_to_predict(self, train: Train, attached: Iterable[Attachment] = ()) -> PretrainedConfig:
        """Read `config` with the rows that trained tokens add to the embedding when weights are loaded."""
        return with_rows(self.config(train, attached), self.with_token_ids(train))

    def refuse_other_adapter(self, train: Train, config: PretrainedConfig) -> None:
        """Raise UserError if the adapter is not what `train` would add to the model; its tokens are ids."""
        if self.adapter is not None:
            refuse_other_adapter(self.adapter, train, config)

    def load(
        self,
        config: PretrainedConfig,
        weights: BaseWeights,
        device: torch.device,
        attention: str | None = None,
        *,
        seed: int | None = None,
    ) -> nn.Module:
        """Load the model for evaluation, with the rows of its trained tokens and with its adapter.

        Arguments and errors as of `load_base`.
        """
        model = load_base(self.directory, config, weights, device, attention, seed=seed)
        add_rows(model, self.trained_tokens)
        return (model if self.adapter is None else load_adapter(model, self.adapter, weights)).eval()
