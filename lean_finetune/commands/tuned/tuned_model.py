"""Find, bound and load a tuned model: an adapter on its quantised base, or a full model."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from cuda_memory.units import readable_size
from lean_finetune.commands.tuned.tuned_files import (
    check_weights,
    named_by_option,
    object_in,
    read_adapter,
    refuse_reward_model,
)
from lean_finetune.config.field_types import ALL_LINEAR, Method
from lean_finetune.config.load import COMMON_PARAMS, load_params
from lean_finetune.config.schema import BaseWeights, Quant
from lean_finetune.core.errors import DoesNotFit, UsageFault, UserError
from lean_finetune.core.memory_limits import free_host_bytes
from lean_finetune.memory.advice.what_fits import LENGTH_STEP, largest_fitting
from lean_finetune.memory.devices import precision_on, resolve_gpu
from lean_finetune.memory.predict.evaluation_phases import GenerationShape, peak_of_answers
from lean_finetune.memory.predict.traced_step import TracedModel
from lean_finetune.memory.trace.cuda_kernels import target_of
from lean_finetune.memory.trace.fake_batches import TEXT_ALONE
from lean_finetune.memory.trace.known_images import KnownImages
from lean_finetune.memory.trace.setting import Setting
from lean_finetune.model.attention_choice import generation_attention
from lean_finetune.model.beside.parts import adapted_parts, other_copies
from lean_finetune.model.beside.whole_config import any_beside, whole_config
from lean_finetune.model.load_model import read_generation_config
from lean_finetune.model.model_config import max_positions, read_config
from lean_finetune.model.precision import BASE_WEIGHTS, base_weights_from
from lean_finetune.model.trained_rows import refuse_far_tokens, saved_token_ids
from lean_finetune.pinning.adapter_files import adapter_tensors
from lean_finetune.pinning.config_file import ADAPTER_CONFIG, refuse_no_model
from lean_finetune.pinning.hub import download, list_files
from lean_finetune.pinning.locate import FileVersions, versions_in
from lean_finetune.pinning.model_files import CONFIG_FILES, INDEX, shard_names
from lean_finetune.run.assets import Assets

METHODS: Mapping[str, Method] = {"4": "qlora", "8": "int8_lora", "16": "lora"}
"""How an adapter's base is stored, by bits."""
HEADROOM_PERCENT = 8.0


@dataclass(frozen=True, kw_only=True)
class TunedModel:
    """A tuned model on disk."""

    directory: Path
    """Tokenizer, and the adapter or the weights."""
    adapter: Mapping[str, Any] | None
    """adapter_config.json; None for a full model."""
    base: Path
    """Directory of the base's weights; `directory` for a full model."""
    weights: BaseWeights
    reason: str
    """Why the base is stored as `weights` says."""
    config: PretrainedConfig
    read: FileVersions
    """The files of `directory` and `base`, before any was read."""

    def refuse_change(self) -> None:
        """Raise UserError if a file was replaced meanwhile: what was read may be of two models."""
        with named_by_option():
            self.read.refuse_change("run the command again")

    def whole(self) -> "TunedModel":
        """The same, to be loaded with its parts beside decoder and head."""
        return replace(self, config=whole_config(self.config))

    def load(self, device: torch.device) -> nn.Module:
        """The model, ready to answer.

        Raises:
            UserError: weights are missing, do not fit, or changed.
        """
        with named_by_option():
            assets = Assets(directory=self.base, adapter=None if self.adapter is None else self.directory)
            model = assets.load(self.config, self.weights, device, generation_attention(self.config))
        self.refuse_change()
        return model

    @property
    def base_name(self) -> str:
        """The hub id or directory of the base; of a full model, its own directory."""
        return str((self.adapter or {}).get("base_model_name_or_path") or self.directory)

    @property
    def base_revision(self) -> str | None:
        """The base's commit on the hub; None for a directory."""
        return (self.adapter or {}).get("revision")

    def weight_files(self) -> list[str]:
        """Names of the base's files with config and weights."""
        names = [*CONFIG_FILES, INDEX, *shard_names(self.base)]
        return [name for name in names if (self.base / name).is_file()]

    @property
    def architecture(self) -> str:
        """The model's class; empty if config.json names none. It is written into files of other programs."""
        names = self.config.architectures
        first = names[0] if isinstance(names, list) and names else None
        return first if isinstance(first, str) and first.isidentifier() else ""

    @property
    def vocabulary(self) -> int | None:
        """Number of tokens for which the model has embeddings; None if its config does not say."""
        size = getattr(self.config.get_text_config(), "vocab_size", None)
        return max(size, 1 + max(saved_token_ids(self.adapter or {}), default=-1)) if isinstance(size, int) else None

    @property
    def positions(self) -> int | None:
        """Tokens that the model can read; None without a limit."""
        return max_positions(self.config)

    def _setting(self) -> Setting:
        """The setting of predictions."""
        adapter = self.adapter or {}
        tensors = [] if self.adapter is None else list(adapter_tensors(self.directory))
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
        stored = {name: getattr(self.weights, name) for name in BaseWeights.model_fields}
        parts = adapted_parts(tensors)
        return Setting(train=usual.model_copy(update={**stored, **parts, "lora": lora, "grad_ckpt": False}))

    def peak_bytes(self, *, rows: int, tokens: int, new_tokens: int, shown: KnownImages | None = None) -> int:
        """Predicted peak of answering `rows` prompts, each with its answer of `tokens` tokens, and `shown` in each."""
        device, _ = resolve_gpu("auto")
        fakes = TEXT_ALONE if shown is None else shown
        shape = GenerationShape(rows=rows, prompt_tokens=max(1, tokens - new_tokens), new_tokens=new_tokens)
        return peak_of_answers(TracedModel(self.config, self._setting(), target_of(device), fakes), shape).bytes

    def longest_that_fits(
        self, wanted: int, new_tokens: int, *, least: int = 0, shown: KnownImages | None = None
    ) -> int:
        """The most tokens of a prompt with its answer, at most `wanted`, whose predicted peak fits the free memory.

        A prompt has more than `least` tokens, those of what is `shown` in it.

        Raises:
            DoesNotFit: not even a short prompt fits.
        """
        free, where = free_bytes()
        peak = self.peak_bytes(rows=1, tokens=wanted, new_tokens=new_tokens, shown=shown)
        if peak <= free:
            return wanted
        shortest = new_tokens + least

        def peak_of(count: int) -> int:
            return self.peak_bytes(rows=1, tokens=shortest + count * LENGTH_STEP, new_tokens=new_tokens, shown=shown)

        most = (wanted - shortest) // LENGTH_STEP
        found = largest_fitting(peak_of, free, most, {most: peak}) if most > 0 else 0
        if found == 0:
            raise DoesNotFit(
                f"--model: {self.directory} with {wanted} tokens needs {readable_size(peak)} (predicted), and "
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


def find_tuned(directory: Path, bits: str | None) -> TunedModel:
    """The tuned model of a directory. The base of an adapter is fetched from the hub if it is not on this machine.

    `bits` stores an adapter's base in 4, 8 or 16 bits; None means as in training, or 4 if another program trained it.

    Raises:
        UserError: there is no model, or its base is gone.
    """
    read = versions_in(directory)
    if (directory / ADAPTER_CONFIG).is_file():
        adapter = read_adapter(directory)
        weights, reason = _adapter_weights(directory, bits)
        base = base_directory(adapter)
        read = FileVersions({**read.versions, **versions_in(base).versions})
        with named_by_option():
            config = read_config(base, whole=any_beside(adapter_tensors(directory)))
            refuse_far_tokens(directory, adapter, config)
            check_weights(base)
            read_generation_config(base)
        return TunedModel(
            directory=directory, adapter=adapter, base=base, weights=weights, reason=reason, config=config, read=read
        )
    refuse_no_model(directory)
    if bits is not None:
        raise UsageFault(f"--bits: has an effect only on an adapter's base; {directory} is a full model; leave it out")
    weights = _weights("full")
    with named_by_option():
        config = read_config(directory)
        refuse_reward_model(directory, any("SequenceClassification" in name for name in config.architectures or ()))
        check_weights(directory)
        read_generation_config(directory)
    return TunedModel(
        directory=directory,
        adapter=None,
        base=directory,
        weights=weights,
        reason="a full model",
        config=config,
        read=read,
    )


def _adapter_weights(directory: Path, bits: str | None) -> tuple[BaseWeights, str]:
    """How to store an adapter's base, and why."""
    if bits is not None:
        return _weights(METHODS[bits]), "--bits says so"
    if (directory / BASE_WEIGHTS).is_file():
        return _weights_in_training(directory / BASE_WEIGHTS), "as in training"
    return _weights("qlora"), "the default; --bits 8 or 16 for another"


def _weights_in_training(file: Path) -> BaseWeights:
    """How training stored the base, as `save_tuned` wrote it.

    Raises:
        UserError: the file has something else.
    """
    try:
        return base_weights_from(object_in(file))
    except ValueError:
        raise UserError(
            f"--model: {file}: must be as training wrote it; write it back, or remove it and set --bits"
        ) from None


def _weights(method: Method) -> BaseWeights:
    """Base weights by this method, in the precision that this machine's device computes best."""
    precision, _ = precision_on(resolve_gpu("auto")[0], "auto")
    return BaseWeights(method=method, quant=Quant(type="nf4", double=True), precision=precision)


def base_directory(adapter: Mapping[str, Any]) -> Path:
    """The directory of an adapter's base, with config and weights; of a hub id, they are downloaded.

    Raises:
        UserError: the hub cannot be reached, or has no such files.
    """
    name, revision = adapter["base_model_name_or_path"], adapter.get("revision")
    if os.path.isdir(name):
        return Path(name)
    commit, files = list_files("--model", name, "model", revision)
    fetch = partial(download, "--model", name, "model", commit)
    small = [file for file in (*CONFIG_FILES, INDEX) if file in files]
    return fetch([*small, *shard_names(fetch(small))])
