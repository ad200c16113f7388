"""What a model can do on a device: each method, kind of rows, switch and mode is tried with few of its layers."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import get_args

from transformers import PretrainedConfig

from cuda_memory.gpus import GIGA, Device
from lean_finetune.config.field_types import Method
from lean_finetune.config.load import with_flags
from lean_finetune.config.schema import Params
from lean_finetune.core.errors import UserError
from lean_finetune.islands.objectives.registry import OBJECTIVES
from lean_finetune.memory.advice.full_rows import full_rows_run
from lean_finetune.memory.advice.run import Run
from lean_finetune.memory.advice.run_notes import layers_note, not_loaded
from lean_finetune.memory.predict.assumed_images import REFUSALS
from lean_finetune.memory.predict.layer_repetition import find_repetition, with_layers
from lean_finetune.memory.switches.all_switches import with_method
from lean_finetune.memory.switches.switch import Values, flags_of
from lean_finetune.model.empty_model import meta_model
from lean_finetune.model.experts.experts_forward import has_experts
from lean_finetune.model.model_config import max_positions, refuse_packed_rows

TOKENS = 256
"""Of a row in a trial."""
METHODS: Mapping[str, Values] = {method: with_method(method) for method in get_args(Method)}
SWITCHES: Mapping[str, Values] = {
    "grad_ckpt": {"train.grad_ckpt": True},
    "selective grad_ckpt": {"train.grad_ckpt": True, "train.grad_ckpt_policy": "selective"},
    "sequence_tiles": {"train.sequence_tiles": 2},
    "compress_activations": {"train.compress_activations": "int8"},
    "offload_activations": {"train.offload_activations": "cpu"},
    "fused_kernels": {"train.fused_kernels": "auto"},
}
"""Switches that depend on the model's code."""
EXPERTS: Mapping[str, Values] = {"lora.experts": {"train.lora.experts": "all"}, "router": {"train.router": "trained"}}
"""Those of models with experts."""
MODES: Mapping[str, Values] = {
    **{mode: {"train.sharding": mode} for mode in ("ddp", "zero1", "zero2", "zero3")},
    "tensor_parallel": {"train.tensor_parallel": 2},
    "context_parallel": {"train.context_parallel": 2, "train.sharding": "ddp"},
    "pipeline_stages": {"train.pipeline_stages": 2},
}
"""Ways to share a run between two GPUs."""


@dataclass(frozen=True, kw_only=True)
class Ability:
    """What a model can do of one kind."""

    what: str
    works: tuple[str, ...]
    refused: Mapping[str, tuple[str, ...]]
    """Names by reason."""


def described(run: Run) -> Iterator[tuple[str, str]]:
    """What is known of a model without a trial: its size, its parts, and the kernels that it has on the device."""
    config = run.config
    text = config.get_text_config()
    model = meta_model(config)
    sizes = f"{model.num_parameters() / GIGA:.3g} B parameters in {text.num_hidden_layers} layers"
    positions = max_positions(config)
    yield "model", f"{config.model_type}, {sizes}" + (f", {positions:,} positions" if positions else "")
    if (others := not_loaded(run)) is not None:
        yield "rows of text", f"a run neither loads nor trains {others}"
    yield "device", f"{run.device.name}, {run.setting.train.precision}"
    yield "attention", run.attention
    for what, kernels in (("experts", run.experts), ("recurrent", run.linear_attention)):
        if kernels is not None:
            yield what, kernels
    if (note := layers_note(run)) is not None:
        yield "adapters", note


def abilities(p: Params, config: PretrainedConfig, device: Device) -> Iterator[Ability]:
    """Try everything with short rows. `p`: the parameters of a usual run of the model."""
    length = min(TOKENS, max_positions(config) or TOKENS)
    p = with_flags(p, [f"data.max_length={length}", f"bucket.max_tokens={length}", f"train.tokens_per_step={length}"])
    small = few_layers(config, p)
    works = _tried("methods", {name: partial(_train, p, small, device, values) for name, values in METHODS.items()})
    yield works
    if not works.works:
        return
    method = next((METHODS[name] for name in ("lora", "qlora") if name in works.works), METHODS[works.works[0]])

    def trials(variants: Mapping[str, Values]) -> dict[str, Callable[[], object]]:
        return {name: partial(_train, p, small, device, {**method, **values}) for name, values in variants.items()}

    objectives = {name: {"train.objective": name, **objective.off} for name, objective in OBJECTIVES.items()}
    yield _tried("objectives", trials(objectives))
    packed = {**method, "bucket.mode": "packed"}
    rows: dict[str, Callable[[], object]] = {
        "text": partial(_train, p, small, device, method),
        "packed text": partial(_pack, p, small, device, packed),
    }
    yield _tried("rows", {**rows, **{name: partial(refuse, p, config) for name, refuse in REFUSALS.items()}})
    yield _tried("switches", trials({**SWITCHES, **(EXPERTS if has_experts(meta_model(small)) else {})}))
    yield _tried("several GPUs", trials({name: {"hardware.num_gpus": 2, **values} for name, values in MODES.items()}))


def few_layers(config: PretrainedConfig, p: Params) -> PretrainedConfig:
    """The config of a model with the same kinds of layers, each kind in the same order, and as few as possible."""
    repetition, _ = find_repetition(config, p.train)
    return config if repetition is None else with_layers(config, max(repetition.depths[0], 2))


def _train(p: Params, config: PretrainedConfig, device: Device, values: Values) -> Run:
    """Trace a training step."""
    run = full_rows_run(with_flags(p, flags_of(values)), config, device)
    _ = run.attention  # Refuses a kernel that cannot run on the device.
    run.predict()
    return run


def _pack(p: Params, config: PretrainedConfig, device: Device, values: Values) -> None:
    refuse_packed_rows(config, p.data.max_length)
    _train(p, config, device, values)


def _tried(what: str, trials: Mapping[str, Callable[[], object]]) -> Ability:
    works: list[str] = []
    refused: dict[str, tuple[str, ...]] = {}
    for name, trial in trials.items():
        try:
            trial()
            works.append(name)
        except UserError as error:
            refused[str(error)] = (*refused.get(str(error), ()), name)
    return Ability(what=what, works=tuple(works), refused=refused)
