"""What train.precision means on a device."""

from pathlib import Path
from typing import Literal

from lean_finetune.config.field_types import AnyPrecision, Precision
from lean_finetune.config.schema import Params
from lean_finetune.core.atomic_files import read_json
from lean_finetune.core.errors import UserError


def choose_precision(
    asked: AnyPrecision, *, kind: Literal["cpu", "cuda"], native_bf16: bool, name: str
) -> tuple[Precision, str]:
    """The precision, and why.

    Args:
        asked: train.precision.
        kind: of the device.
        native_bf16: whether it computes in bf16.
        name: of the device, for the reason.

    Raises:
        UserError: the device has no arithmetic for what was asked.
    """
    if asked != "auto":
        if asked in ("bf16", "pure_bf16") and not native_bf16:
            raise UserError(
                f"train.precision: bf16 needs compute capability 8.0 (Ampere) or later; got {asked} for {name}; set "
                "train.precision to fp16 (the loss is scaled, trained parameters are fp32)"
            )
        return asked, "as asked"
    if kind == "cpu":
        return "fp32", f"{name} gains nothing from 16 bits"
    if native_bf16:
        return "bf16", f"{name} computes in bf16"
    return "fp16", f"{name} has no native bf16"


def precision_of(params: Params, verdict: Path) -> Precision:
    """The precision of a run: as asked, or as stage estimate chose for the device and wrote into its verdict."""
    asked = params.train.precision
    return read_json(verdict)["precision"] if asked == "auto" else asked
