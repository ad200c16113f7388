"""Whether a run fits its device, with settings that fit if it does not."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from cuda_memory.gpus import Device
from cuda_memory.units import counted, readable_size
from lean_finetune.config.load import with_flags
from lean_finetune.core.errors import UserError
from lean_finetune.memory.advice.full_rows import remade
from lean_finetune.memory.advice.margins import Margin, State, Tier, judge_bytes, margin_of
from lean_finetune.memory.advice.plan_memory import ALLOCATORS, PlanMemory, replay_steps
from lean_finetune.memory.advice.planned_run import replanned
from lean_finetune.memory.advice.run import Run
from lean_finetune.memory.advice.search import Remedy, advise
from lean_finetune.memory.advice.search_space import Candidate
from lean_finetune.memory.advice.step_cost import Costs
from lean_finetune.memory.predict.first_step import FirstStep, first_step
from lean_finetune.memory.predict.peak import Prediction, predict_with_events
from lean_finetune.memory.switches.switch import EFFECTS, SAME
from lean_finetune.model.allocator_settings import segments_from_environment
from lean_finetune.step.batches import BatchShape

LARGEST_CATEGORIES = 3
MOST_REMEDIES = 3

# The three tiers of a run's memory on a GPU, and which of them decides whether it fits.
#
# Tensors are what PyTorch calls allocated, reserved memory is what its caching allocator holds for them, and the
# process has a CUDA context besides (on several GPUs NCCL's buffers too), which only nvidia-smi counts.

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
        run = remade(run, with_flags(run.params, [OFFLOADED]))
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


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether train may start. It names no device if the run fits, so another device causes no retraining."""

    enforce: bool
    """Whether train refuses a run that does not fit."""
    state: State
    """Tight: the device holds the prediction, but not with the headroom and the margin."""
    why_tight: str | None = None
    """What a tight run does not leave free."""
    within_margin: bool = False
    """The prediction leaves the headroom free, and only the margin does not fit. Train starts such a run."""
    refusal: str | None
    """One line with prediction, capacity, largest parts and settings that fit; None if the run fits."""

    @property
    def fits(self) -> bool:
        """Whether it fits with the headroom and the margin."""
        return self.state == "fits"

    def as_json(self) -> dict[str, Any]:
        """The content of verdict.json."""
        refused = self.enforce and not self.within_margin
        content: dict[str, Any] = {"enforce": self.enforce, "refusal": self.refusal if refused else None}
        if self.within_margin:
            content["note"] = f"training starts, though the GPU may have too little memory: the run is {self.why_tight}"
        return content


def judge(
    prediction: Prediction,
    device: Device,
    remedies: Sequence[Remedy],
    *,
    headroom_percent: float,
    enforce: bool,
    memory: PlanMemory | None = None,
    shortage: str | None = None,
) -> Verdict:
    """Compare a prediction with a device.

    Tensors must leave the headroom and the margin of the run's kind free. The blocks that the allocator reserves may
    take all but the CUDA context, because the allocator releases cached blocks before a request fails. `memory`, if
    known, is a replay that does so. `shortage` says what the host lacks. A refusal names the first few `remedies`.
    """
    peak, usable = prediction.peak.bytes, device.usable_bytes(headroom_percent)
    margin = margin_of(prediction.setting, device)
    shown = [f"{r.switches} ({readable_size(r.peak_bytes)}, {r.slowdown:.2f}x time)" for r in remedies[:MOST_REMEDIES]]
    would_fit = f"would fit: {'; '.join(shown)}" if shown else None
    if peak > usable:
        return _too_large(prediction, device, headroom_percent, enforce=enforce, memory=memory, would_fit=would_fit)
    if shortage is not None:
        refusal = f"{shortage}; {would_fit or 'no change of the known switches makes it fit: choose a larger host'}"
        return Verdict(enforce=enforce, state="does not fit", refusal=refusal)
    if memory is not None and (step := memory.failing_step(memory.chosen)) is not None:
        refusal = (
            f"hardware.gpu: tensors fit {device.name}, but blocks of other sizes stay reserved between them: out of "
            f"memory at optimizer step {step} ({memory.limited[memory.chosen].out_of_memory}); "
            f"{would_fit or 'lower bucket.max_tokens'}"
        )
        return Verdict(enforce=enforce, state="does not fit", refusal=refusal)
    if margin is not None and judge_bytes(peak, device, "tensors", margin, headroom_percent) == "tight":
        return _within_margin(peak, usable, device, margin, enforce=enforce, would_fit=would_fit)
    return Verdict(enforce=enforce, state="fits", refusal=None)


def _too_large(
    prediction: Prediction,
    device: Device,
    headroom_percent: float,
    *,
    enforce: bool,
    memory: PlanMemory | None,
    would_fit: str | None,
) -> Verdict:
    """The verdict on a run that does not leave the headroom free."""
    usable, tight = device.usable_bytes(headroom_percent), prediction.peak.bytes <= device.usable_bytes(0)
    by_size = sorted(prediction.peak.by_category.items(), key=lambda item: (-item[1], item[0]))
    largest = ", ".join(f"{category} {readable_size(size)}" for category, size in by_size[:LARGEST_CATEGORIES])
    refusal = (
        f"hardware.gpu: predicted peak {readable_size(prediction.peak.bytes)} (in {prediction.worst_phase}"
        f"{_first_failure(prediction, usable, memory)}) exceeds the {readable_size(usable)} usable on {device.name} "
        f"({readable_size(device.memory_bytes)} less {device.headroom_text(headroom_percent)}"
        f"{' of headroom, without which it would fit' if tight else ''}); largest: {largest}; "
        f"{would_fit or 'no change of the known switches makes it fit: choose a larger device'}"
    )
    if not tight:
        return Verdict(enforce=enforce, state="does not fit", refusal=refusal)
    why = f"without the headroom of {headroom_percent:g} %"
    return Verdict(enforce=enforce, state="tight", why_tight=why, refusal=refusal)


def _within_margin(
    peak: int, usable: int, device: Device, margin: Margin, *, enforce: bool, would_fit: str | None
) -> Verdict:
    """The verdict on a run that may need more than the device has, by as much as predictions of its kind may be off."""
    refusal = (
        f"hardware.gpu: predicted peak {readable_size(peak)} is within {margin.text}: it may need up to "
        f"{readable_size(margin.with_margin(peak))} of the {readable_size(usable)} usable on {device.name}; "
        f"{would_fit or 'no change of the known switches makes it fit with the margin'}; train starts it nevertheless"
    )
    return Verdict(
        enforce=enforce, state="tight", why_tight=f"within {margin.text}", within_margin=True, refusal=refusal
    )


def _first_failure(prediction: Prediction, usable: int, memory: PlanMemory | None) -> str:
    """Where the run would stop: the first phase whose peak is too large, and its micro-batch."""
    phase = next(phase for phase, peak in prediction.by_phase.items() if peak.bytes > usable)
    earlier = "" if phase == prediction.worst_phase else f", too large from {phase} on"
    step = None if memory is None else memory.first_step_above(usable)
    at = "" if step is None else f", at optimizer step {step}"
    return f"{earlier}, micro-batch of {describe(prediction.steps_of_peak[-1][-1])}{at}"


def describe(shape: BatchShape) -> str:
    """A micro-batch in words."""
    if shape.packed_lengths is not None:
        return f"{counted(len(shape.packed_lengths), 'row')} packed into {shape.length:,} tokens"
    return f"{counted(shape.rows, 'row')} of {shape.length:,} tokens"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A verdict with its advice."""

    verdict: Verdict
    remedies: tuple[Remedy, ...]
    """Best first; empty if the run fits."""
    ranked: str | None
    """How remedies were ranked; None if there was no search."""

    def as_json(self) -> dict[str, Any]:
        """The content of advice.json."""
        remedies = [remedy.as_json() for remedy in self.remedies]
        return {"verdict": self.verdict.state, "ranked": self.ranked, "remedies": remedies}


def judge_run(
    run: Run, prediction: Prediction, memory: PlanMemory | None = None, remedies: Sequence[Remedy] = ()
) -> Verdict:
    """`judge` for a run on its device and its host."""
    return judge(
        prediction,
        run.device,
        remedies,
        headroom_percent=run.params.estimate.headroom_percent,
        enforce=run.params.estimate.enforce,
        memory=memory,
        shortage=run.shortage(prediction.offloaded_bytes),
    )


def answer(run: Run, prediction: Prediction, memory: PlanMemory | None = None) -> Answer:
    """Judge a run, and search for changes if it does not fit.

    `memory` is the allocator's behaviour over the plan, if known. If only fragmentation makes the run fail, the other
    kind of segments is the one remedy, because it costs no time. Every remedy has passed the same verdict.
    """
    usable, shortage = run.usable_bytes, run.shortage(prediction.offloaded_bytes)
    judged = partial(judge_run, run, prediction, memory)

    if prediction.peak.bytes <= usable and shortage is None:
        other = () if memory is None or segments_from_environment() is not None else other_segments(memory, prediction)
        verdict = judged(other)
        if verdict.fits or other:
            return Answer(verdict=verdict, remedies=other, ranked=None)
    costs = Costs(run)
    remedies = advise(
        run,
        costs,
        peak=prediction.peak,
        usable_bytes=run.fitting_bytes,
        confirm=partial(confirmed, run),
    )
    ranked = f"by effect on learning, then {costs.reason}"
    return Answer(verdict=judged(remedies), remedies=tuple(remedies), ranked=ranked)


def confirmed(run: Run, candidate: Candidate, traced_bytes: int) -> Prediction | None:
    """The prediction of a changed run that its own verdict accepts; None if it does not fit, or a stage refuses it.

    A planned run gets the plan that the change leads to; a run with full rows is what `fit` makes of the overrides.
    `traced_bytes` is the peak of the candidate's own micro-batches.
    """
    changed = candidate.run
    try:
        if run.planned is None:
            trial = remade(run, with_flags(run.params, candidate.flags))
            same = (trial.setting, trial.steps) == (changed.setting, changed.steps)
            if same and traced_bytes > trial.fitting_bytes:
                return None
            prediction, memory = predict_tiers(trial)
        else:
            trial, memory = replanned(run, changed), None
            prediction = trial.predict()
    except UserError:
        return None
    if prediction.peak.bytes > trial.fitting_bytes or trial.shortage(prediction.offloaded_bytes) is not None:
        return None  # Skip the replay of a plan, which takes as long as the prediction.
    if run.planned is not None:
        memory, _ = trial.replay(prediction)
    return prediction if judge_run(trial, prediction, memory).fits else None


def other_segments(memory: PlanMemory, prediction: Prediction) -> tuple[Remedy, ...]:
    """The other kind of allocator segments, if the run fails with its own kind and not with the other."""
    other = next(kind for kind in ALLOCATORS if kind != memory.chosen)
    if memory.failing_step(memory.chosen) is None or memory.failing_step(other) is not None:
        return ()
    flags = (f"train.expandable_segments={str(ALLOCATORS[other]).lower()}",)
    return (Remedy(flags=flags, peak_bytes=prediction.peak.bytes, slowdown=1.0, effect=EFFECTS[SAME]),)
