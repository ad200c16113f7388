"""Memory outside of the training step: loading, held-out losses, answers, saving.

There is no merge in this pipeline: adapters are saved as they are. What passes through the model is traced, as the step
is; loading and saving move tensors one by one, and what they hold is a sum, stated here and checked against a measured
load in the tests.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from transformers import PretrainedConfig

from stages.estimate.evaluation import GenerationShape, peak_of_answers, peak_of_loss
from stages.estimate.kernels import Target
from stages.estimate.predict import Setting
from stages.estimate.states import FP32_BYTES, PACKED_BITS, model_shapes, state_bytes, state_lines
from stages.estimate.trace import ADAPTERS, GRADIENTS, OPTIMIZER, Peak
from stages.step.batches import BatchShape
from stages.step.loss import summed_loss, token_losses

LOAD, HELDOUT, EVALUATE, GENERATE, SAVE = "load", "heldout", "evaluate", "generate", "save"
FILE = "weight_files"
"""Category of the files' own tensors, mapped while a model is loaded on a CPU."""
LOADING = "loading"
"""Category of what quantising one layer needs for a moment."""
QUANTISE_COPIES_CPU = 2
"""fp32 copies of a layer's weight while bitsandbytes packs it on a CPU: scaled, and rounded (measured)."""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What these phases depend on besides the setting."""

    stored_dtype: torch.dtype
    """Type of the weights in the model's files. (A config forgets it once a model of another type is made of it.)"""

    in_training: BatchShape
    """Largest batch of held-out rows; no larger than training's own."""
    evaluation: BatchShape
    """Largest batch of held-out rows in stage evaluate."""
    logits_chunk: int
    """evaluate.logits_chunk, in tokens."""
    generation: GenerationShape | None
    """Largest batch of prompts in stage evaluate; None where none is answered."""


def heldout_shape(max_tokens: int, longest: int) -> BatchShape:
    """The largest batch of held-out rows within a budget of padded tokens, all of them trained.

    Held-out rows are taken to be no longer than the longest training row, `longest`.
    """
    rows = max(1, max_tokens // longest)
    return BatchShape(rows=rows, length=longest, supervised=rows * longest, joined_lengths=None)


def generation_shape(*, rows: int, longest: int, new_tokens: int, positions: int | None) -> GenerationShape | None:
    """The largest batch of prompts; None where nothing is answered, or no prompt has room for an answer.

    Args:
        rows: prompts that are answered together.
        longest: tokens of the longest training row; no held-out prompt is taken to be longer.
        new_tokens: evaluate.max_new_tokens.
        positions: the longest row the model knows; None where it knows no end.
    """
    prompt_tokens = longest if positions is None else min(longest, positions - new_tokens)
    if rows < 1 or prompt_tokens < 1:
        return None
    return GenerationShape(rows=rows, prompt_tokens=prompt_tokens, new_tokens=new_tokens)


def stored_dtype(config: PretrainedConfig) -> torch.dtype:
    """Type of a model's weights in its files, of a config fresh from its file; fp32 where it does not say."""
    return config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32


def other_phases(
    config: PretrainedConfig, setting: Setting, around: Surroundings, target: Target
) -> Mapping[str, Peak]:
    """Peaks of load, heldout (during training), evaluate, generate and save, on the device.

    The setting has been predicted before, so what cannot be traced was refused there.
    """
    lines = state_lines(
        model_shapes(config),
        setting.model,
        setting.optimizer,
        cuda=target.foreach,
        master_weights=setting.master_weights,
    )
    states = dict(state_bytes(lines, granularity_bytes=target.granularity_bytes))
    states.pop(GRADIENTS)
    optimizer_bytes = states.pop(OPTIMIZER, 0)
    heldout = peak_of_loss(
        config, setting, around.in_training, target, lambda model, batch: summed_loss(model, batch, setting.loss_chunk)
    )
    plain = replace(setting, model=replace(setting.model, attention="auto"))  # As stage evaluate loads it.
    evaluate = peak_of_loss(
        config, plain, around.evaluation, target, lambda model, batch: token_losses(model, batch, around.logits_chunk)
    )
    answers = around.generation
    generate = {} if answers is None else {GENERATE: peak_of_answers(config, setting, answers, target)}
    return {
        LOAD: _load(config, setting, around.stored_dtype, target, states, optimizer_bytes),
        HELDOUT: _peak({**heldout.by_category, OPTIMIZER: optimizer_bytes}),
        EVALUATE: evaluate,
        **generate,
        SAVE: _peak({**states, OPTIMIZER: optimizer_bytes}),
    }


def _peak(by_category: Mapping[str, int]) -> Peak:
    """A peak from its parts."""
    return Peak(bytes=sum(by_category.values()), by_category=dict(sorted(by_category.items())))


def _load(
    config: PretrainedConfig,
    setting: Setting,
    stored: torch.dtype,
    target: Target,
    states: Mapping[str, int],
    optimizer_bytes: int,
) -> Peak:
    """The most held while weights arrive or, where that is more, at the end with the optimizer's state.

    On a CPU the files' tensors are mapped while the model gets memory of its own: all of them, an upper bound where
    weights in several files keep their type (each file is let go once its weights are copied). A GPU gets each tensor
    in its final type, one at a time where it is packed there.
    """
    end = _peak({**states, OPTIMIZER: optimizer_bytes})
    arriving = {category: size for category, size in states.items() if category != ADAPTERS}
    shapes = model_shapes(config)
    largest = max((parameter.values for parameter in shapes.parameters if parameter.linear), default=0)
    element_bytes = setting.model.dtype.itemsize
    packed = setting.model.method in PACKED_BITS
    if target.capability is None:
        arriving[FILE] = shapes.values * stored.itemsize
        if packed:
            converted = element_bytes if stored != setting.model.dtype else 0
            arriving[LOADING] = largest * (QUANTISE_COPIES_CPU * FP32_BYTES + converted)
    elif packed:
        arriving[LOADING] = largest * element_bytes
    return max(_peak(arriving), end, key=lambda peak: peak.bytes)
