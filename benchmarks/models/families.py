"""What works with a small model of every family of causal language models, and what is refused with which reason."""

from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

from benchmarks.harness import Row
from lean_finetune.config.field_types import Method, Sharding
from lean_finetune.core.atomic_files import write_json
from lean_finetune.core.errors import UserError
from lean_finetune.memory.devices import resolve_gpu
from lean_finetune.memory.predict.peak import predict
from lean_finetune.memory.predict.traced_step import TracedModel, TracedSteps
from lean_finetune.memory.trace.cuda_kernels import target_of
from lean_finetune.memory.trace.setting import Setting
from lean_finetune.model.empty_model import meta_model
from lean_finetune.model.merge_adapters import refuse_merge
from lean_finetune.model.model_config import UNREADABLE, read_config, refuse_packed_rows
from lean_finetune.step.loss import check_head, check_packed_rows
from tests.kit.loaded import load_model
from tests.kit.specs import changed, joined, padded, train_of
from tests.kit.tiny_config import small_timm_models, tiny_config

CPU = torch.device("cpu")
TARGET = target_of(resolve_gpu("A100-80GB")[0])
LENGTH = 32
PADDED: TracedSteps = ((padded(1, LENGTH, LENGTH - 1),),)
JOINED: TracedSteps = ((joined((LENGTH // 2, LENGTH // 2), LENGTH - 2),),)
METHODS: tuple[Method, ...] = ("full", "lora", "qlora", "int8_lora")
MOST_PARAMETERS = 3e8
"""Larger models, whose parts for images have no small sizes here, are traced but not loaded."""
LOADED = train_of("full", "fp32", grad_ckpt=False)


def outcome(family: str) -> Row:
    """The checks of a family that pass, and those that are refused by reason.

    Raises:
        Exception: one that is no refusal, so a fault of ours.
    """
    works: list[str] = []
    refused: dict[str, list[str]] = {}
    with TemporaryDirectory() as scratch:
        directory = Path(scratch)
        _write_config(family, directory)
        for name, check in _checks(directory).items():
            try:
                check()
                works.append(name)
            except UserError as error:
                refused.setdefault(str(error).replace(f"{directory}/", ""), []).append(name)
            if name == METHODS[-1] and not works:
                break
    return {"family": family, "works": works, "refused": refused}


def _write_config(family: str, directory: Path) -> None:
    """Write the config of a small model; of a family whose sizes have other names, one without sizes."""
    try:
        tiny_config(family).to_json_file(directory / "config.json", use_diff=False)
    except (*UNREADABLE, NotImplementedError):
        write_json(directory / "config.json", {"model_type": family})


def _checks(directory: Path) -> Mapping[str, Callable[[], None]]:
    """Everything that is tried with a model, by name; each raises UserError if it is refused."""

    @cache
    def model() -> nn.Module | None:
        config = read_config(directory)
        if meta_model(config).num_parameters() > MOST_PARAMETERS:
            return None
        torch.manual_seed(0)
        kind = AutoModelForMultimodalLM if "text_config" in config.sub_configs else AutoModelForCausalLM
        with small_timm_models():
            kind.from_config(config).save_pretrained(directory)
        loaded = load_model(directory, LOADED, CPU)
        check_head(loaded, CPU)
        return loaded

    def train(method: Method, *, grad_ckpt: bool = False) -> None:
        predict(TracedModel(read_config(directory), _setting(method, grad_ckpt=grad_ckpt), TARGET), PADDED)
        model()

    def packed() -> None:
        config = read_config(directory)
        refuse_packed_rows(config, LENGTH // 2)
        predict(TracedModel(config, _setting("full"), TARGET), JOINED)
        if (loaded := model()) is not None:
            check_packed_rows(loaded, CPU)

    def zero3() -> None:
        for method in METHODS[::2]:
            predict(TracedModel(read_config(directory), _setting(method, gpus=2, sharding="zero3"), TARGET), PADDED)

    def merge(method: Method) -> None:
        if model() is not None:
            refuse_merge(directory, train_of(method), experts=False)

    methods: dict[str, Callable[[], None]] = {method: partial(train, method) for method in METHODS}
    merges = {f"merge_{method}": partial(merge, method) for method in ("lora", "qlora")}
    return {**methods, "grad_ckpt": partial(train, "full", grad_ckpt=True), "packed": packed, "zero3": zero3, **merges}


def _setting(method: Method, *, grad_ckpt: bool = False, gpus: int = 1, sharding: Sharding = "none") -> Setting:
    """A setting of the check of a method."""
    spec = train_of(method, grad_ckpt=grad_ckpt, rank=4, sharding=sharding)
    return Setting(train=changed(spec, optimizer="adamw", loss_chunk=LENGTH, max_grad_norm=1.0), gpus=gpus)
