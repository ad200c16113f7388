"""Save an adapter or a full model, with tokenizer and chat template."""

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

from lean_finetune.config.schema import BaseWeights
from lean_finetune.core.atomic_files import atomic_directory, write_json
from lean_finetune.core.errors import UserError
from lean_finetune.core.file_names import copy_below
from lean_finetune.model.adapters import save_adapter
from lean_finetune.model.beside.whole_config import as_published
from lean_finetune.model.empty_model import stored_left_out
from lean_finetune.model.files.quantized_checkpoint import file_tensors, without_quantisation
from lean_finetune.model.files.safetensors_files import FileTensor, LazyTensor, write_loaded
from lean_finetune.model.merge_adapters import MERGED, write_merged
from lean_finetune.model.model_config import read_config
from lean_finetune.model.precision import BASE_WEIGHTS, base_weights_json
from lean_finetune.pinning.locate import CHAT_TEMPLATE, NO_FILES, TOOL_TEMPLATE, FileVersions
from lean_finetune.pinning.model_files import WEIGHTS
from lean_finetune.rows.attachment import Attachment
from lean_finetune.step.parallel_model import ParallelModel


@dataclass(frozen=True, kw_only=True)
class Base:
    """The base model and its tokenizer."""

    address: str
    """Hub id or absolute path, which the adapter's config refers to."""
    revision: str | None
    """Commit on the hub; None for a local model."""
    directory: Path
    """Directory of its files."""
    tokenizer_files: Sequence[str]
    """Names of the tokenizer's files in `directory`."""
    chat_template: Path | None
    """Chat template used in training; None = the tokenizer's."""
    attached: tuple[Attachment, ...] = ()
    """What the training rows carry besides tokens."""
    read: FileVersions = NO_FILES
    """Files in `directory` that saving reads, which must not change before it ends."""

    def copy_tokenizer(self, out: Path) -> None:
        """Copy the tokenizer to `out`, with the chat template and what attachments need."""
        own_templates = (CHAT_TEMPLATE, TOOL_TEMPLATE) if self.chat_template is not None else ()
        for name in self.tokenizer_files:
            if name not in own_templates:
                copy_below(self.directory, name, out)
        if self.chat_template is not None:
            shutil.copyfile(self.chat_template, out / CHAT_TEMPLATE)
        for one in self.attached:
            one.save(self.directory, out)


def save_full(
    model: PreTrainedModel,
    directory: Path,
    others: Mapping[str, FileTensor] | None = None,
    parallel: ParallelModel | None = None,
) -> None:
    """Write a model as `save_pretrained` does, but tensor by tensor into one file: no second copy of the weights.

    `others` are tensors of the base's files that are not loaded: those of parts beside the decoder.
    For a sharded model the first process calls this and all others call `_send_shards`.
    """
    model.config.dtype = model.dtype
    model.config.architectures = [type(model).__name__]
    as_published(without_quantisation(model.config)).save_pretrained(str(directory))
    model.generation_config.save_pretrained(str(directory))
    write_loaded(directory / WEIGHTS, _tensors_of(model, parallel or ParallelModel(model)), others)


def _tensors_of(model: PreTrainedModel, parallel: ParallelModel) -> Mapping[str, torch.Tensor | LazyTensor]:
    """Return the tensors of a model's file by name, or this process's shards of them."""
    ignored = model._keys_to_ignore_on_save or ()
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name not in ignored}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning)  # By transformers, for a DTensor.
        untied = remove_tied_weights_from_state_dict(tensors, model)
    # Names and layouts as in the published files, where those in transformers differ.
    names = {id(tensor): name for name, tensor in tensors.items()}
    saved = revert_weight_conversion(model, untied)
    if parallel.layout.tensor > 1 and any(id(tensor) not in names for tensor in saved.values()):
        raise UserError(
            f"train.tensor_parallel: the published files of {model.config.model_type} join weights, which are in parts "
            "here; set it to 1, and use train.sharding=zero3"
        )
    return {name: parallel.whole(names.get(id(tensor), name), tensor) for name, tensor in saved.items()}


def _send_shards(parallel: ParallelModel) -> None:
    """Send this process's shards to the first process, in the order in which it collects them."""
    if isinstance(parallel.model, PeftModel):
        for _ in parallel.full_parameters():
            pass
    elif parallel.same_parameters:
        write_loaded(Path(os.devnull), _tensors_of(cast(PreTrainedModel, parallel.model), parallel))


def save_tuned(
    parallel: ParallelModel, base: Base, out: Path, weights: BaseWeights, merge: Sequence[str] | None = None
) -> None:
    """Write safetensors, config and tokenizer to `out` atomically; equal weights give equal bytes.

    All processes call this, and the first one writes. An adapter is saved alone, with `BASE_WEIGHTS`; `merge` also
    writes the merged model to `MERGED` in `out`.

    Args:
        parallel: the trained model.
        base: the model it was made from.
        out: directory to write.
        weights: weights of the base during training.
        merge: names of the base's files if the merged model is written.

    Raises:
        UserError: the disk refused, or the base changed.
    """
    model = parallel.model
    if not isinstance(model, PeftModel):
        parallel.collect_weights()
    if parallel.rank:
        _send_shards(parallel)
        return
    with atomic_directory(out) as directory:
        try:
            if isinstance(model, PeftModel):
                # Adapters are small: peft needs all tensors together.
                save_adapter(model, directory, base.address, dict(parallel.full_parameters()), revision=base.revision)
                write_json(directory / BASE_WEIGHTS, base_weights_json(weights))
                if merge is not None:
                    (directory / MERGED).mkdir()
                    write_merged(base.directory, merge, directory, weights, directory / MERGED)
                    base.copy_tokenizer(directory / MERGED)
            else:
                lm = cast(PreTrainedModel, model)
                stored = file_tensors(base.directory, read_config(base.directory))
                save_full(lm, directory, stored_left_out(lm, stored), parallel)
        except SafetensorError as error:
            raise UserError(f"{out}: cannot be written ({error}); free space, then rerun") from error
        base.copy_tokenizer(directory)
        base.read.refuse_change()
