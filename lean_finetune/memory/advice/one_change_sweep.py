"""What each single switch would do to the peak: one more trace per switch, for the plot and the remedies."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tqdm import tqdm
from transformers import PretrainedConfig

from lean_finetune.config.field_types import Method, OptimizerName, Precision
from lean_finetune.config.schema import Bucket
from lean_finetune.memory.advice.config_variants import (
    lighter_activations,
    lighter_state,
    with_method,
    with_precision,
    without_checkpoints,
)
from lean_finetune.memory.predict.peak import Prediction, predict
from lean_finetune.memory.predict.setting import Setting
from lean_finetune.memory.predict.traced_shapes import halved
from lean_finetune.memory.trace.cuda_kernels import Target

CURRENT = "current"
METHODS: tuple[Method, ...] = ("full", "lora", "qlora")
OPTIMIZERS: tuple[OptimizerName, ...] = ("adamw", "adamw_8bit")
"""Those shown: the plain one, and the one that saves most at nearly no price."""
PRECISIONS: tuple[Precision, ...] = ("bf16", "fp32")
LOSS_CHUNK_TOKENS = 512
"""The chunk offered where none is set."""


@dataclass(frozen=True, kw_only=True)
class Switch:
    """One setting and its predicted peak."""

    label: str
    flag: str | None
    """What to give `dvc exp run -S` to get there; None for the setting as it is."""
    peak_bytes: int


def as_advice(switches: Sequence[Switch]) -> list[dict[str, Any]]:
    """Part of advice.json: every single change with its peak, for a run that needs less after all."""
    changes = [(switch.flag, switch.peak_bytes) for switch in switches if switch.flag is not None]
    return [{"command": f"dvc exp run -S {flag}", "peak_bytes": size} for flag, size in changes]


def trace_switches(
    config: PretrainedConfig,
    setting: Setting,
    target: Target,
    current: Prediction,
    *,
    smaller_batch: str | None,
    native_bf16: bool,
    progress: bool,
) -> list[Switch]:
    """The current setting first, then every single change, traced over the micro-batches that set the current peak.

    Those that change nothing that is learnt come first. `smaller_batch` is the flag that halves a micro-batch, if any;
    `native_bf16` says whether the device offers precision bf16; `progress` shows a bar on standard error.
    """
    steps = current.steps_of_peak
    changes = [
        (f"train.{flag}", changed, steps) for flag, changed in _single_changes(setting, native_bf16, target.foreach)
    ]
    fewer = halved(steps)
    if fewer is not None and smaller_batch is not None and not setting.optimizer_in_backward:
        changes.insert(0, (smaller_batch, setting, fewer))
    found = [Switch(label=CURRENT, flag=None, peak_bytes=current.peak.bytes)]
    for flag, changed, shapes in tqdm(changes, "estimate", unit=" switches", disable=not progress):
        peak = predict(config, changed, shapes, target).peak
        found.append(Switch(label=flag.partition(".")[2], flag=flag, peak_bytes=peak.bytes))
    return found


def halving_flag(bucket: Bucket, longest: int) -> str | None:
    """The flag that halves a micro-batch; None where rows or the longest row, padded to `longest` tokens, forbid it."""
    if bucket.mode == "fixed":
        return f"bucket.fixed_rows={bucket.fixed_rows // 2}" if bucket.fixed_rows > 1 else None
    return f"bucket.max_tokens={bucket.max_tokens // 2}" if bucket.max_tokens // 2 >= longest else None


def _single_changes(setting: Setting, native_bf16: bool, cuda: bool) -> Iterator[tuple[str, Setting]]:
    """Every setting that differs in one parameter of `train`."""
    model = setting.model
    if model.grad_ckpt:
        changed, flags = without_checkpoints(setting)
        yield _flag(flags), changed
        for changed, flags in lighter_activations(setting, cuda=cuda):
            yield _flag(flags), changed
    else:
        yield "grad_ckpt=true", replace(setting, model=replace(model, grad_ckpt=True))
    chunk = LOSS_CHUNK_TOKENS if setting.loss_chunk is None else None
    yield f"loss_chunk={'null' if chunk is None else chunk}", replace(setting, loss_chunk=chunk)
    for changed, flags in lighter_state(setting, cuda=cuda):
        yield _flag(flags), changed
    for optimizer in OPTIMIZERS:
        if optimizer != setting.optimizer:
            yield f"optimizer={optimizer}", replace(setting, optimizer=optimizer)
    for precision in PRECISIONS:
        if precision != model.precision and (precision == "fp32" or native_bf16):
            changed, flags = with_precision(setting, precision)
            yield _flag(flags), changed
    for method in METHODS:
        if method != model.method:
            changed, flags = with_method(setting, method)
            yield _flag(flags), changed


def _flag(flags: tuple[str, ...]) -> str:
    """Flags as one, without the first section's name."""
    return " ".join(flags).removeprefix("train.")
