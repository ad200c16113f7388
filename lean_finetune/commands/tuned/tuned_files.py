"""The files of a tuned model's directory, which strangers may have made: each is checked before anything uses it."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from lean_finetune.core.errors import UserError
from lean_finetune.model.files.safetensors_files import stored_tensors
from lean_finetune.pinning import adapter_files
from lean_finetune.pinning.adapter_files import AGAIN
from lean_finetune.pinning.config_file import ADAPTER_CONFIG, NotAnObject, read_object, reason_of
from lean_finetune.pinning.model_files import shard_names

PARAMETER = re.compile(r"^(model\.name|model\.adapter|train\.merge|--model): ")
CONTENT_ADDRESS = re.compile(r"[0-9a-f]{30,64}")
"""Name of a file in the caches of the hub and of DVC, which may store a directory as links into them."""


@contextmanager
def named_by_option() -> Iterator[None]:
    """Let errors name --model where functions that read the model of params.yaml name its parameter."""
    try:
        yield
    except UserError as error:
        raise UserError(f"--model: {PARAMETER.sub('', str(error))}") from None


def fault(path: Path, what: str, remedy: str = AGAIN) -> UserError:
    """The one form of all refusals."""
    return UserError(f"--model: {path} {what}; {remedy}")


def object_in(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises UserError if it has none."""
    try:
        return read_object(path)
    except NotAnObject as error:
        raise fault(path, str(error)) from None


def read_adapter(directory: Path) -> Mapping[str, Any]:
    """The content of adapter_config.json. Raises UserError if it is no LoRA adapter, damaged, or without a base."""
    try:
        found = read_object(directory / ADAPTER_CONFIG)
    except (NotAnObject, OSError):
        found = {}  # The next reading names the fault.
    refuse_reward_model(directory, found.get("task_type") == "SEQ_CLS")
    with named_by_option():
        adapter = adapter_files.read_adapter(directory)
        adapter_files.check_base_name(directory, adapter)
    return adapter


def refuse_reward_model(directory: Path, is_reward_model: bool) -> None:
    """Raise UserError for a reward model, which writes no text."""
    if is_reward_model:
        raise UserError(
            f"--model: must be a language model; {directory} is a reward model, which writes no text; load it with "
            "transformers' AutoModelForSequenceClassification"
        )


def check_weights(directory: Path) -> None:
    """Check the headers of a model's weight files. Raises UserError if one is missing or damaged."""
    for name in shard_names(directory):
        path = directory / name
        with named_by_option():
            adapter_files.refuse_missing(path)
        try:
            tensors = stored_tensors(path)
        except (OSError, ValueError, SafetensorError) as error:
            raise fault(path, f"is damaged ({reason_of(path, error)})") from None
        if not tensors:
            raise fault(path, "has no tensors")


def refuse_foreign_link(path: Path) -> None:
    """Refuse a link to a file of another name: an export would publish that file of this machine.

    Caches of the hub and of DVC name files by their content.
    """
    if not path.is_symlink():
        return
    target = path.resolve()
    if target.name != path.name and not CONTENT_ADDRESS.fullmatch(target.name):
        raise fault(path, f"is a link to {target}, which an export would contain", "replace the link by its file")
