"""Write the outputs of a finished run: weights, curves, metrics, model card."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from cuda_memory.growth import classify
from cuda_memory.units import GIB
from lean_finetune.config.declared_params import tracked_values
from lean_finetune.config.schema import Params
from lean_finetune.core.atomic_files import (
    FIGURES,
    atomic_directory,
    seal_tables,
    write_csv,
    write_json,
    write_sealed,
    write_text,
)
from lean_finetune.islands.tower import TOWER
from lean_finetune.model.beside.parts import kept_parts
from lean_finetune.model.experts.expert_adapters import trained_in_experts
from lean_finetune.model.experts.experts_forward import has_experts
from lean_finetune.pinning.locate import (
    NO_FILES,
    FileVersions,
    describe_data,
    describe_model,
    model_address,
    verify_files,
)
from lean_finetune.pinning.read_locks import read_data_lock, read_model_lock, read_tokenizer_lock
from lean_finetune.step.loss import causal_lm
from lean_finetune.train.callbacks.callback import EXPERT_COLUMNS, CurveRow, curve_columns
from lean_finetune.train.job import TrainJob, TrainResult
from lean_finetune.train.kept_step import kept_figures
from lean_finetune.train.make_job import Paths
from lean_finetune.train.monitor.growth_advice import growth_line
from lean_finetune.train.monitor.measured_peak import MeasuredPeaks
from lean_finetune.train.save_model import Base, save_tuned

LAST_SHARE = 0.1
"""Share of the steps, at the end, over which the training loss and the load of experts are averaged."""
WARM_UP_STEPS = 1
"""Steps that are not part of the throughput: the first one allocates and is measured."""


def train_metrics(job: TrainJob, result: TrainResult, measured: MeasuredPeaks) -> dict[str, Any]:
    """Return data/train/figures.json: losses, throughput, size, memory; None for what the device cannot measure."""
    curves = result.curves
    last = curves[-max(1, round(LAST_SHARE * len(curves))) :]
    timed = [row for row in curves[WARM_UP_STEPS:] if not row["measured"]] or curves
    seconds = sum(row["seconds"] for row in timed)
    peak, growth = measured.step_peak_bytes, classify(curves)[0]
    skipped = {} if result.skipped_steps is None else {"skipped_steps": result.skipped_steps}
    by_rank = {"peak_bytes_measured_by_rank": list(measured.peak_bytes_by_rank)} if measured.peak_bytes_by_rank else {}
    return {
        "train_loss": sum(row["loss"] for row in last) / len(last),
        "heldout_loss_last": curves[-1].get("heldout_loss"),
        **{name: value for name, value in curves[-1].items() if name.startswith("heldout_reward")},
        "tokens_per_second": sum(row["tokens"] for row in timed) / seconds,
        "supervised_tokens_per_second": sum(row["supervised_tokens"] for row in timed) / seconds,
        "train_seconds": sum(row["seconds"] for row in curves),
        "trained_parameters": sum(math.prod(shape) for shape in result.parallel.trained_shapes().values()),
        **_experts(result.model, last),
        **skipped,
        **kept_figures(job.train, curves, len(job.plan.steps)),
        "peak_bytes_measured": peak,
        "peak_gib_measured": None if peak is None else peak / GIB,
        **by_rank,
        "measured_by_phase": measured.peak_bytes_by_phase,
        "peak_reserved_bytes": measured.peak_reserved_bytes,
        "peak_measured_how": measured.how,
        "memory_by_phase": result.memory_by_phase,
        "load_host_peak_bytes": result.load_host.peak_bytes,
        "load_host_added_bytes": result.load_host.added_bytes,
        "growth": {
            "summary": growth_line(growth, curves, None, job.settings),
            "cause": growth.cause,
            "series": growth.series,
            "slope_bytes_per_step": growth.slope_bytes_per_step,
            "confidence": growth.confidence,
        },
        "device": torch.cuda.get_device_name(job.device) if job.device.type == "cuda" else "cpu",
    }


def _experts(model: nn.Module, last: Sequence[CurveRow]) -> dict[str, Any]:
    """Figures of a mixture of experts; `last` are the curves' last rows."""
    if not has_experts(model):
        return {}
    rows = [row for row in last if EXPERT_COLUMNS[0] in row]
    load = {name: sum(row[name] for row in rows) / len(rows) for name in EXPERT_COLUMNS if rows}
    return {"trained_expert_parameters": trained_in_experts(model), **load}


RESULTS = ("peak_gib_measured", "resumed", "tokens_per_second")
"""Figures in metrics/train.json, by which runs are compared. More would push the loss out of 120 columns."""


def model_card(
    *,
    model_lock: Mapping[str, Any],
    data_lock: Mapping[str, Any],
    params: Mapping[str, Any],
    metrics: Mapping[str, Any],
    whole: bool = False,
) -> str:
    """Return Markdown with the metadata block that model hubs read; `whole`: its model has parts beside the decoder."""
    adapter = params["train"]["method"] != "full"
    shown = {key: value for key, value in metrics.items() if value is not None}
    return "\n".join(
        [
            "---",
            f"base_model: {model_lock['name']}",
            f"library_name: {'peft' if adapter else 'transformers'}",
            f"pipeline_tag: {TOWER.task if whole else 'text-generation'}",
            "tags:",
            "- lean-finetune",
            f"- {params['train']['method']}",
            "---",
            "",
            f"# {'Adapter' if adapter else 'Model'} fine-tuned from {describe_model(model_lock)}",
            "",
            f"Weights: `data/tuned/` ({'a peft adapter' if adapter else 'a full model'}, safetensors).",
            "",
            "## Base model",
            _json_block(model_lock),
            "## Data",
            f"{describe_data(data_lock)}; trained on the supervised tokens only.",
            "",
            _json_block(data_lock),
            "## Parameters",
            _json_block(params),
            "## Metrics",
            _json_block(shown),
        ]
    )


def _json_block(value: Mapping[str, Any]) -> str:
    """Return a fenced JSON block followed by a blank line."""
    return f"```json\n{json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False)}\n```\n"


def publish_weights(result: TrainResult, job: TrainJob, params: Params, paths: Paths) -> None:
    """Write the trained weights; all processes of a run call this."""
    lock, directory = job.assets.lock, job.assets.directory
    tokenizer_files = read_tokenizer_lock(paths.tokenizer_lock)["files"]
    read = NO_FILES
    if job.world.is_first:
        read = verify_files(directory, tokenizer_files)
        if params.train.merge or not job.train.adapted:
            read = FileVersions({**read.versions, **job.base_files.versions})
    base = Base(
        address=model_address(lock),
        revision=lock["revision"],
        directory=directory,
        tokenizer_files=list(tokenizer_files),
        chat_template=job.chat_template,
        attached=job.rows.attached,
        read=read,
    )
    if job.train.scores and (config := causal_lm(result.model).config).pad_token_id is None:
        config.pad_token_id = job.pad_id  # By it, a reward model's code finds the last token of each row of a batch.
    save_tuned(result.parallel, base, paths.out, job.train, list(lock["files"]) if params.train.merge else None)


def publish_record(result: TrainResult, figures: dict[str, Any], params: Params, paths: Paths) -> None:
    """Write curves, model card and `figures`, some of which are metrics."""
    card = model_card(
        model_lock=read_model_lock(paths.model_lock),
        data_lock=read_data_lock(paths.data_lock),
        params=tracked_values(params),
        metrics=figures,
        whole=bool(kept_parts(causal_lm(result.model))),
    )
    with atomic_directory(paths.curves) as directory:
        write_csv(directory / "curves.csv", curve_columns(result.curves), result.curves)
        write_text(directory / "MODEL_CARD.md", card)
        write_sealed(directory / FIGURES, figures)
        seal_tables(directory)
    write_json(paths.metrics, {name: figures[name] for name in RESULTS if name in figures})
