"""Predicted peaks of published models, whose sizes are in published.json: micro-batches of 4096 tokens.

Those of tests/kit/published_images.json have an image beside the text of every row.
"""

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import CONFIG_MAPPING

from benchmarks.harness import Row
from lean_finetune.commands.fit_images import assumed_rows
from lean_finetune.config.load import COMMON_PARAMS, load_params, with_flags
from lean_finetune.core.atomic_files import read_json, write_json
from lean_finetune.core.errors import UserError
from lean_finetune.images.image_family import Size
from lean_finetune.memory.advice.full_rows import fit_run
from lean_finetune.memory.advice.run import Run
from lean_finetune.memory.advice.what_fits import smallest_gpu
from lean_finetune.memory.devices import resolve_gpu
from lean_finetune.memory.predict.assumed_images import RowOfImages
from lean_finetune.memory.predict.state_formulas import model_shapes
from lean_finetune.memory.trace.cuda_kernels import target_of
from tests.kit.image_models import image_models

MODELS = Path(__file__).with_name("published.json")
IMAGE = Size(height=960, width=1280)
ADAPTERS = ("qlora", "lora")
GPU, NEWER_GPU = "A100-80GB", "H100"
AS_MEASURED = ("train.lora.joined=none", "train.fused_norms=none")
"""Of all rows, so that they can be compared: those of the table are from before the defaults."""


def published_models() -> dict[str, Mapping[str, Any]]:
    """The values of config.json by model; those of transformers' defaults if only its family is given."""
    return {model["model"]: model["config"] for model in read_json(MODELS)}


def has_default_sizes(config: Mapping[str, Any]) -> bool:
    """Whether the sizes are transformers' defaults of the family."""
    return {*config} == {"model_type"}


def predicted(name: str) -> Row:
    """Parameters of a model, and by method the peak in bytes and the smallest known GPU, or the refusal.

    The run is that of `lean-finetune fit` without params.yaml, on an A100.
    """
    config = published_models()[name]
    row: dict[str, Any] = {"model": name, "family": config["model_type"], "default_sizes": has_default_sizes(config)}
    if has_default_sizes(config):
        config = CONFIG_MAPPING[config["model_type"]]().to_dict()
    return row | _by_method(config, None)


def predicted_with_image(name: str) -> Row:
    """As `predicted`, with one image in every row: `lean-finetune fit --image 1280x960`."""
    config = image_models()[name]
    return {"model": name, "family": config["model_type"]} | _by_method(config, (IMAGE, 1))


def _by_method(config: Mapping[str, Any], images: tuple[Size, int] | None) -> dict[str, Any]:
    """Parameters, tokens of the longest row, and the peak of each method or its refusal."""
    row: dict[str, Any] = {}
    with TemporaryDirectory() as scratch:
        write_json(Path(scratch) / "config.json", config)
        for method in ADAPTERS:
            flags = [f"train.method={method}", f"hardware.gpu={GPU}", f"model.name={scratch}", *AS_MEASURED]
            try:
                run = fit_run(with_flags(load_params(COMMON_PARAMS), flags), shorten=True, assumed=assumed_rows(images))
                row |= {"parameters": model_shapes(run.config).values, "row_tokens": run.longest}
                if isinstance(run.full_row, RowOfImages):
                    row["image_tokens"] = run.full_row.tokens
                row[method] = _peak(run)
            except UserError as error:
                row[method] = {"refused": str(error).replace(f"{scratch}/", "")}
    return row


def _peak(run: Run) -> Row:
    """The peak in bytes, and the smallest GPU."""
    peak_bytes = run.predict().peak.bytes
    # Later GPUs differ by cuBLAS' workspaces alone.
    newer = target_of(resolve_gpu(NEWER_GPU)[0]).constant_bytes - target_of(run.device).constant_bytes
    known = {(True, False): peak_bytes, (True, True): peak_bytes + newer}
    return {"peak_bytes": peak_bytes, "gpu": smallest_gpu(run, known)}
