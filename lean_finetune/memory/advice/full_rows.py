"""A run with full rows, as `fit` predicts it: every micro-batch is full of rows of one length."""

import math
from dataclasses import replace

import torch
from transformers import PretrainedConfig

from cuda_memory.gpus import Device
from cuda_memory.units import round_up
from lean_finetune.config.load import with_flags
from lean_finetune.config.schema import Bucket, Params
from lean_finetune.memory.advice.run import Run, setting_on
from lean_finetune.memory.devices import resolve_gpu
from lean_finetune.memory.predict.assumed_rows import TEXT_ROW, TEXT_ROWS, AssumedRows, FullRow
from lean_finetune.memory.predict.other_phases import stored_dtype
from lean_finetune.memory.predict.traced_step import TracedSteps
from lean_finetune.memory.trace.gradients_alone import first_before
from lean_finetune.memory.trace.setting import Setting
from lean_finetune.model.beside.whole_config import whole_config
from lean_finetune.model.model_config import max_positions
from lean_finetune.objectives.row_kind import RowKind
from lean_finetune.plan.planner import pad_multiple
from lean_finetune.plan.step_tokens import step_tokens_of, with_step_tokens
from lean_finetune.run.assets import Assets
from lean_finetune.step.batches import BatchShape
from lean_finetune.step.unsupported import refuse_unsupported


def full_batch(bucket: Bucket, length: int, kind: RowKind = RowKind.ANSWER, row: FullRow = TEXT_ROW) -> BatchShape:
    """The largest micro-batch of rows of this length, with every token trained except the first of each row.

    It has whole units of rows: pairs. `row`: what each row carries, which is not trained.

    Raises:
        UserError: as `FullRow.carried`.
    """
    unit = kind.unit
    if bucket.mode == "packed":
        rows, rest = divmod(bucket.max_tokens, length)
        rows, rest = (rows, rest) if unit == 1 else (max(rows // unit, 1) * unit, 0)
        joined = (length,) * rows + ((rest,) if rest else ())
        supervised = bucket.max_tokens - len(joined)
        total = max(bucket.max_tokens, sum(joined))
        return BatchShape(rows=1, length=total, supervised=supervised, packed_lengths=joined, kind=kind)
    rows = bucket.fixed_rows if bucket.mode == "fixed" else bucket.max_tokens // length
    rows = max(rows // unit, 1) * unit
    whole = BatchShape(rows=rows, length=length, supervised=rows * (length - 1), packed_lengths=None, kind=kind)
    return row.carried(whole, bucket)


def largest_steps(shape: BatchShape, *, several: bool, in_flight: int = 1) -> TracedSteps:
    """A step whose largest micro-batch has this shape. With `several`, it adds to gradients of an earlier one.

    `in_flight` of them can be between forward and backward at the same time, in a pipeline.
    """
    largest = (shape,) * in_flight
    return ((first_before(shape), *largest),) if several else (largest,)


def in_stages(run: Run, setting: Setting) -> Run:
    """The run with another setting, in which its GPUs are stages of a pipeline, and no longer train different rows."""
    stages = setting.layout.pipeline
    changed = replace(
        run,
        setting=setting,
        tokens_per_step=run.tokens_per_step * stages,
        micro_batches_per_step=run.micro_batches_per_step * stages,
    )
    largest = max((shape for step in run.steps for shape in step), key=lambda shape: shape.rows * shape.length)
    return replace(changed, steps=largest_steps(largest, several=True, in_flight=changed.in_flight))


def fit_run(p: Params, *, shorten: bool = False, assumed: AssumedRows = TEXT_ROWS) -> Run:
    """The run of some parameters with full rows. Of a hub model, only config.json is downloaded.

    `shorten`: data.max_length is an assumption, which is lowered to the positions of the model. It is the
    text beside what rows are `assumed` to carry.

    Raises:
        UserError: the device, the model or a parameter does not work.
    """
    torch.set_num_threads(p.run.cpu_threads or torch.get_num_threads())
    device, reason = resolve_gpu(p.hardware.gpu)
    assets = Assets.named(p)
    p = p.model_copy(update={"train": assets.with_token_ids(p.train)})
    config = assets.config_to_predict(p.train)
    assumed.refuse(p, config)
    config = whole_config(config) if assumed.whole_model else config
    assumed = assumed.for_model(assets.directory, beside_text=shorten)
    positions = max_positions(config)
    if shorten and positions and positions < p.data.max_length:
        p = with_flags(p, [f"data.max_length={positions}"])
    run = full_rows_run(p, config, device, reason, assumed)
    _ = run.attention  # Refuses a kernel that cannot run, before anything is traced.
    assets.refuse_other_adapter(run.setting.train, config)
    return run


def full_rows_run(
    p: Params,
    config: PretrainedConfig,
    device: Device,
    device_reason: str = "",
    assumed: AssumedRows = TEXT_ROWS,
) -> Run:
    """A run with every micro-batch full of rows of data.max_length, all of their tokens trained.

    Those of what rows are `assumed` to carry are not. No row is known, so `auto` tokens per step are the most.

    Raises:
        UserError: the device, the model's rows or the steps do not suit a parameter.
    """
    p = with_step_tokens(p, step_tokens_of(None, p.train))
    layout = p.layout
    row = assumed.made(config, p.data)
    length = round_up(row.length(p.data.max_length, max_positions(config)), pad_multiple(p))
    bucket = row.bucket(p.bucket, length)
    shape = full_batch(bucket, length, p.train.row_kind, row)
    micro_batches = max(1, math.ceil(p.train.step_tokens / (shape.rows * shape.length) / layout.data))
    setting, precision_reason = setting_on(device, p, accumulates_gradients=micro_batches > 1)
    refuse_unsupported(
        setting.train,
        config,
        device_type=device.kind,
        longest=length,
        packed=p.bucket.mode == "packed",
        micro_batches=[micro_batches],
        enforce=p.estimate.enforce,
    )
    return Run(
        params=p,
        device=device,
        config=config,
        setting=setting,
        stored=stored_dtype(config),
        bucket=bucket,
        steps=largest_steps(shape, several=micro_batches > 1, in_flight=min(layout.pipeline, micro_batches)),
        longest=length,
        tokens_per_step=max(p.train.step_tokens / layout.data, length) / layout.context,
        micro_batches_per_step=micro_batches,
        nodes=p.run.nodes,
        reasons={"gpu": device_reason, "precision": precision_reason},
        fakes=row.fakes,
        full_row=row,
    )


def remade(run: Run, p: Params) -> Run:
    """A run with full rows of the same model, device and assumed rows, with other parameters.

    Raises:
        UserError: as `full_rows_run`.
    """
    return full_rows_run(p, run.config, run.device, assumed=run.full_row.assumed)
