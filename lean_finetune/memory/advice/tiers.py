"""The three tiers of a run's memory on a GPU, and which of them decides whether it fits.

Tensors are what PyTorch calls allocated, reserved memory is what its caching allocator holds for them, and the process
has a CUDA context besides (on several GPUs NCCL's buffers too), which only nvidia-smi counts.
"""

from cuda_memory.gpus import Device
from lean_finetune.config.load import with_flags
from lean_finetune.core.errors import UserError
from lean_finetune.memory.advice.margins import Tier, margin_of
from lean_finetune.memory.advice.plan_memory import PlanMemory, replay_steps
from lean_finetune.memory.advice.run import Run, full_rows_run
from lean_finetune.memory.predict.first_step import FirstStep, first_step
from lean_finetune.memory.predict.peak import Prediction, predict_with_events

OFFLOADED = "train.offload=optimizer"
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


def dying_first_step(run: Run, prediction: Prediction) -> FirstStep | None:
    """The first step with state made in it, if only its update does not fit; None for another run.

    Of one GPU: shards of state have other sizes on each.
    """
    if run.device.kind != "cuda" or run.setting.gpus > 1 or run.setting.train.offload != "none":
        return None
    found = first_step(run.model, prediction.by_phase, several=run.micro_batches_per_step > 1)
    return found if found.dies_in_update(run.device.usable_bytes(0)) else None


def offloaded_first_step(run: Run) -> FirstStep | None:
    """The first step with the optimizer on the host; None if the run cannot have that."""
    try:
        run = full_rows_run(with_flags(run.params, [OFFLOADED]), run.config, run.device)
        return first_step(run.model, run.predict().by_phase, several=run.micro_batches_per_step > 1)
    except UserError:
        return None


def room_bytes(tier: Tier, device: Device, headroom_percent: float) -> int:
    """Memory of a device that a tier may take."""
    if tier == "tensors":
        return device.usable_bytes(headroom_percent)
    return device.memory_bytes - (device.context.max_bytes if tier == "reserved" else 0)


def deciding_tier(prediction: Prediction, memory: PlanMemory | None, device: Device, headroom_percent: float) -> Tier:
    """The tier for which a run does not fit; of a run that fits, the one that takes more of its room.

    On several GPUs the margin counts as taken: it is in tensors.
    """
    room, margin = room_bytes("tensors", device, headroom_percent), margin_of(prediction.setting, device)
    if memory is None or prediction.peak.bytes > room:
        return "tensors"
    taken = prediction.peak.bytes if margin is None else margin.with_margin(prediction.peak.bytes)
    share = memory.held_bytes(memory.chosen) / room_bytes("reserved", device, headroom_percent)
    fails = memory.failing_step(memory.chosen) is not None
    return "reserved" if fails or share > taken / room else "tensors"
