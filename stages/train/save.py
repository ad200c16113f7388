"""What training leaves behind: an adapter alone, or a full model with its tokenizer."""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import cast

from peft import PeftModel
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel

from stages.errors import UserError
from stages.files import atomic_directory
from stages.model.adapters import save_adapter


def save_tuned(model: nn.Module, base_name: str, directory: Path, tokenizer_files: Iterable[str], out: Path) -> None:
    """Write safetensors and their config to `out`, whole or not at all: equal bytes for equal weights.

    Args:
        model: an adapted model, of which the adapter is saved, or a full one.
        base_name: the base model as params.yaml names it.
        directory: the base model's directory, from which a full model takes its tokenizer.
        tokenizer_files: names of the tokenizer's files there.
        out: replaced as a whole.

    Raises:
        UserError: the disk refused.
    """
    with atomic_directory(out) as aside:
        try:
            if isinstance(model, PeftModel):
                save_adapter(model, aside, base_name)
            else:
                cast(PreTrainedModel, model).save_pretrained(str(aside), safe_serialization=True)
        except SafetensorError as error:
            raise UserError(f"{out}: cannot be written ({error}); free space, then rerun") from error
        if not isinstance(model, PeftModel):
            for name in tokenizer_files:
                shutil.copyfile(directory / name, aside / name)
