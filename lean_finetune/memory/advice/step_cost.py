"""What runs cost: lower bounds of their memory, their step time relative to the original run, and a rough duration.

The cost model ranks changes by slowdown. A step is the sum of its parts, each limited by arithmetic or by bandwidth.
Peak rates come from data sheets; the shares of them that training reaches are the assumptions below. Seconds are
therefore rough, and printed as a range. Both sides of a comparison use the same shares: decide by `Costs.slowdown`.
"""

import math
from collections.abc import Mapping
from functools import cached_property

from cuda_memory.gpus import GIGA, GPUS, Device, Speed
from cuda_memory.units import readable_times
from lean_finetune.config.optimizers import OPTIMIZERS
from lean_finetune.config.rule import OFF
from lean_finetune.config.schema import Train
from lean_finetune.memory.advice.run import Run
from lean_finetune.memory.predict.process_memory import disk_bytes, offloaded_state_bytes, processes_per_host
from lean_finetune.memory.predict.state_formulas import (
    FP32_BYTES,
    ModelShapes,
    model_shapes,
    paged_lines,
    state_bytes,
    state_lines,
    trained_values,
)
from lean_finetune.memory.switches.all_switches import SWITCHES
from lean_finetune.memory.trace.memory_trace import GRADIENTS, WEIGHTS
from lean_finetune.memory.trace.setting import Setting
from lean_finetune.model.model_config import largest_head_size, layer_settings, ties_embedding
from lean_finetune.model.precision import autocast_dtype, base_dtype

RANKED_AS = "A100-80GB"
"""Its speed ranks changes for a device of unknown speed. Their order hardly depends on the GPU."""
ARITHMETIC_SHARE = 0.5
"""Assumed share of peak FLOP/s that matmuls of training reach."""
BANDWIDTH_SHARE = 0.8
"""Assumed share of peak bandwidth that element-wise kernels reach."""
LINK_SHARE = 0.8
"""Assumed share of the link's bandwidth that copies from and to pinned host memory reach."""
MLP_SHARE = 0.8
"""Assumed share of MLPs in a forward pass; tiles compute it again. In Llama-3.1-8B they have 0.81 of the weights."""
SELECTIVE_SHARE = 0.1
"""Assumed share of a forward pass that policy selective recomputes: all but matmuls and attention."""
HOST_BYTES_PER_SECOND = 20 * GIGA
"""Assumed rate of a CPU's update of weights in host memory."""
OPTIMIZER_8BIT_PASSES = 2
"""Assumed passes of an 8-bit update over its bytes, which includes two table lookups per value."""
COMPRESSION_BYTES = 50
"""Bytes that compressing and decompressing a value reads and writes, all passes of its kernels, without a cache."""
COMPRESSED_BYTES = 1 + 4 / 128
"""Bytes of a compressed value: its code, and its share of a scale (see step.offload.activation_offload)."""
SAVED_VALUES = 28
"""Values per token that a layer saves for backward, in multiples of its width. Traced: Llama-3.1-8B, LoRA, bf16."""

DURATION_RANGE = (0.5, 2.0)
"""Assumed range of a real duration, as multiples of the computed one: all of the arithmetic rate, or a quarter of it.
By torchtune's published speeds of Llama-3.1-8B on an RTX-4090: 0.74 (full), 0.55 (LoRA), 0.69 (QLoRA)."""
MEASURED_RANGE, MEASURED_CAPABILITY = (0.8, 1.6), (9, 0)
"""The range of a kind of runs that was measured: bf16 on one GPU of this compute capability, nothing offloaded.
Llama-3.1-8B, LoRA, QLoRA and full: 1.35, 1.50 and 1.29 on an H100 (benchmarks/results/gpu.json), before adapters were
joined; 1.05, 1.18 and 1.26 on an H200 with the switches of today's default, and 0.97, 0.97 and 0.81 with fused kernels
too (gpu_levers.json)."""

PASSES_FORWARD, PASSES_BACKWARD = 1, 2
"""Matmuls with each weight: one forward, and in backward one for the inputs and one for the weight: 6 FLOP per
parameter and token (Kaplan et al. 2020, arXiv 2001.08361, section 2.1)."""
FLOP_PER_PRODUCT = 2


class Costs:
    """Minimum memory and step time of changed runs, compared with the original run."""

    def __init__(self, run: Run):
        self._run, self._target, self.cuda = run, run.target, run.target.foreach
        self._shapes: dict[int, ModelShapes] = {}
        self._speed, self.reason = ranking_speed(run.device)
        self._known: dict[Setting, Mapping[str, int]] = {}
        self._offloaded: dict[Setting, tuple[int, int]] = {}
        self._trained: dict[Setting, int] = {}
        self._measures_time = run.device.speed is not None

    def least_bytes(self, setting: Setting) -> int:
        """Bytes at the end of every backward pass, for any micro-batches."""
        return sum(self._states(setting).values()) + self._target.constant_bytes

    def gradient_bytes(self, setting: Setting) -> int:
        """Bytes of gradients at the end of backward."""
        return self._states(setting).get(GRADIENTS, 0)

    def gathered_bytes(self, setting: Setting) -> int:
        """Bytes of gathered weights at the end of forward, which sharding zero2 has besides each GPU's shard."""
        if setting.mode != "zero2":
            return 0
        return self._states(setting).get(WEIGHTS, 0) * setting.shards_of(WEIGHTS)

    def offloaded_bytes(self, setting: Setting) -> tuple[int, int]:
        """Bytes that train.offload or a paged optimizer needs in the memory of a host, and on its disk."""
        key = _state_key(setting)
        if key not in self._offloaded:
            processes = processes_per_host(setting, self._run.nodes)
            in_memory, on_disk = offloaded_state_bytes(self._shapes_of(setting), setting)
            paged = paged_lines(self._shapes_of(setting), setting, cuda=self.cuda)
            in_memory += sum(line.total_bytes(1) for line in paged)
            self._offloaded[key] = processes * in_memory, processes * on_disk
        return self._offloaded[key]

    def step_time(self, run: Run) -> float | None:
        """Seconds of a step by the device's data sheet; None if its speed is not known."""
        if not self._measures_time:
            return None
        return self._step_seconds(run)

    def _states(self, setting: Setting) -> Mapping[str, int]:
        """Bytes by category at the end of a backward, on one GPU."""
        key = _state_key(setting)
        if key not in self._known:
            lines = state_lines(self._shapes_of(setting), setting, cuda=self.cuda)
            states = state_bytes(lines, granularity_bytes=self._target.granularity_bytes)
            self._known[key] = {category: size // setting.shards_of(category) for category, size in states.items()}
        return self._known[key]

    def slowdown(self, changed: Run) -> float:
        """Time per token relative to the original run on the same GPU; below 1 if faster."""
        more = changed.micro_batches_per_step / self._run.micro_batches_per_step
        factors = (switch.time(changed.setting, more) / switch.time(self._run.setting, 1.0) for switch in SWITCHES)
        same_rows = _gpus_of_a_row(changed.setting) / _gpus_of_a_row(self._run.setting)
        return math.prod(factors) * same_rows * (self._seconds_per_token(changed) / self._original_seconds_per_token)

    @cached_property
    def _original_seconds_per_token(self) -> float:
        return self._seconds_per_token(self._run)

    def _seconds_per_token(self, run: Run) -> float:
        return self._step_seconds(run) / _tokens(run)

    def _step_seconds(self, run: Run) -> float:
        key, shapes = _state_key(run.setting), self._shapes_of(run.setting)
        if key not in self._trained:
            self._trained[key] = trained_values(shapes, run.setting.train)
        return sum(step_seconds(run, shapes, self._speed, self._trained[key]).values())

    def _shapes_of(self, setting: Setting) -> ModelShapes:
        """Shapes of the parameters on a GPU; raises UserError if tensor parallelism cannot shard the model."""
        size = setting.layout.tensor
        if size not in self._shapes:
            self._shapes[size] = model_shapes(self._run.config, size)
        return self._shapes[size]


def _gpus_of_a_row(setting: Setting) -> int:
    """GPUs that process the same tokens, each a part of the model."""
    return setting.layout.tensor * setting.layout.pipeline


WITHOUT_STATES = {
    key.removeprefix("train."): OFF.get(key)
    for switch in SWITCHES
    if not switch.changes_states
    for key in switch.parameters
}
"""Values of the switches that do not change states, for `_state_key`."""


def _state_key(setting: Setting) -> Setting:
    """The setting without what does not change states: a search needs few states of many settings."""
    return setting.with_train(**WITHOUT_STATES)


def tokens_per_second(run: Run) -> tuple[float, float] | None:
    """Lowest and highest tokens per second, with padding, of one GPU or pipeline; None if its speed is not known.

    Computed from the data sheet of the device, without the time that GPUs wait for each other.
    """
    if (parts := device_step_seconds(run)) is None:
        return None
    seconds = sum(parts.values())
    fast, slow = duration_range(run)
    return _tokens(run) / (seconds * slow), _tokens(run) / (seconds * fast)


def duration_range(run: Run) -> tuple[float, float]:
    """The range of a run's real duration, as multiples of the computed one."""
    train = run.setting.train
    on_device = (train.offload, train.offload_activations) == ("none", "none")
    alone = run.params.hardware.num_gpus == 1 and run.device.compute_capability == MEASURED_CAPABILITY
    measured = alone and on_device and train.precision == "bf16" and train.method != "int8_lora"
    return MEASURED_RANGE if measured else DURATION_RANGE


def duration_text(run: Run, steps: int) -> str | None:
    """How long `steps` optimizer steps take, for people; None if the device's speed is not known."""
    if (speed := tokens_per_second(run)) is None:
        return None
    slow, fast = speed
    times = readable_times(steps * _tokens(run) / fast, steps * _tokens(run) / slow)
    waiting = ", and longer where GPUs wait for each other" if run.params.hardware.num_gpus > 1 else ""
    return f"{times} by the data sheet of {run.device.name} (not measured){waiting}"


def ranking_speed(device: Device) -> tuple[Speed, str]:
    """The speed that ranks changes, and the reason."""
    speeds = {gpu.name: gpu.speed for gpu in GPUS if gpu.speed is not None}
    speed = device.speed or speeds.get(device.name)
    if speed is not None:
        return speed, f"by the speed of {device.name}"
    return speeds[RANKED_AS], f"by the speed of {RANKED_AS}: that of {device.name} is not known"


def device_step_seconds(run: Run) -> dict[str, float] | None:
    """`step_seconds` by the data sheet of the run's device; None if its speed is not known."""
    if run.device.speed is None:
        return None
    shapes = model_shapes(run.config, run.setting.layout.tensor)
    return step_seconds(run, shapes, run.device.speed, trained_values(shapes, run.setting.train))


def step_seconds(run: Run, shapes: ModelShapes, speed: Speed, trained: int) -> dict[str, float]:
    """Seconds of each part of a step. `weights`: reading and unpacking them; `link` and `disk`: offloaded tensors.

    `trained` is the number of trained values (`trained_values`), which a search asks for once for many switches.
    For a pipeline: of a stage with an equal part of the work, with what it sends and how long it waits (`bubble`).
    """
    train, config, text = run.setting.train, run.config, run.config.get_text_config()
    fp32 = train.precision == "fp32"
    element_bytes = FP32_BYTES if fp32 else 2
    flops = (speed.fp32_flops if fp32 else speed.half_flops) * ARITHMETIC_SHARE
    bandwidth = speed.bytes_per_second * BANDWIDTH_SHARE
    tokens, micro_batches = _tokens(run), max(1, round(run.micro_batches_per_step))
    recomputed = PASSES_FORWARD * _recomputed_share(train, text.num_hidden_layers)
    tiled = 0.0 if train.sequence_tiles is None else PASSES_FORWARD * MLP_SHARE
    # Frozen weights get no gradient: backward multiplies by them once. Adapters are small beside them.
    passes = PASSES_FORWARD + (PASSES_BACKWARD if train.method == "full" else 1) + recomputed + tiled
    # A token looks its input embedding up: no matmul.
    size = run.setting.layout.tensor
    parameters = shapes.active_values - (0 if ties_embedding(config) else text.vocab_size // size * text.hidden_size)
    # Scores and their product with the values, of width × length each, over the causal half; twice that in backward.
    heads = max(heads or 0 for heads in layer_settings(config, "num_attention_heads")) / size
    width = heads * largest_head_size(config)
    scores = 2 * FLOP_PER_PRODUCT * text.num_hidden_layers * width * run.longest * tokens / 2
    # Dequantization reads a weight, writes a value and reads it again.
    weight_bytes = {"qlora": 0.5 + element_bytes, "int8_lora": 1 + element_bytes}.get(train.method, 0)
    saved, compressed = _saved_values(run), run.setting.train.compress_activations != "none"
    saved_bytes = saved * (COMPRESSED_BYTES if compressed else (autocast_dtype(train) or base_dtype(train)).itemsize)
    offloaded = 0.0 if run.setting.train.offload_activations == "none" else saved_bytes
    link_bytes = _link_bytes(run, parameters, trained, element_bytes, micro_batches) + 2 * offloaded
    link_bytes += tensor_parallel_bytes(run)
    update = _update_seconds(run.setting, trained, element_bytes, bandwidth)
    seconds = {
        "products": FLOP_PER_PRODUCT * passes * parameters * tokens / flops,
        "attention": scores * (PASSES_FORWARD + PASSES_BACKWARD + recomputed) / flops,
        "weights": (element_bytes + weight_bytes) * parameters * passes * micro_batches / bandwidth,
        "update": update,
        "compression": COMPRESSION_BYTES * saved / bandwidth if compressed else 0.0,
        "link": link_bytes / (speed.link_bytes_per_second * LINK_SHARE),
        "disk": _disk_seconds(run, shapes, offloaded, update),
    }
    if (stages := run.setting.layout.pipeline) > 1:
        sent = 2 * pipeline_bytes(run) / (speed.link_bytes_per_second * LINK_SHARE)
        seconds = {part: value / stages for part, value in seconds.items()} | {"sent": sent}
        # Stages wait for the first and the last micro-batches (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).
        seconds["bubble"] = sum(seconds.values()) * (stages - 1) / micro_batches
    return seconds


def _tokens(run: Run) -> int:
    return max(1, round(run.tokens_per_step))


def pipeline_bytes(run: Run) -> int:
    """Bytes that a stage of a pipeline sends to the next one in a step; the next one sends as many back."""
    return _tokens(run) * int(run.config.get_text_config().hidden_size) * base_dtype(run.setting.train).itemsize


def _recomputed_share(train: Train, layers: int) -> float:
    """Share of a forward pass of so many layers that gradient checkpointing recomputes, attention too."""
    return train.recomputed_share(layers) * (SELECTIVE_SHARE if train.grad_ckpt_policy == "selective" else 1.0)


def _saved_values(run: Run) -> float:
    """Rough number of values that a step saves: the inputs of recomputed layers and all activations of the others."""
    text, train = run.config.get_text_config(), run.setting.train
    recomputed = train.recomputed_share(text.num_hidden_layers)
    values = recomputed + (1 - recomputed) * SAVED_VALUES
    return values * text.num_hidden_layers * text.hidden_size * run.tokens_per_step


def tensor_parallel_bytes(run: Run) -> float:
    """Bytes that a GPU sends in a step for tensor parallelism, to sum outputs and gradients.

    Each layer has two sums in forward, two in backward, and one more if it is recomputed. The embedding has one.
    Trained tokens have one for the gradient of the head's input, and three fp32 values. A sum of B bytes over N GPUs in
    a ring sends 2 · B · (N - 1) / N. The links are assumed to be those to the host; NVLink is many times faster.
    """
    text, train, size = run.config.get_text_config(), run.setting.train, run.setting.layout.tensor
    if size == 1:
        return 0.0
    hidden_bytes = text.hidden_size * (autocast_dtype(train) or base_dtype(train)).itemsize
    sums = text.num_hidden_layers * (4 + train.recomputed_share(text.num_hidden_layers)) + 1
    if train.adapted and not train.grad_ckpt:
        sums -= 1  # The input of the first layer needs no gradient.
    shapes = [shape for step in run.steps for shape in step]
    trained = sum(shape.supervised for shape in shapes) / sum(shape.rows * shape.length for shape in shapes)
    token_bytes = sums * hidden_bytes + trained * (hidden_bytes + 3 * FP32_BYTES)
    return 2 * (size - 1) / size * token_bytes * _tokens(run)


def _disk_seconds(run: Run, shapes: ModelShapes, offloaded: float, update: float) -> float:
    """Seconds that the disk adds: activations are written and read, and all state is while the host updates it."""
    setting = run.setting
    activations = offloaded if setting.train.offload_activations == "disk" else 0
    # The GPUs of a node share its disk.
    state = disk_bytes(shapes, setting) * processes_per_host(setting, run.nodes)
    return (2 * activations + max(0.0, 2 * state - update * run.disk_bytes_per_second)) / run.disk_bytes_per_second


def _update_seconds(setting: Setting, trained: int, element_bytes: int, bandwidth: float) -> float:
    """Seconds to read gradients, and to read and write weights and moments."""
    value_bytes = element_bytes if setting.train.method == "full" else FP32_BYTES
    kind, on_host = OPTIMIZERS[setting.train.optimizer], setting.train.offload != "none"
    updated_bytes = FP32_BYTES if setting.train.master_weights else value_bytes
    moment_bytes = updated_bytes if kind.state_bits is None else kind.state_bits / 8
    passes = OPTIMIZER_8BIT_PASSES if kind.state_bits == 8 else 1
    moved = trained * (3 * updated_bytes + 2 * kind.values_per_trained_value * moment_bytes) * passes
    if on_host or setting.train.master_weights:  # Gradients are copied first, then weights back.
        moved += 4 * trained * value_bytes
    return moved / (HOST_BYTES_PER_SECOND if on_host else bandwidth)


def _link_bytes(run: Run, parameters: int, trained: int, element_bytes: int, micro_batches: int) -> float:
    """Bytes of an offloaded state between host and GPU: gradients, updated weights, and weights for each pass.

    Of a paged optimizer: all of its state, there and back, as on a GPU that is full.
    """
    setting, kind = run.setting, OPTIMIZERS[run.setting.train.optimizer]
    value_bytes = element_bytes if setting.train.method == "full" else FP32_BYTES
    state = 2.0 * trained * value_bytes if setting.train.offload != "none" else 0.0
    if kind.paged:
        state += 2 * trained * kind.values_per_trained_value * (kind.state_bits or 8 * value_bytes) / 8
    share = 1 / setting.shards_of_weights if setting.train.offload == "parameters" else 0
    weight_bytes = 0.5 if setting.train.method == "qlora" else element_bytes
    return state + 2 * share * parameters * weight_bytes * micro_batches
