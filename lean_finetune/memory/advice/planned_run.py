"""A run of planned rows, as stage estimate predicts it, and the same rows planned anew for a change."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lean_finetune.config.declared_params import declared_part
from lean_finetune.config.schema import Params
from lean_finetune.islands.attachments import read_attached
from lean_finetune.memory.advice.run import Run, setting_on
from lean_finetune.memory.devices import resolve_gpu
from lean_finetune.memory.predict.other_phases import stored_dtype
from lean_finetune.memory.predict.traced_step import TracedSteps, steps_in_flight, traced_steps
from lean_finetune.memory.trace.known_images import fakes_of
from lean_finetune.model.attention_choice import materializes_scores
from lean_finetune.model.model_config import chunk_tokens, refuse_context_parallel
from lean_finetune.plan.batch_plan import longest_row, read_plan, refuse_other_objective
from lean_finetune.plan.planned_rows import PlannedRows
from lean_finetune.plan.planner import PlanSettings
from lean_finetune.plan.row_checks import refuse_other_tokens
from lean_finetune.plan.step_tokens import planned_step_tokens
from lean_finetune.run.assets import Assets
from lean_finetune.step.token_rows import read_lengths
from lean_finetune.step.unsupported import refuse_unsupported


def read_run(p: Params, plan_path: Path, index: Path, assets: Assets) -> Run:
    """Read a planned run: the plan of stage bucket, the index of the training rows.

    Raises:
        UserError: the device is unknown, or cannot run the setting; the files do not belong together.
    """
    # As in train: CPU kernels have buffers per thread.
    torch.set_num_threads(p.run.cpu_threads or torch.get_num_threads())
    device, device_reason = resolve_gpu(p.hardware.gpu)
    plan, lengths, attached = read_plan(plan_path), read_lengths(index), read_attached(index)
    refuse_other_tokens(plan, lengths)
    refuse_other_objective(plan, p.train.row_kind)
    plan = replace(plan, attached=attached)
    step_tokens = planned_step_tokens(plan_path, p.train)
    settings = PlanSettings.from_params(p, step_tokens)
    planned = PlannedRows(plan=plan, lengths=lengths, index=index, settings=settings)
    setting, precision_reason = setting_on(device, p, accumulates_gradients=planned.accumulates_gradients)
    setting = replace(setting, train=assets.with_token_ids(setting.train)).with_train(tokens_per_step=step_tokens)
    config = assets.config_to_predict(setting.train, attached)
    assets.refuse_other_adapter(setting.train, config)
    declared_part(p.hardware)  # Counts as read on every device; on a GPU the host's RAM and disk matter too.
    run = Run(
        params=p,
        device=device,
        config=config,
        setting=setting,
        stored=stored_dtype(config),
        bucket=declared_part(p.bucket),
        steps=(),
        longest=0,
        tokens_per_step=0.0,
        micro_batches_per_step=0.0,
        reasons={"gpu": device_reason, "precision": precision_reason},
        fakes=fakes_of(attached, assets.directory, config),
    )
    return with_plan(run, planned)


def with_plan(run: Run, planned: PlannedRows) -> Run:
    """The run with another plan, and with the sizes that follow from it.

    Raises:
        UserError: rows or steps do not suit the model or a switch.
    """
    attached = tuple(one.trained_by(run.setting.train) for one in planned.plan.attached)
    planned = replace(planned, plan=replace(planned.plan, attached=attached))
    plan, lengths = planned.own_plan, planned.lengths
    setting = replace(run.setting, accumulates_gradients=planned.accumulates_gradients)
    longest, count = longest_row(planned.plan, lengths), len(plan.steps)
    refuse_unsupported(
        setting.train,
        run.config,
        device_type=run.device.kind,
        longest=longest,
        packed=planned.plan.flat,
        micro_batches=np.diff(plan.step_bounds),
        enforce=run.params.estimate.enforce,
    )
    changed = replace(
        run,
        planned=planned,
        setting=setting,
        longest=longest,
        tokens_per_step=float(plan.padded_tokens.sum()) / count / setting.layout.context,
        micro_batches_per_step=len(plan) / count,
    )
    return replace(changed, steps=_planned_steps(changed, planned))


def _planned_steps(run: Run, planned: PlannedRows) -> TracedSteps:
    """The micro-batches of a plan that can set the peak."""
    kinds: dict[str, Any] = {
        "tiled": run.device.kind == "cuda",
        "windowed": materializes_scores(run.config, run.setting.train.attention) or run.beyond_window,
        "chunk": chunk_tokens(run.config),
    }
    if (stages := run.setting.layout.pipeline) > 1:
        return steps_in_flight(planned.plan, planned.lengths, stages, **kinds)
    return traced_steps(planned.plan, planned.lengths, **kinds)


def replanned(run: Run, changed: Run) -> Run:
    """The changed run of advice with the plan that stage bucket would make for it.

    Raises:
        UserError: a row does not fit in a micro-batch, or steps do not suit a switch.
    """
    assert run.planned is not None
    setting, layout = changed.setting, changed.setting.layout
    if _plan_key(changed) == _plan_key(run):
        return with_plan(replace(run, setting=setting), run.planned)
    refuse_context_parallel(run.config, layout.context)
    longest = changed.longest if changed.longest < run.longest else None
    planned = run.planned.planned_anew(changed.bucket, setting.train.step_tokens, layout, longest=longest)
    return with_plan(replace(run, setting=setting, bucket=changed.bucket), planned)


def _plan_key(run: Run) -> tuple[object, ...]:
    """What decides the rows of a GPU's micro-batches."""
    return run.bucket, run.longest, run.setting.train.step_tokens, run.setting.layout
