"""What the steps of a run do not support: one list of refusals, for `fit`, estimate and train."""

from collections.abc import Sequence

import numpy as np
from transformers import PretrainedConfig

from lean_finetune.config.schema import Train
from lean_finetune.core.errors import UserError
from lean_finetune.model.fused_kernels import refuse_fused
from lean_finetune.model.images.image_config import takes_images
from lean_finetune.model.model_config import refuse_context_parallel, refuse_long_rows, refuse_packed_rows
from lean_finetune.step.offload.activation_offload import refuse_offload
from lean_finetune.step.offload.master_weights import refuse_offloaded_state
from lean_finetune.step.update.in_backward import refuse_in_backward


def refuse_unsupported(
    train: Train,
    config: PretrainedConfig,
    *,
    device_type: str,
    longest: int,
    packed: bool,
    micro_batches: Sequence[int] | np.ndarray,
    enforce: bool,
) -> None:
    """Refuse a run whose device, rows or steps its switches do not support.

    Args (those that their types do not explain):
        train: with the precision on the device.
        longest: tokens of the longest row.
        packed: whether rows follow each other in one sequence.
        micro_batches: their number in each optimizer step, on one GPU.
        enforce: estimate.enforce.

    Raises:
        UserError: with the parameter, the rule and the remedy.
    """
    refuse_offload(train.offload_activations, device_type)
    refuse_offloaded_state(train.offload, train.offload_to, device_type)
    refuse_long_rows(config, longest)
    refuse_context_parallel(config, train.context_parallel)
    if packed:
        refuse_packed_rows(config, longest)
    refuse_parts(train, config)
    refuse_fused(train.fused_kernels, device_type, config, enforce=enforce)
    if train.optimizer_in_backward:
        refuse_in_backward(train, micro_batches)


def refuse_parts(train: Train, config: PretrainedConfig) -> None:
    """Refuse to train parts for images that rows of text leave out, and switches that do not know such parts.

    Raises:
        UserError: with the parameter and the remedy.
    """
    if not takes_images(config):
        for name, mode in (("vision", train.vision), ("projector", train.projector)):
            if mode != "frozen":
                raise UserError(f"train.{name}: has an effect only on rows with images; got {mode}; set it to frozen")
        return
    given: dict[str, tuple[object, object, str]] = {
        "context_parallel": (train.context_parallel, 1, "would divide an image's tokens among GPUs"),
        "tensor_parallel": (train.tensor_parallel, 1, "divides the products of the language model alone"),
        "pipeline_stages": (train.pipeline_stages, 1, "has no stage for a vision tower"),
        "offload": (train.offload if train.offload == "parameters" else "none", "none", NOT_TRIED),
        "sequence_tiles": (train.sequence_tiles, None, NOT_TRIED),
    }
    for name, (value, usual, reason) in given.items():
        if value != usual:
            remedy = "leave it blank" if usual is None else f"set it to {usual}"
            raise UserError(f"train.{name}: {reason}; got {value} and rows with images; {remedy}")


NOT_TRIED = "was not tried with a vision tower"
