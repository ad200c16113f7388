"""What the steps of a run do not support: one list of refusals, for `fit`, estimate and train."""

from collections.abc import Sequence

import numpy as np
from transformers import PretrainedConfig

from lean_finetune.config.schema import Train
from lean_finetune.model.beside.whole_config import refuse_parts
from lean_finetune.model.fused_kernels import refuse_fused
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
