"""Choose the number format for a device (train.precision), with a reason."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lean_finetune.config.field_types import AnyPrecision, Precision
from lean_finetune.core.atomic_files import read_json
from lean_finetune.core.errors import UserError

if TYPE_CHECKING:
    from lean_finetune.config.schema import Params


def choose_precision(
    choice: AnyPrecision, *, kind: Literal["cpu", "cuda"], native_bf16: bool, name: str
) -> tuple[Precision, str]:
    """The precision, and the reason.

    Args:
        choice: train.precision.
        kind: device type.
        native_bf16: whether the device computes in bf16.
        name: of the device, for the reason.

    Raises:
        UserError: the device does not compute in this type.
    """
    if choice != "auto":
        if choice in ("bf16", "pure_bf16") and not native_bf16:
            raise UserError(
                f"train.precision: bf16 needs compute capability 8.0 (Ampere) or later; got {choice} for {name}; set "
                "train.precision to fp16 (the loss is scaled, trained parameters are fp32)"
            )
        return choice, "as set"
    if kind == "cpu":
        return "fp32", f"{name} gains nothing from 16 bits"
    if native_bf16:
        return "bf16", f"{name} computes in bf16"
    return "fp16", f"{name} has no native bf16"


def precision_of(params: "Params", verdict: Path) -> Precision:
    """The precision of a run: train.precision, or for `auto` the choice that stage estimate wrote into its verdict."""
    choice = params.train.precision
    return read_json(verdict)["precision"] if choice == "auto" else choice
