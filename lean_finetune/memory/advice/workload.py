"""A run as advice varies it: its setting, its largest micro-batches and the cost of its steps."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from transformers import PretrainedConfig

from lean_finetune.config.field_types import Sharding
from lean_finetune.config.sharding_rules import SPLIT_WEIGHTS
from lean_finetune.memory.advice.step_cost import SELECTIVE_SHARE, StepWork, relative_slowdown
from lean_finetune.memory.gpus import GPUS, Device, Speed
from lean_finetune.memory.predict.setting import Setting
from lean_finetune.memory.predict.state_formulas import (
    Line,
    ModelShapes,
    model_shapes,
    state_bytes,
    state_lines,
    trained_values,
)
from lean_finetune.memory.predict.traced_shapes import TracedSteps
from lean_finetune.memory.trace.cuda_kernels import Target
from lean_finetune.memory.trace.memory_trace import GRADIENTS, WEIGHTS
from lean_finetune.model.model_config import largest_head_size, layer_settings
from lean_finetune.model.model_spec import ModelSpec
from lean_finetune.step.batches import BatchShape

RANKED_AS = "A100-80GB"
"""Its speed ranks changes for a device of unknown speed. Their order hardly depends on the GPU."""
VALUES_KEPT = 28
"""Values per token that a layer stores for backward, in multiples of its width. Traced: Llama-3.1-8B, LoRA, bf16."""
SENDING_TIME: Mapping[Sharding, float] = {"zero1": 1.02, "zero2": 1.05, "zero3": 1.10, "hsdp": 1.08}
"""Assumed factor on the time of a step: weights are communicated too, mostly while layers compute."""
FIRST = BatchShape(rows=1, length=8, supervised=7, joined_lengths=None)
"""A micro-batch so small that the next one sets the peak."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is trained, and how a step is divided into micro-batches."""

    config: PretrainedConfig
    setting: Setting
    steps: TracedSteps
    """The micro-batches that set the peak."""
    mode: Literal["bucketed", "packed", "fixed"]
    max_tokens: int
    """bucket.max_tokens."""
    fixed_rows: int
    """bucket.fixed_rows, for mode fixed."""
    longest: int
    """Padded tokens of the longest row."""
    tokens_per_step: float
    """Mean tokens per step with padding, on one GPU."""
    micro_batches_per_step: float
    unpadded_tokens_per_step: int
    """train.tokens_per_step: of all GPUs."""

    @property
    def most_step_tokens(self) -> int:
        """Upper bound of the tokens in a step without padding: a step ends with the row that reaches its tokens."""
        return self.unpadded_tokens_per_step - 1 + self.longest


def full_batch(mode: str, length: int, *, max_tokens: int, fixed_rows: int) -> BatchShape:
    """The largest micro-batch of rows of this length, with every token trained except the first of each row."""
    if mode == "packed":
        rows, rest = divmod(max_tokens, length)
        joined = (length,) * rows + ((rest,) if rest else ())
        return BatchShape(rows=1, length=max_tokens, supervised=max_tokens - len(joined), joined_lengths=joined)
    rows = fixed_rows if mode == "fixed" else max_tokens // length
    return BatchShape(rows=rows, length=length, supervised=rows * (length - 1), joined_lengths=None)


def largest_steps(shape: BatchShape, *, several: bool) -> TracedSteps:
    """A step whose largest micro-batch has this shape. With `several`, it adds to gradients of an earlier one."""
    if not several:
        return ((shape,),)
    first = replace(FIRST, joined_lengths=None if shape.joined_lengths is None else (FIRST.length,))
    return ((first, shape),)


def ranking_speed(device: Device) -> tuple[Speed, str]:
    """The speed that ranks changes, and the reason."""
    speed = device.speed or next((gpu.speed for gpu in GPUS if gpu.name == device.name), None)
    if speed is not None:
        return speed, f"by the speed of {device.name}"
    known = next(gpu.speed for gpu in GPUS if gpu.name == RANKED_AS and gpu.speed is not None)
    return known, f"by the speed of {RANKED_AS}: that of {device.name} is not known"


def _recomputed_share(model: ModelSpec) -> float:
    """Share of a forward pass that gradient checkpointing computes again."""
    return SELECTIVE_SHARE if model.grad_ckpt_policy == "selective" else 1 / model.recomputed_every


def _offloaded_bytes(run: Workload) -> int:
    """Rough bytes that a step offloads: the inputs of recomputed layers and all activations of the others."""
    text, model = run.config.get_text_config(), run.setting.model
    if run.setting.offload_activations == "none":
        return 0
    recomputed = 1 / model.recomputed_every if model.grad_ckpt else 0.0
    values = recomputed + (1 - recomputed) * VALUES_KEPT
    element_bytes = (model.autocast_dtype or model.dtype).itemsize
    return round(values * text.num_hidden_layers * text.hidden_size * run.tokens_per_step * element_bytes)


def sending_time(setting: Setting) -> float:
    """Assumed time of a step by its communication, relative to ddp. The links between GPUs are unknown."""
    return 1.0 if setting.sharing is None else SENDING_TIME.get(setting.sharing.spec.mode, 1.0)


class Costs:
    """Minimum memory and step time of changed runs, compared with the original run."""

    def __init__(self, run: Workload, device: Device, target: Target):
        """Compute the shapes of the model once."""
        self._run, self._target = run, target
        self._shapes: ModelShapes = model_shapes(run.config)
        self._speed, self.reason = ranking_speed(device)
        self._known: dict[Setting, Mapping[str, int]] = {}

    @property
    def cuda(self) -> bool:
        """Whether the run is for a GPU."""
        return self._target.foreach

    def lines(self, setting: Setting) -> tuple[Line, ...]:
        """Weights, gradients and optimizer state of a setting by formula."""
        return state_lines(self._shapes, setting, cuda=self._target.foreach)

    def least_bytes(self, setting: Setting) -> int:
        """Bytes at the end of every backward pass, for any micro-batches."""
        return sum(self._states(setting).values()) + self._target.constant_bytes

    def gradient_bytes(self, setting: Setting) -> int:
        """Bytes of gradients at the end of backward."""
        return self._states(setting).get(GRADIENTS, 0)

    def _states(self, setting: Setting) -> Mapping[str, int]:
        """Bytes by category at the end of a backward, on one GPU."""
        # The key leaves out what does not change states: a search asks for few states of many settings.
        model = replace(setting.model, grad_ckpt=False, grad_ckpt_policy="full")
        key = replace(setting, model=model, loss_chunk=None, offload_activations="none", max_grad_norm=None)
        if key not in self._known:
            states = state_bytes(self.lines(setting), granularity_bytes=self._target.granularity_bytes)
            sharing = setting.sharing
            if sharing is not None:
                states = {category: size // sharing.holders_of(category) for category, size in states.items()}
            self._known[key] = states
        return self._known[key]

    def gathered_bytes(self, setting: Setting) -> int:
        """Bytes of gathered weights at the end of forward, which sharding zero2 has besides each GPU's shard."""
        sharing = setting.sharing
        if sharing is None or sharing.spec.mode != "zero2":
            return 0
        return self._states(setting).get(WEIGHTS, 0) * sharing.holders_of(WEIGHTS)

    def slowdown(self, changed: Workload) -> float:
        """Time per token relative to the original run."""
        # Sharded weights are gathered for each micro-batch.
        turns = changed.micro_batches_per_step / self._run.micro_batches_per_step
        sharing = changed.setting.sharing
        turns = turns if sharing is not None and sharing.spec.mode in SPLIT_WEIGHTS else 1.0
        sent = (1 + turns * (sending_time(changed.setting) - 1)) / sending_time(self._run.setting)
        return sent * relative_slowdown(self._work(changed), self._work(self._run), self._speed)

    def _work(self, run: Workload) -> StepWork:
        """The input of the cost model."""
        config, model, sharing = run.config, run.setting.model, run.setting.sharing
        text = config.get_text_config()
        looked_up = 0 if text.tie_word_embeddings else text.vocab_size * text.hidden_size
        return StepWork(
            parameters=self._shapes.values - looked_up,
            trained_parameters=trained_values(self._shapes, model),
            layers=text.num_hidden_layers,
            width=max(layer_settings(config, "num_attention_heads")) * largest_head_size(config),
            tokens=max(1, round(run.tokens_per_step)),
            length=run.longest,
            micro_batches=max(1, round(run.micro_batches_per_step)),
            method=model.method,
            precision=model.precision,
            optimizer=run.setting.optimizer,
            grad_ckpt=model.grad_ckpt,
            recomputed_share=_recomputed_share(model),
            offloaded_optimizer=run.setting.offload != "none",
            weights_from_host=1 / sharing.holders if sharing and run.setting.offload == "parameters" else 0,
            master_weights=run.setting.master_weights,
            offload_to_disk=run.setting.offload_activations == "disk",
            offloaded_activations_bytes=_offloaded_bytes(run),
        )
