"""The command `lean-finetune fit`: whether a run fits a GPU, from a config.json alone."""

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from transformers import PretrainedConfig

from lean_finetune.config.field_types import Precision
from lean_finetune.config.overrides import with_flags
from lean_finetune.config.schema import Params, round_up
from lean_finetune.core.errors import UserError
from lean_finetune.core.units import readable_size
from lean_finetune.memory.advice.largest_that_fits import LENGTH_STEP, Largest, find_limits
from lean_finetune.memory.advice.search_space import Candidate
from lean_finetune.memory.advice.verdict import answer, describe, judge
from lean_finetune.memory.advice.workload import Workload, full_batch, largest_steps
from lean_finetune.memory.devices import attention_on, experts_on, precision_on, resolve_gpu
from lean_finetune.memory.gpus import Device
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
LABEL_WIDTH = 21
LARGEST_PARTS = 3
VERDICTS = {"fits": "fits", "tight": "fits, but with less headroom than asked for", "does not fit": "does not fit"}


def fit_report(p: Params, gpu: str | None, model: Path | None, *, shorten: bool = False) -> Iterator[str]:
    """The lines of the answer, each as soon as it is known.

    The run is that of params.yaml with every micro-batch full of rows of data.max_length, all of their tokens trained.
    `gpu` replaces hardware.gpu; `model`, a directory or a config.json, replaces model.name. `shorten` lowers
    data.max_length to the positions of the model.

    Raises:
        UserError: the device, the model or a parameter does not work.
    """
    torch.set_num_threads(p.run.cpu_threads or torch.get_num_threads())
    device, reason = resolve_gpu(gpu or p.hardware.gpu)
    precision, _ = precision_on(device, p.train.precision)
    refuse_offload(p.train.offload_activations, device.kind)
    refuse_offloaded_state(p.train.offload, device.kind)
    directory = find_model(p.model.name if model is None else str(model))
    config = read_config(directory)
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if shorten and positions and positions < p.data.max_length:
        p = with_flags(p, [f"data.max_length={positions}"])
    run = workload_of(p, config, precision)
    if p.train.optimizer_in_backward:
        refuse_in_backward(run.setting.model, [math.ceil(run.micro_batches_per_step)])
    headroom = p.estimate.headroom_percent
    usable = f"less {device.headroom_text(headroom)}: {readable_size(device.usable_bytes(headroom))} usable"
    yield labelled("device", f"{device.name}: {readable_size(device.memory_bytes)}, {usable} ({reason})")
    yield labelled("model", f"{directory}: {config.model_type}, {config.get_text_config().num_hidden_layers} layers")
    yield from _run_lines(p, run, device)
    prediction = predict(config, run.setting, run.steps, target_of(device))
    yield from _peak_lines(p, run, prediction)
    yield from _verdict_lines(run, prediction, device, p)
    limits = find_limits(run, device, peak_bytes=prediction.peak.bytes, headroom_percent=headroom, positions=positions)
    smallest = limits.smallest_gpu or "none is large enough"
    yield labelled("smallest GPU", f"{smallest} (of the known GPUs, for this run)")
    yield labelled("longest row", _tokens(limits.longest_row) or f"not even {LENGTH_STEP} tokens fit")
    batch = _tokens(limits.largest_max_tokens) or f"not even one row of {run.longest} tokens fits"
    yield labelled("largest micro-batch", batch)


def labelled(label: str, text: str) -> str:
    """A labelled line of the answer."""
    return f"{label:<{LABEL_WIDTH}}{text}"


def find_model(name: str) -> Path:
    """The directory of a model's config.json; `name` is `tiny`, a directory, or the path of a config.json.

    Raises:
        UserError: there is no such file.
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
    """The run of params.yaml with every micro-batch full of rows of data.max_length.

    Raises:
        UserError: rows are too long for the model, or it does not support packed rows.
    """
    length = round_up(p.data.max_length, p.bucket.pad_multiple)
    refuse_long_rows(config, length)
    if p.bucket.mode == "packed":
        refuse_joined_rows(config, length)
    shape = full_batch(p.bucket.mode, length, max_tokens=p.bucket.max_tokens, fixed_rows=p.bucket.fixed_rows)
    tokens = shape.rows * shape.length
    several = p.train.tokens_per_step > tokens * p.hardware.num_gpus
    return Workload(
        config=config,
        setting=Setting.from_params(p, precision, accumulates_gradients=several),
        steps=largest_steps(shape, several=several),
        mode=p.bucket.mode,
        max_tokens=p.bucket.max_tokens,
        fixed_rows=p.bucket.fixed_rows,
        longest=length,
        tokens_per_step=max(p.train.tokens_per_step / p.hardware.num_gpus, length),
        micro_batches_per_step=max(1, math.ceil(p.train.tokens_per_step / tokens / p.hardware.num_gpus)),
        unpadded_tokens_per_step=p.train.tokens_per_step,
    )


def _run_lines(p: Params, run: Workload, device: Device) -> Iterator[str]:
    """What is trained and how."""
    model, train = run.setting.model, p.train
    beyond_window = run.longest >= (attention_window(run.config) or math.inf)
    attention = attention_on(device, run.config, model, masked=beyond_window and p.bucket.mode != "packed")
    grad_ckpt, chunk = str(train.grad_ckpt).lower(), train.loss_chunk or "null"
    text = f"{model.method}, {model.precision}, {train.optimizer}, grad_ckpt={grad_ckpt}, loss_chunk={chunk}"
    yield labelled("run", f"{text}, micro-batches of {describe(run.steps[-1][-1])}")
    yield labelled("attention", attention)
    if (experts := experts_on(device, run.config, model)) is not None:
        yield labelled("experts", experts)
    for note in environment_notes(train.expandable_segments) if device.kind == "cuda" else ():
        yield labelled("note", note)


def _peak_lines(p: Params, run: Workload, prediction: Prediction) -> Iterator[str]:
    """The peak of each phase with its largest parts, and memory of the host."""
    for phase, peak in prediction.by_phase.items():
        largest = sorted(peak.by_category.items(), key=lambda item: -item[1])[:LARGEST_PARTS]
        parts = ", ".join(f"{category} {readable_size(size)}" for category, size in largest)
        yield labelled(f"peak in {phase}", f"{readable_size(peak.bytes):>10}: {parts}")
    if prediction.offloaded_bytes:
        where = {"cpu": "in host memory", "disk": "on disk"}[p.train.offload_activations]
        yield labelled(where, f"{readable_size(prediction.offloaded_bytes):>10}: activations")
    if host_bytes := host_state_bytes(run.config, run.setting):
        yield labelled("in host memory", f"{readable_size(host_bytes):>10}: optimizer")


def _verdict_lines(run: Workload, prediction: Prediction, device: Device, p: Params) -> Iterator[str]:
    """The verdict, and if the run does not fit, the settings that do. The verdict comes before the search for them."""
    headroom = p.estimate.headroom_percent
    verdict = judge(prediction, device, (), headroom_percent=headroom, enforce=p.estimate.enforce)
    usable = readable_size(device.usable_bytes(headroom))
    yield labelled(
        "verdict", f"{VERDICTS[verdict.state]}: peak {readable_size(prediction.peak.bytes)}, usable {usable}"
    )
    if verdict.fits:
        return

    found = answer(run, prediction, device, p, confirm=partial(_confirmed_peak, p, device))
    if not found.remedies:
        yield labelled("advice", "no settings found that fit: choose a larger device")
        return
    yield labelled("advice", f"settings that fit, ranked {found.ranked}")
    for remedy in found.remedies:
        yield f"  {remedy.command}"
        yield f"    peak {readable_size(remedy.peak_bytes)}, {remedy.slowdown:.2f}x time per token; {remedy.effect}"


def _confirmed_peak(p: Params, device: Device, candidate: Candidate, peak_bytes: int) -> int | None:
    """The peak that this command reports for a candidate's overrides; None if they do not fit or are refused.

    `peak_bytes` is the peak of the candidate's own micro-batches, which are mostly the same.
    """
    try:
        changed, config = with_flags(p, candidate.flags), candidate.run.config
        run = workload_of(changed, config, precision_on(device, changed.train.precision)[0])
        if changed.train.optimizer_in_backward:
            refuse_in_backward(run.setting.model, [math.ceil(run.micro_batches_per_step)])
        if (run.setting, run.steps) != (candidate.run.setting, candidate.run.steps):
            peak_bytes = predict(config, run.setting, run.steps, target_of(device)).peak.bytes
    except UserError:
        return None
    return peak_bytes if peak_bytes <= device.usable_bytes(p.estimate.headroom_percent) else None


def _tokens(found: Largest) -> str:
    """A largest size, with the limit that it reaches if that is not memory; empty if nothing fits."""
    return f"{found.value} tokens{f' (= {found.limit})' if found.limit else ''}" if found.value else ""
