"""A cost model of a training step on a GPU, to rank switches by slowdown.

A step is the sum of its parts, each limited by arithmetic or by bandwidth. Peak rates come from data sheets. The shares
of them that training reaches are the assumptions below. Seconds are therefore rough, but both sides of a comparison use
the same shares: decide by `relative_slowdown` only.
"""

from dataclasses import dataclass

from lean_finetune.config.field_types import Method, OptimizerName, Precision
from lean_finetune.config.optimizers import OPTIMIZERS
from lean_finetune.memory.gpus import GIGA, Speed

ARITHMETIC_SHARE = 0.5
"""Assumed share of peak FLOP/s that matrix products of training reach."""
BANDWIDTH_SHARE = 0.8
"""Assumed share of peak bandwidth that element-wise kernels reach."""
LINK_SHARE = 0.8
"""Assumed share of the link's bandwidth that copies from and to pinned host memory reach."""
DISK_BYTES_PER_SECOND = 2 * GIGA
"""Assumed rate of a solid-state disk for writing and reading activations."""
SELECTIVE_SHARE = 0.1
"""Assumed share of a forward pass that policy selective recomputes: all but matmuls and attention."""
HOST_BYTES_PER_SECOND = 20 * GIGA
"""Assumed rate of a CPU's update of weights in host memory."""
OPTIMIZER_8BIT_PASSES = 2
"""Assumed passes of an 8-bit update over its bytes, which includes two table lookups per value."""

FP32_BYTES = 4
PASSES_FORWARD, PASSES_BACKWARD = 1, 2
"""Products with each weight: one forward, and in backward one for the inputs and one for the weight: 6 FLOP per
parameter and token (Kaplan et al. 2020, arXiv 2001.08361, section 2.1)."""
FLOP_PER_PRODUCT = 2


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """Computation and data transfers of a step."""

    parameters: int
    """Values of the weights that a token is multiplied with: all except the input embedding."""
    trained_parameters: int
    layers: int
    width: int
    """Query heads × head size."""
    tokens: int
    """Of the whole step, padding included."""
    length: int
    """Tokens that the last token attends to. On average a token attends to half of them."""
    micro_batches: int
    method: Method
    precision: Precision
    optimizer: OptimizerName
    grad_ckpt: bool
    offloaded_optimizer: bool
    """The update runs on the host: gradients are copied there and weights back."""
    master_weights: bool = False
    """The update changes fp32 copies."""
    recomputed_share: float = 1.0
    """With grad_ckpt: the share of the forward pass to compute again."""
    weights_from_host: float = 0
    """Share of all weights that a GPU copies from the host for each pass over a micro-batch."""
    offload_to_disk: bool = False
    """Activations are written to a file."""
    offloaded_activations_bytes: int
    """Bytes that a step copies to the host in forward and back in backward."""


def step_seconds(work: StepWork, speed: Speed) -> dict[str, float]:
    """Seconds of each part of a step: products, attention, weights (unpacking, reading), update, link, disk."""
    element_bytes = FP32_BYTES if work.precision == "fp32" else 2
    flops = (speed.fp32_flops if work.precision == "fp32" else speed.half_flops) * ARITHMETIC_SHARE
    bandwidth = speed.bytes_per_second * BANDWIDTH_SHARE
    recomputed = PASSES_FORWARD * work.recomputed_share if work.grad_ckpt else 0
    # Frozen weights get no gradient: backward multiplies by them once. Adapters are small beside them.
    backward = PASSES_BACKWARD if work.method == "full" else 1
    passes = PASSES_FORWARD + backward + recomputed
    products = FLOP_PER_PRODUCT * passes * work.parameters * work.tokens / flops
    # Scores and their product with the values, of width × length each, over the causal half; twice that in backward.
    scores = 2 * FLOP_PER_PRODUCT * work.layers * work.width * work.length * work.tokens / 2
    attention = scores * (PASSES_FORWARD + PASSES_BACKWARD + recomputed) / flops
    return {
        "products": products,
        "attention": attention,
        "weights": _weight_bytes(work, passes, element_bytes) / bandwidth,
        "update": _update_seconds(work, element_bytes, bandwidth),
        "link": _link_bytes(work, element_bytes) / (speed.link_bytes_per_second * LINK_SHARE),
        "disk": 2 * work.offloaded_activations_bytes / DISK_BYTES_PER_SECOND if work.offload_to_disk else 0.0,
    }


def relative_slowdown(work: StepWork, than: StepWork, speed: Speed) -> float:
    """How many times longer a step of `work` takes per token than one of `than` on the same GPU; below 1 if faster."""
    seconds, other = (sum(step_seconds(each, speed).values()) / each.tokens for each in (work, than))
    return seconds / other


def _weight_bytes(work: StepWork, passes: float, element_bytes: int) -> float:
    """Bytes moved for the weights of all passes. Dequantization reads a weight, writes a value and reads it again."""
    moved = element_bytes + {"qlora": 0.5 + element_bytes, "int8_lora": 1 + element_bytes}.get(work.method, 0)
    return moved * work.parameters * passes * work.micro_batches


def _update_seconds(work: StepWork, element_bytes: int, bandwidth: float) -> float:
    """Seconds to read gradients, and to read and write weights and moments."""
    value_bytes = element_bytes if work.method == "full" else FP32_BYTES
    kind = OPTIMIZERS[work.optimizer]
    updated_bytes = FP32_BYTES if work.master_weights else value_bytes
    moment_bytes = updated_bytes if kind.state_bits is None else kind.state_bits / 8
    passes = OPTIMIZER_8BIT_PASSES if kind.state_bits == 8 else 1
    moved = work.trained_parameters * (3 * updated_bytes + 2 * kind.values_per_trained_value * moment_bytes) * passes
    if work.offloaded_optimizer or work.master_weights:  # Gradients are copied first, then weights back.
        moved += 4 * work.trained_parameters * value_bytes
    return moved / (HOST_BYTES_PER_SECOND if work.offloaded_optimizer else bandwidth)


def _link_bytes(work: StepWork, element_bytes: int) -> float:
    """Bytes copied between host and GPU: gradients, updated weights, activations, and weights for each pass."""
    value_bytes = element_bytes if work.method == "full" else FP32_BYTES
    state = 2 * work.trained_parameters * value_bytes if work.offloaded_optimizer else 0
    weight_bytes = 0.5 if work.method == "qlora" else element_bytes
    weights = 2 * work.weights_from_host * work.parameters * weight_bytes * work.micro_batches
    return state + weights + 2 * work.offloaded_activations_bytes
