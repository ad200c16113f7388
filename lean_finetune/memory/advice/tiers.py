"""The three tiers of a run's memory on a GPU, and which of them decides whether it fits.

Tensors are what PyTorch calls allocated, reserved memory is what its caching allocator holds for them, and the process
has a CUDA context besides (on several GPUs NCCL's buffers too), which only nvidia-smi counts.
"""

from cuda_memory.gpus import Device
from lean_finetune.memory.advice.margins import Tier
from lean_finetune.memory.advice.plan_memory import PlanMemory, replay_steps
from lean_finetune.memory.advice.run import Run
from lean_finetune.memory.predict.peak import Prediction, predict_with_events

ROUNDS = 2
"""Optimizer steps of full rows that are replayed: later ones find what the first one left reserved."""


def predict_tiers(run: Run) -> tuple[Prediction, PlanMemory | None]:
    """The peaks of a run with full rows, and a replay of two of its optimizer steps.

    The replay is None on a CPU, for the stages of a pipeline, and for a planned run, whose plan is replayed.

    Raises:
        UserError: PyTorch cannot trace an operation of the step.
    """
    if run.device.kind != "cuda" or run.planned is not None or run.setting.is_pipeline:
        return run.predict(), None
    (step,) = run.steps
    steps = ((step[-1],) * len(step),)  # Every micro-batch is full. That the first one is small is enough for peaks.
    prediction, events = predict_with_events(run.model, steps)
    assert events is not None
    gpus = run.setting.gpus
    memory = replay_steps(events, steps, expandable=run.expandable, device=run.device, rounds=ROUNDS, gpus=gpus)
    return prediction, memory


def room_bytes(tier: Tier, device: Device, headroom_percent: float) -> int:
    """Memory of a device that a tier may take."""
    if tier == "tensors":
        return device.usable_bytes(headroom_percent)
    return device.memory_bytes - (device.context.max_bytes if tier == "reserved" else 0)


def deciding_tier(prediction: Prediction, memory: PlanMemory | None, device: Device, headroom_percent: float) -> Tier:
    """The tier for which a run does not fit; of a run that fits, the one that takes more of its room."""
    room = room_bytes("tensors", device, headroom_percent)
    if memory is None or prediction.peak.bytes > room:
        return "tensors"
    share = memory.held_bytes(memory.chosen) / room_bytes("reserved", device, headroom_percent)
    return "reserved" if share > prediction.peak.bytes / room else "tensors"
