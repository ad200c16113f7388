"""What the stage leaves behind, put in place: the weights, then curves, model card and metrics."""

from typing import Any

from stages.declared import tracked_values
from stages.files import atomic_directory, read_json, write_csv, write_json, write_text
from stages.params import Params
from stages.train.card import model_card
from stages.train.job import Paths
from stages.train.loop import CURVE_COLUMNS, TrainJob, TrainResult
from stages.train.save import Merge, save_tuned


def publish_weights(result: TrainResult, job: TrainJob, params: Params, paths: Paths) -> None:
    """Write what was trained; all processes of a run call this.

    Raises:
        UserError: the disk refused.
    """
    lock = read_json(paths.model_lock)
    tokenizer_files = list(read_json(paths.tokenizer_lock)["files"])
    merge = Merge(spec=job.model_spec, files=[*lock["files"], *tokenizer_files]) if params.train.merge else None
    save_tuned(result.team, lock["name"], job.model_directory, tokenizer_files, paths.out, merge)


def publish_record(result: TrainResult, numbers: dict[str, Any], params: Params, paths: Paths) -> None:
    """Write how it went; `numbers` are the metrics.

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
    write_json(paths.metrics, numbers)
