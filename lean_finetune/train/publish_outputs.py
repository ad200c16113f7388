"""What the stage leaves behind, put in place: the weights, then curves, model card and metrics."""

from typing import Any

from lean_finetune.config.declared_params import tracked_values
from lean_finetune.config.schema import Params
from lean_finetune.core.atomic_files import FIGURES, atomic_directory, read_json, write_csv, write_json, write_text
from lean_finetune.pinning.locate import CHAT_TEMPLATE, model_address
from lean_finetune.train.job import Paths
from lean_finetune.train.loop import CURVE_COLUMNS, TrainJob, TrainResult
from lean_finetune.train.model_card import model_card
from lean_finetune.train.save_model import Base, Merge, save_tuned

RESULTS = ("peak_gib_measured", "resumed", "tokens_per_second", "train_loss")
"""The figures in metrics/train.json, by which runs are compared."""


def publish_weights(result: TrainResult, job: TrainJob, params: Params, paths: Paths) -> None:
    """Write what was trained; all processes of a run call this.

    Raises:
        UserError: the disk refused.
    """
    lock = read_json(paths.model_lock)
    template = paths.tokens / CHAT_TEMPLATE
    base = Base(
        address=model_address(lock),
        revision=lock["revision"],
        directory=job.model_directory,
        tokenizer_files=list(read_json(paths.tokenizer_lock)["files"]),
        chat_template=template if template.exists() else None,
    )
    merge = Merge(spec=job.model_spec, files=list(lock["files"])) if params.train.merge else None
    save_tuned(result.parallel, base, paths.out, merge)


def publish_record(result: TrainResult, numbers: dict[str, Any], params: Params, paths: Paths) -> None:
    """Write how it went; `numbers` are all figures of the run, some of which are metrics.

    Raises:
        UserError: the disk refused.
    """
    card = model_card(
        model_lock=read_json(paths.model_lock),
        data_lock=read_json(paths.data_lock),
        params=tracked_values(params),
        metrics=numbers,
    )
    with atomic_directory(paths.curves) as aside:
        write_csv(aside / "curves.csv", CURVE_COLUMNS, result.curves)
        write_text(aside / "MODEL_CARD.md", card)
        write_json(aside / FIGURES, numbers)
    write_json(paths.metrics, {name: numbers[name] for name in RESULTS if name in numbers})
