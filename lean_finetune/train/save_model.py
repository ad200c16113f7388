"""What training leaves behind: an adapter or a full model, with its tokenizer and chat template."""

import os
import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from peft import PeftModel
from safetensors import SafetensorError
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from lean_finetune.core.atomic_files import atomic_directory
from lean_finetune.core.errors import UserError
from lean_finetune.model.adapters import save_adapter
from lean_finetune.model.merge_adapters import MERGED, write_merged
from lean_finetune.model.model_spec import WeightsSpec
from lean_finetune.model.safetensors_files import SINGLE, write_loaded
from lean_finetune.pinning.locate import CHAT_TEMPLATE
from lean_finetune.step.parallel_model import ParallelModel


@dataclass(frozen=True, kw_only=True)
class Merge:
    """What merging an adapter into its base needs besides both."""

    spec: WeightsSpec
    """How the base was held in training."""
    files: Sequence[str]
    """The base's files that a model is made of."""


@dataclass(frozen=True, kw_only=True)
class Base:
    """The model that was fine-tuned, and its tokenizer."""

    address: str
    """Hub id or absolute path, at which an adapter finds it."""
    revision: str | None
    """Commit of the hub."""
    directory: Path
    """Where its files are."""
    tokenizer_files: Sequence[str]
    """Names of the tokenizer's files there."""
    chat_template: Path | None
    """The template that was trained with; None = the tokenizer's own."""

    def copy_tokenizer(self, out: Path) -> None:
        """Copy the tokenizer to `out`, with the template that was trained with."""
        for name in self.tokenizer_files:
            shutil.copyfile(self.directory / name, out / name)
        if self.chat_template is not None:
            shutil.copyfile(self.chat_template, out / CHAT_TEMPLATE)


def save_full(model: PreTrainedModel, directory: Path) -> None:
    """Write a model as `save_pretrained` does, in one file and tensor by tensor: no second copy of its weights.

    Of a model that is shared, every process calls this or `_give_parts`.

    Raises:
        OSError: the disk refused.
    """
    model.config.dtype = model.dtype
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(str(directory))
    model.generation_config.save_pretrained(str(directory))
    write_loaded(directory / SINGLE, _tensors_of(model))


def _tensors_of(model: PreTrainedModel) -> Mapping[str, torch.Tensor]:
    """The tensors of a model's file by name, or what this process holds of them."""
    left_out = model._keys_to_ignore_on_save or ()
    held = {name: tensor for name, tensor in model.state_dict().items() if name not in left_out}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning)  # transformers, of a DTensor.
        untied = remove_tied_weights_from_state_dict(held, model)
    # Names and forms as the model's makers have them in their files, where transformers holds others.
    return revert_weight_conversion(model, untied)


def _give_parts(parallel: ParallelModel) -> None:
    """Hand this process's parts to the one that saves, in the order in which it asks for them."""
    if isinstance(parallel.model, PeftModel):
        for _ in parallel.full_parameters():
            pass
    else:
        write_loaded(Path(os.devnull), _tensors_of(cast(PreTrainedModel, parallel.model)))


def save_tuned(
    parallel: ParallelModel,
    base: Base,
    out: Path,
    merge: Merge | None = None,
) -> None:
    """Write safetensors, their config and the tokenizer to `out`, whole or not at all: equal bytes for equal weights.

    Args:
        parallel: of an adapted model, of which the adapter is saved, or of a full one; all processes call this, and the
            first one writes.
        base: what `parallel.model` was loaded from.
        out: replaced as a whole.
        merge: also write the whole model, to `MERGED` in `out`; None = the adapter alone.

    Raises:
        UserError: the disk refused.
    """
    model = parallel.model
    if parallel.rank:
        _give_parts(parallel)
        return
    with atomic_directory(out) as aside:
        try:
            if isinstance(model, PeftModel):
                # Adapters are small: all at once, as peft takes them.
                save_adapter(model, aside, base.address, dict(parallel.full_parameters()), revision=base.revision)
                if merge is not None:
                    (aside / MERGED).mkdir()
                    write_merged(base.directory, merge.files, aside, merge.spec, aside / MERGED)
                    base.copy_tokenizer(aside / MERGED)
            else:
                save_full(cast(PreTrainedModel, model), aside)
        except SafetensorError as error:
            raise UserError(f"{out}: cannot be written ({error}); free space, then rerun") from error
        base.copy_tokenizer(aside)
