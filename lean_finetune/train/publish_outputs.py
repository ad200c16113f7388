"""Write the outputs of stage train: the weights, then curves, model card and metrics."""

import json
from collections.abc import Mapping
from typing import Any

from lean_finetune.config.declared_params import tracked_values
from lean_finetune.config.schema import Params
from lean_finetune.core.atomic_files import FIGURES, atomic_directory, read_json, write_csv, write_json, write_text
from lean_finetune.pinning.locate import (
    CHAT_TEMPLATE,
    NO_FILES,
    FileVersions,
    describe_data,
    describe_model,
    model_address,
    verify_files,
)
from lean_finetune.train.callbacks.callback import curve_columns
from lean_finetune.train.job import Paths
from lean_finetune.train.save_model import Base, save_tuned
from lean_finetune.train.train_job import TrainJob, TrainResult

RESULTS = ("peak_gib_measured", "resumed", "tokens_per_second")
"""Figures in metrics/train.json, by which runs are compared. More would push the loss out of 120 columns."""


def model_card(
    *,
    model_lock: Mapping[str, Any],
    data_lock: Mapping[str, Any],
    params: Mapping[str, Any],
    metrics: Mapping[str, Any],
) -> str:
    """Return Markdown with the metadata block that model hubs read."""
    adapter = params["train"]["method"] != "full"
    shown = {key: value for key, value in metrics.items() if value is not None}
    return "\n".join(
        [
            "---",
            f"base_model: {model_lock['name']}",
            f"library_name: {'peft' if adapter else 'transformers'}",
            "pipeline_tag: text-generation",
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
    lock, tokenizer_files = read_json(paths.model_lock), read_json(paths.tokenizer_lock)["files"]
    read = NO_FILES
    if job.world.is_first:
        read = verify_files(job.model_directory, tokenizer_files)
        if params.train.merge or not job.train.adapted:
            read = FileVersions({**read.versions, **job.base_files.versions})
    template = paths.tokens / CHAT_TEMPLATE
    base = Base(
        address=model_address(lock),
        revision=lock["revision"],
        directory=job.model_directory,
        tokenizer_files=list(tokenizer_files),
        chat_template=template if template.exists() else None,
        read=read,
    )
    save_tuned(result.parallel, base, paths.out, job.train, list(lock["files"]) if params.train.merge else None)


def publish_record(result: TrainResult, figures: dict[str, Any], params: Params, paths: Paths) -> None:
    """Write curves, model card and `figures`, some of which are metrics."""
    card = model_card(
        model_lock=read_json(paths.model_lock),
        data_lock=read_json(paths.data_lock),
        params=tracked_values(params),
        metrics=figures,
    )
    with atomic_directory(paths.curves) as directory:
        write_csv(directory / "curves.csv", curve_columns(result.curves), result.curves)
        write_text(directory / "MODEL_CARD.md", card)
        write_json(directory / FIGURES, figures)
    write_json(paths.metrics, {name: figures[name] for name in RESULTS if name in figures})
