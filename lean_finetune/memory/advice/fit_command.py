"""What fits, asked without a pipeline: `lean-finetune fit`."""

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import PretrainedConfig

from lean_finetune.config.field_types import Precision
from lean_finetune.config.overrides import with_flags
from lean_finetune.config.schema import Params, round_up
from lean_finetune.core.errors import UserError
from lean_finetune.core.units import readable_size
from lean_finetune.memory.advice.largest_that_fits import Largest, turn_round
from lean_finetune.memory.advice.search_space import Candidate
from lean_finetune.memory.advice.verdict import describe, judge, usable_bytes
from lean_finetune.memory.advice.verdict_with_advice import answer
from lean_finetune.memory.advice.workload import Workload, full_batch, largest_steps
from lean_finetune.memory.devices import attention_on, precision_on, resolve_gpu
from lean_finetune.memory.gpus import Device
from lean_finetune.memory.predict.experts import refuse_experts
from lean_finetune.memory.predict.peak import Prediction, predict
from lean_finetune.memory.predict.setting import Setting
from lean_finetune.memory.predict.state_formulas import host_state_bytes
from lean_finetune.memory.trace.cuda_kernels import target_of
from lean_finetune.model.allocator_settings import environment_notes
from lean_finetune.model.model_config import attention_window, read_config, refuse_joined_rows, refuse_long_rows
from lean_finetune.pinning.locate import TINY, TINY_DIRECTORY
from lean_finetune.step.activation_offload import refuse_offload
from lean_finetune.step.host_transfer import refuse_offloaded_state
from lean_finetune.step.optimizer_in_backward import refuse_in_backward

CONFIG_FILE = "config.json"


def tell_what_fits(p: Params, gpu: str | None, model: Path | None, *, shorten: bool = False) -> Iterator[str]:
    """The lines of the answer, as they become known.

    The run is that of params.yaml with micro-batches full of its longest rows, all of their tokens trained.

    Args:
        p: the parameters.
        gpu: in place of hardware.gpu.
        model: a directory or a config.json, in place of model.name.
        shorten: lower data.max_length to the positions that the model has.

    Raises:
        UserError: a parameter, the device or the model cannot be.
    """
    torch.set_num_threads(p.run.cpu_threads or torch.get_num_threads())
    device, reason = resolve_gpu(gpu or p.hardware.gpu)
    precision, _ = precision_on(device, p.train.precision)
    refuse_offload(p.train.offload_activations, device.kind)
    refuse_offloaded_state(p.train.offload, device.kind)
    directory = find_model(p.model.name if model is None else str(model))
    config = read_config(directory)
    refuse_experts(config)
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if shorten and positions and positions < p.data.max_length:
        p = with_flags(p, [f"data.max_length={positions}"])
    run = workload_of(p, config, precision)
    if p.train.optimizer_in_backward:
        refuse_in_backward(run.setting.model, [math.ceil(run.micro_batches_per_step)])
    beyond_window = run.longest >= (attention_window(config) or math.inf)
    masked = beyond_window and p.bucket.mode != "packed"
    attention = attention_on(device, config, run.setting.model, masked=masked)
    headroom = p.estimate.headroom_percent
    memory = f"{readable_size(device.memory_bytes)}, less {device.headroom_text(headroom)}"
    yield f"device     {device.name}: {memory} ({reason})"
    yield f"model      {directory}: {config.model_type}, {config.get_text_config().num_hidden_layers} layers"
    train = f"{p.train.method}, {precision}, {p.train.optimizer}, grad_ckpt={str(p.train.grad_ckpt).lower()}"
    train += f", loss_chunk={p.train.loss_chunk or 'null'}"
    yield f"run        {train}, micro-batches of {describe(run.steps[-1][-1])}"
    yield f"attention  {attention}"
    for note in environment_notes(p.train.expandable_segments) if device.kind == "cuda" else ():
        yield f"note       {note}"
    prediction = predict(config, run.setting, run.steps, target_of(device))
    yield from _peaks(prediction)
    if prediction.offloaded_bytes:
        yield f"{p.train.offload_activations:<11}{readable_size(prediction.offloaded_bytes):>10}  activations there"
    if host_bytes := host_state_bytes(config, run.setting):
        yield f"host       {readable_size(host_bytes):>10}  optimizer there"
    yield from _verdict(run, prediction, device, p)
    inverse = turn_round(run, device, peak_bytes=prediction.peak.bytes, headroom_percent=headroom, positions=positions)
    yield f"smallest   {inverse.smallest_gpu or 'no known GPU is large enough'} (of the known GPUs, for this run)"
    yield f"longest    {_largest(inverse.longest_row)} in one row (data.max_length)"
    yield f"budget     {_largest(inverse.largest_max_tokens)} in a micro-batch (bucket.max_tokens)"


def find_model(name: str) -> Path:
    """The directory of a model's config.json.

    Args:
        name: the shipped model's name, a directory, or a path of a config.json.

    Raises:
        UserError: there is none.
    """
    path = TINY_DIRECTORY if name == TINY else Path(name).expanduser()
    directory = path.parent if path.name == CONFIG_FILE else path
    if not (directory / CONFIG_FILE).is_file():
        raise UserError(
            f"--model: must be {TINY}, a directory with {CONFIG_FILE}, or the path of a file of that name; "
            f"got {name!r}; a hub model's {CONFIG_FILE} alone is enough"
        )
    return directory


def workload_of(p: Params, config: PretrainedConfig, precision: Precision) -> Workload:
    """The run of params.yaml, its micro-batches full of the longest rows.

    Raises:
        UserError: rows are too long for the model, or cannot be joined.
    """
    length = round_up(p.data.max_length, p.bucket.pad_multiple)
    refuse_long_rows(config, length)
    if p.bucket.mode == "packed":
        refuse_joined_rows(config, length)
    shape = full_batch(p.bucket.mode, length, max_tokens=p.bucket.max_tokens, fixed_rows=p.bucket.fixed_rows)
    tokens = shape.rows * shape.length
    return Workload(
        config=config,
        setting=Setting.from_params(p, precision, several_turns=p.train.tokens_per_step > tokens * p.hardware.num_gpus),
        steps=largest_steps(shape, several=p.train.tokens_per_step > tokens * p.hardware.num_gpus),
        mode=p.bucket.mode,
        max_tokens=p.bucket.max_tokens,
        fixed_rows=p.bucket.fixed_rows,
        longest=length,
        tokens_per_step=max(p.train.tokens_per_step / p.hardware.num_gpus, length),
        micro_batches_per_step=max(1, math.ceil(p.train.tokens_per_step / tokens / p.hardware.num_gpus)),
        unpadded_tokens_per_step=p.train.tokens_per_step,
    )


def _peaks(prediction: Prediction) -> Iterator[str]:
    """A line per phase."""
    for phase, peak in prediction.by_phase.items():
        largest = sorted(peak.by_category.items(), key=lambda item: -item[1])[:3]
        parts = ", ".join(f"{category} {readable_size(size)}" for category, size in largest)
        yield f"{phase:<11}{readable_size(peak.bytes):>10}  {parts}"


def _verdict(run: Workload, prediction: Prediction, device: Device, p: Params) -> Iterator[str]:
    """Whether it fits, before anything is searched; then, where it does not, what would."""
    headroom = p.estimate.headroom_percent
    usable = usable_bytes(device, headroom)
    words = {"fits": "fits", "tight": f"fits with less than {headroom:g}% headroom", "does not fit": "does not fit"}
    verdict = judge(prediction, device, (), headroom_percent=headroom, enforce=p.estimate.enforce)
    yield f"verdict    {words[verdict.state]}: {readable_size(prediction.peak.bytes)} of {readable_size(usable)} usable"
    if verdict.fits:
        return

    def confirm(candidate: Candidate, peak_bytes: int) -> int | None:
        return _asked_again(p, candidate, device, run.config, peak_bytes)

    found = answer(run, prediction, device, p, confirm=confirm)
    yield f"advice     ranked {found.ranked}" if found.remedies else "advice     none found: choose a larger device"
    for remedy in found.remedies:
        yield f"  {remedy.command}"
        yield f"    {readable_size(remedy.peak_bytes)}, {remedy.slowdown:.2f}x time per token; {remedy.effect}"


def _asked_again(
    p: Params, candidate: Candidate, device: Device, config: PretrainedConfig, peak_bytes: int
) -> int | None:
    """The peak that is told of a changed run when its line is given; None where it does not fit or is refused.

    `peak_bytes` is that of the candidate's own micro-batches, which are mostly the same.
    """
    try:
        changed = with_flags(p, candidate.flags)
        run = workload_of(changed, config, precision_on(device, changed.train.precision)[0])
        if changed.train.optimizer_in_backward:
            refuse_in_backward(run.setting.model, [math.ceil(run.micro_batches_per_step)])
        if (run.setting, run.steps) != (candidate.run.setting, candidate.run.steps):
            peak_bytes = predict(config, run.setting, run.steps, target_of(device)).peak.bytes
    except UserError:
        return None
    return peak_bytes if peak_bytes <= usable_bytes(device, p.estimate.headroom_percent) else None


def _largest(found: Largest) -> str:
    """A largest size with what limits it."""
    if not found.value:
        return "not even the least"
    return f"{found.value} tokens" + (f", limited by {found.limit}" if found.limit else "")
