"""How the base of a tuned model is stored."""

from collections.abc import Mapping
from pathlib import Path

from lean_finetune.commands.tuned.tuned_files import object_in
from lean_finetune.config.field_types import Method
from lean_finetune.config.schema import BaseWeights, Quant
from lean_finetune.core.errors import UserError
from lean_finetune.memory.devices import precision_on, resolve_gpu
from lean_finetune.model.precision import BASE_WEIGHTS, base_weights_from

METHODS: Mapping[str, Method] = {"4": "qlora", "8": "int8_lora", "16": "lora"}
"""How an adapter's base is stored, by bits."""


def adapter_weights(directory: Path, bits: str | None) -> tuple[BaseWeights, str]:
    """How to store an adapter's base, and why."""
    if bits is not None:
        return usual_weights(METHODS[bits]), "--bits says so"
    if (directory / BASE_WEIGHTS).is_file():
        return _weights_in_training(directory / BASE_WEIGHTS), "as in training"
    return usual_weights("qlora"), "the default; --bits 8 or 16 for another"


def _weights_in_training(file: Path) -> BaseWeights:
    """How training stored the base, as `save_tuned` wrote it.

    Raises:
        UserError: the file has something else.
    """
    try:
        return base_weights_from(object_in(file))
    except ValueError:
        raise UserError(
            f"--model: {file}: must be as training wrote it; write it back, or remove it and set --bits"
        ) from None


def usual_weights(method: Method) -> BaseWeights:
    """Base weights by this method, in the precision that this machine's device computes best."""
    precision, _ = precision_on(resolve_gpu("auto")[0], "auto")
    return BaseWeights(method=method, quant=Quant(type="nf4", double=True), precision=precision)
