"""The memory of a tuned model's answers, and how long they may be on this machine."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from cuda_memory.units import readable_size
from lean_finetune.commands.tuned.tuned_model import TunedModel
from lean_finetune.config.field_types import ALL_LINEAR
from lean_finetune.config.load import COMMON_PARAMS, load_params
from lean_finetune.config.schema import BaseWeights
from lean_finetune.core.errors import DoesNotFit
from lean_finetune.core.memory_limits import free_host_bytes
from lean_finetune.memory.advice.what_fits import LENGTH_STEP, largest_fitting
from lean_finetune.memory.devices import resolve_gpu
from lean_finetune.memory.predict.evaluation_phases import GenerationShape, peak_of_answers
from lean_finetune.memory.predict.traced_step import TracedModel
from lean_finetune.memory.trace.cuda_kernels import target_of
from lean_finetune.memory.trace.fake_batches import TEXT_ALONE
from lean_finetune.memory.trace.known_images import KnownImages
from lean_finetune.memory.trace.setting import Setting
from lean_finetune.model.beside.parts import adapted_parts, other_copies
from lean_finetune.model.trained_rows import saved_token_ids
from lean_finetune.pinning.adapter_files import adapter_tensors

HEADROOM_PERCENT = 8.0


def _setting(tuned: TunedModel) -> Setting:
    """The setting of predictions."""
    adapter = tuned.adapter or {}
    tensors = [] if tuned.adapter is None else list(adapter_tensors(tuned.directory))
    experts = adapter.get("rank_pattern") if adapter.get("target_parameters") else None
    usual = load_params(COMMON_PARAMS).train
    lora = usual.lora.model_copy(
        update={
            "rank": adapter.get("r", 1),
            "alpha": adapter.get("lora_alpha", 1),
            "targets": _adapted_names(tensors, adapter) or [ALL_LINEAR],
            "rslora": adapter.get("use_rslora", False),
            "dora": adapter.get("use_dora", False),
            "modules_to_save": other_copies(adapter, tensors),
            "trainable_tokens": saved_token_ids(adapter),
            "experts": "all" if experts else "none",
            "expert_rank": next(iter(experts.values())) if experts else 1,
        }
    )
    stored = {name: getattr(tuned.weights, name) for name in BaseWeights.model_fields}
    parts = adapted_parts(tensors)
    return Setting(train=usual.model_copy(update={**stored, **parts, "lora": lora, "grad_ckpt": False}))


def answer_bytes(
    tuned: TunedModel, *, rows: int, tokens: int, new_tokens: int, shown: KnownImages | None = None
) -> int:
    """Predicted peak of answering `rows` prompts, each with its answer of `tokens` tokens, and `shown` in each."""
    device, _ = resolve_gpu("auto")
    fakes = TEXT_ALONE if shown is None else shown
    shape = GenerationShape(rows=rows, prompt_tokens=max(1, tokens - new_tokens), new_tokens=new_tokens)
    return peak_of_answers(TracedModel(tuned.config, _setting(tuned), target_of(device), fakes), shape).bytes


def longest_that_fits(
    tuned: TunedModel, wanted: int, new_tokens: int, *, least: int = 0, shown: KnownImages | None = None
) -> int:
    """The most tokens of a prompt with its answer, at most `wanted`, whose predicted peak fits the free memory.

    A prompt has more than `least` tokens, those of what is `shown` in it.

    Raises:
        DoesNotFit: not even a short prompt fits.
    """
    free, where = free_bytes()
    peak = answer_bytes(tuned, rows=1, tokens=wanted, new_tokens=new_tokens, shown=shown)
    if peak <= free:
        return wanted
    shortest = new_tokens + least

    def peak_of(count: int) -> int:
        return answer_bytes(tuned, rows=1, tokens=shortest + count * LENGTH_STEP, new_tokens=new_tokens, shown=shown)

    most = (wanted - shortest) // LENGTH_STEP
    found = largest_fitting(peak_of, free, most, {most: peak}) if most > 0 else 0
    if found == 0:
        raise DoesNotFit(
            f"--model: {tuned.directory} with {wanted} tokens needs {readable_size(peak)} (predicted), and "
            f"{readable_size(free)} are free {where}; free memory, lower --length or --max-new-tokens, or store "
            "the base in fewer bits with --bits 4"
        )
    return shortest + found * LENGTH_STEP


def _adapted_names(tensors: Iterable[str], adapter: Mapping[str, Any]) -> list[str]:
    """What names the layers with adapters, as train.lora.targets: the ends of their paths, of two parts.

    `target_modules` also has names of layers without one, such as those of frozen parts beside the decoder.
    """
    experts = tuple(name.rpartition(".")[0] for name in adapter.get("target_parameters") or ())
    names = set()
    for tensor in tensors:
        path, is_adapter, _ = tensor.replace(".base_layer", "").partition(".lora_A.")
        if is_adapter and not (experts and path.endswith(experts)):
            *_, parent, name = ("", *path.split("."))
            names.add(name if parent.isdigit() or not parent else f"{parent}.{name}")
    return sorted(names)


def free_bytes() -> tuple[int, str]:
    """Free memory of the device that would answer, less headroom, and where it is."""
    device, _ = resolve_gpu("auto")
    if device.kind == "cuda":
        free = torch.cuda.mem_get_info()[0]
        return min(free, device.usable_bytes(HEADROOM_PERCENT)), f"on {device.name}"
    free, where = free_host_bytes()
    return int(free * (1 - HEADROOM_PERCENT / 100)), where
