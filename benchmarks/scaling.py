"""How a step's time divides on 8 to 1024 GPUs: a model from bytes and published link speeds, not a measurement.

Assumed: Llama-3.1-8B, all weights trained in bf16, 8,192 tokens a GPU and step; a GPU computes at 40% of the H100's
989 TFLOPS (dense bf16, NVIDIA's data sheet), 6 FLOPs a weight and token; 8 GPUs a node, each with 450 GB/s of NVLink
in each direction and 50 GB/s of InfiniBand (NDR, 400 Gb/s), of both of which 80% is reached; rings, so that a GPU
sends (N - 1) / N of what is gathered or scattered, twice that for a sum. Sums hide behind backward (two thirds of the
computing), gathers of weights behind all of it; what does not fit there is waited for. Latency is left out: it makes
small messages among many GPUs slower than this says.
"""

from collections.abc import Iterator

from benchmarks.form import Row

WEIGHTS = 8.03e9
BYTES_PER_WEIGHT = 2
TOKENS_PER_GPU = 8192
FLOPS = 989e12 * 0.4
GPUS_PER_NODE = 8
NVLINK_BYTES_PER_S, NETWORK_BYTES_PER_S = 450e9 * 0.8, 50e9 * 0.8
BACKWARD_SHARE = 2 / 3
COUNTS = (8, 64, 256, 1024)


def scaling() -> Iterator[Row]:
    """For each mode and number of GPUs: what is sent and waited for, and the share of the time that computes."""
    compute = 6 * WEIGHTS * TOKENS_PER_GPU / FLOPS
    for gpus in COUNTS:
        for mode in ("ddp", "zero3", "hsdp"):
            gathered, summed, sent = _communication(mode, gpus)
            waited = max(0.0, summed - compute * BACKWARD_SHARE, gathered + summed - compute)
            yield {
                "what": f"model: {mode} on {gpus} GPUs",
                "sent_bytes": sent,
                "communication_s": gathered + summed,
                "waited_s": waited,
                "efficiency": compute / (compute + waited),
            }


def _communication(mode: str, gpus: int) -> tuple[float, float, float]:
    """Seconds of gathering weights and of summing gradients, and bytes that a GPU sends, in a step."""
    held = WEIGHTS * BYTES_PER_WEIGHT
    link = NVLINK_BYTES_PER_S if gpus <= GPUS_PER_NODE else NETWORK_BYTES_PER_S
    ring = held * (gpus - 1) / gpus
    if mode == "ddp":
        return 0.0, 2 * ring / link, 2 * ring
    if mode == "zero3":
        return 2 * ring / link, ring / link, 3 * ring
    inside = held * (GPUS_PER_NODE - 1) / GPUS_PER_NODE
    groups = gpus // GPUS_PER_NODE
    between = 2 * held / GPUS_PER_NODE * (groups - 1) / groups
    seconds = inside / NVLINK_BYTES_PER_S + between / NETWORK_BYTES_PER_S
    return 2 * inside / NVLINK_BYTES_PER_S, seconds, 3 * inside + between
