"""Merge adapters into the base, experts too."""

import math
import re
import shutil
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose, WeightConverter
from transformers.pytorch_utils import Conv1D

from lean_finetune.config.schema import BaseWeights
from lean_finetune.core.atomic_files import read_json, write_json
from lean_finetune.core.errors import UserError
from lean_finetune.core.optional_bitsandbytes import bnb
from lean_finetune.model.adapter_init import PEFT_PREFIX
from lean_finetune.model.adapters import take_experts
from lean_finetune.model.beside.whole_config import any_beside
from lean_finetune.model.empty_model import SCORE, conversions_in_model, meta_model, names_in_model, scoring_config
from lean_finetune.model.experts.expert_adapters import ExpertAdapter
from lean_finetune.model.experts.experts_forward import expert_modules, expert_parameters, is_transposed
from lean_finetune.model.files.finite_values import (
    NOT_FINITE,
    finite_tensors,
    is_sound,
    of_adapter,
    refuse_not_finite,
)
from lean_finetune.model.files.quantized_checkpoint import (
    BitsAndBytesWeight,
    file_tensors,
    stored_format,
    write_16_bit_config,
)
from lean_finetune.model.files.safetensors_files import TensorSpec, write_tensors
from lean_finetune.model.model_config import read_config
from lean_finetune.model.quantize import as_trained, quantisation, quantize_on_meta
from lean_finetune.model.trained_rows import DELTA, ids_of_layer, mean_row
from lean_finetune.pinning.adapter_config import AdaptedLayers
from lean_finetune.pinning.adapter_files import LORA, MERGE_FIRST, fault, read_adapter
from lean_finetune.pinning.config_file import ADAPTER_WEIGHTS, CONFIG_FILE
from lean_finetune.pinning.model_files import INDEX

STACKED_WHILE_LOADING = ([MergeModulelist], [MergeModulelist, Concatenate])
"""What transformers does with the tensors of one expert each: stack them, and join gate and up along their outputs."""


@dataclass(frozen=True, kw_only=True)
class ExpertPart:
    """What a tensor of a file is of a projection of all experts."""

    parameter: str
    """The projection's name in the model."""
    expert: int | None
    """The expert whose weight it is; None if it has those of all experts."""
    part: int = 0
    """Which part of the expert's outputs."""
    parts: int = 1
    """Number of tensors that an expert's outputs are divided among."""


def projections(model: PreTrainedModel) -> dict[str, Any]:
    """The projections of all experts by name, with their modules."""
    return {f"{path}.{name}": module for path, module in expert_modules(model) for name in expert_parameters(module)}


def expert_parts(keys: Iterable[str], model: PreTrainedModel) -> Mapping[str, ExpertPart]:
    """The tensors of a model's files that are weights of experts, by their names in the files.

    Those that transformers converts in another way are left out.
    """
    known = projections(model)
    found = {key: _part_of(key, *renamed) for key, renamed in conversions_in_model(model, keys).items()}
    return {key: part for key, part in found.items() if part is not None and part.parameter in known}


def _part_of(key: str, name: str, pattern: str | None, converter: WeightConverter | None) -> ExpertPart | None:
    """What a tensor of a file is, if it is a weight of experts; None if it is converted in another way."""
    if converter is None or _transposes_if_needed(converter):
        return ExpertPart(parameter=name, expert=None)
    expert = re.search(r"\.experts\.(\d+)\.", key)
    if [type(operation) for operation in converter.operations] not in STACKED_WHILE_LOADING or expert is None:
        return None
    part, parts = converter.source_patterns.index(str(pattern)), len(converter.source_patterns)
    return ExpertPart(parameter=name, expert=int(expert[1]), part=part, parts=parts)


def _transposes_if_needed(converter: WeightConverter) -> bool:
    """Whether transformers transposes the weights of experts whose shape is another than the model's (Qwen3-VL-MoE)."""
    (first, *more) = converter.operations
    return not more and isinstance(first, Transpose) and first.check_dims and {first.dim0, first.dim1} == {1, 2}


# Merge adapters into the weights of experts, one expert at a time, as the model's files store them.
#
# Shape legend: E experts, R rank, K inputs, N outputs.


class MergedExperts:
    """The tensors of a model's files that have weights of experts, with their rounding in training and adapters."""

    def __init__(
        self,
        stored: Mapping[str, Any],
        model: PreTrainedModel,
        weights: BaseWeights,
        adapters: Mapping[str, ExpertAdapter],
    ):
        """Find them; nothing is read yet.

        Args:
            stored: the tensors of the base model's files.
            model: on the meta device.
            weights: number format of the base in training.
            adapters: of the experts' projections, by name.
        """
        self._stored, self._spec, self._adapters = stored, weights, adapters
        self._packed = quantisation(weights) is not None
        self._modules = projections(model)
        self._parts = expert_parts(self._stored, model)
        self._sources: dict[tuple[str, int | None], list[str]] = defaultdict(list)
        for key, part in sorted(self._parts.items(), key=lambda item: item[1].part):
            self._sources[part.parameter, part.expert].append(key)
        self._last: tuple[tuple[str, int], torch.Tensor] | None = None

    @property
    def missing(self) -> list[str]:
        """Projections that the files do not have in full, in a form that is known here."""
        found: dict[str, Fraction] = defaultdict(Fraction)
        for part in self._parts.values():
            whole = part.parts * (1 if part.expert is None else self._modules[part.parameter].num_experts)
            found[part.parameter] += Fraction(1, whole)
        return sorted(name for name in self._modules if found[name] != 1)

    def __contains__(self, key: str) -> bool:
        """Whether a tensor of a file changes by merging."""
        part = self._parts.get(key)
        return part is not None and (self._packed or part.parameter in self._adapters)

    def merged(self, key: str) -> torch.Tensor:
        """The tensor for the merged file."""
        part, stored = self._parts[key], self._stored[key]
        if part.expert is None:
            merged = torch.empty(stored.shape, dtype=stored.dtype)
            transposed = stored.shape != self._shape(part.parameter)
            for expert in range(len(merged)):
                weight = stored.rows(expert, 1).read()[0]
                weight = self._with_adapter(part.parameter, expert, weight.t().contiguous() if transposed else weight)
                merged[expert] = weight.t() if transposed else weight
            return merged
        place = (part.parameter, part.expert)
        if self._last is None or self._last[0] != place:
            self._last = None
            sources = [self._stored[source].read() for source in self._sources[place]]
            self._last = place, self._with_adapter(*place, torch.cat(sources))
        weight = self._last[1]
        if part.parts == 1:
            self._last = None
        return weight.chunk(part.parts)[part.part].to(stored.dtype)

    def _shape(self, parameter: str) -> tuple[int, ...]:
        """The shape of a projection of all experts in the model."""
        return tuple(getattr(self._modules[parameter], parameter.rpartition(".")[2]).shape)

    def _with_adapter(self, parameter: str, expert: int, stored: torch.Tensor) -> torch.Tensor:
        """The weight of one expert, fp32, from its values in the files."""
        weight = as_trained(stored, self._spec, self._packed)
        if (adapter := self._adapters.get(parameter)) is not None:
            change_NK = adapter.change(expert)
            weight += change_NK.t() if is_transposed(self._modules[parameter]) else change_NK
        return weight


# Merge adapters into a model, read and written tensor by tensor, so that one weight is in memory at a time.
#
# Shape legend: a weight is N × K; adapters of rank R are A (R × K) and B (N × R).

SUFFIX = ".safetensors"
HEAD_OF_SCORES = f"{SCORE}.weight"
"""The head of a reward model in its file."""
MERGED_PARTS = ("A.weight", "B.weight", "magnitude_vector")
"""Ends of the names of an adapter's tensors."""
MERGED = "merged"
"""Subdirectory of the merged model, next to its adapter."""


class MergedWeights:
    """The tensors of a base's files with what an adapter changes in them, one in memory at a time."""

    def __init__(self, base: Path, adapter: Path, weights: BaseWeights):
        """Find them; weights are not read yet. Arguments and errors as of `write_merged`."""
        self._spec, self._adapter = weights, read_adapter(adapter)
        tensors = load_file(adapter / ADAPTER_WEIGHTS)
        refuse_not_finite(tensors.items(), of_adapter(adapter / ADAPTER_WEIGHTS))
        self.config = read_config(base, whole=any_beside(tensors))
        self._model, in_files = meta_model(self.config), file_tensors(base, self.config)
        self.stored = finite_tensors(in_files)
        packed = [name for name, one in in_files.items() if isinstance(one, BitsAndBytesWeight)]
        packed_layers = (name.removesuffix(".weight") for name in names_in_model(self._model, packed).values())
        self._quantised = _quantised_layers(self.config, weights).difference(packed_layers)
        self._experts = MergedExperts(self.stored, self._model, weights, take_experts(self.config, adapter, tensors))
        _refuse_unmerged(adapter, (key for key in tensors if LORA in key))
        others = {
            key.removeprefix(PEFT_PREFIX).replace(".base_layer.", "."): tensors.pop(key)
            for key in [*tensors]
            if LORA not in key
        }
        self._factors, self._layers = tensors, AdaptedLayers(self._adapter)
        self._rows = {f"{key.removesuffix(DELTA)}.weight": one for key, one in others.items() if key.endswith(DELTA)}
        whole = {key: tensor for key, tensor in others.items() if not key.endswith(DELTA)}
        self.score = {key: whole.pop(key) for key in [*whole] if key == HEAD_OF_SCORES}
        """The head of a reward model; others have none."""
        self._copies = whole
        self._transposed = {name for name, one in self._model.named_modules() if isinstance(one, Conv1D)}
        self.ids = {name: ids_of_layer(self._adapter, name.removesuffix(".weight")) for name in self._rows}
        """Trained tokens, by the name of their weight."""
        self._biases = {f"{name.removesuffix('.weight')}.bias": one for name, one in self.ids.items()}
        self._names: dict[str, str] = {}
        self.unmerged = {_layer(key) for key in tensors} | whole.keys() | self._rows.keys()
        """Weights that the adapter changes, and that were not asked for yet."""

    def specs(self, path: Path) -> dict[str, TensorSpec]:
        """What the tensors of a file become."""
        stored = {key: one for key, one in self.stored.items() if one.path == path}
        self._names |= names_in_model(self._model, stored)
        ids = {**self.ids, **self._biases}
        return {
            key: TensorSpec(dtype=one.dtype, shape=_shape_with_rows(one.shape, ids.get(self._names[key], [])))
            for key, one in stored.items()
        }

    def scores_as(self, dtype: torch.dtype) -> dict[str, TensorSpec]:
        """What the head of a reward model becomes in a type, for the file that it is added to."""
        self.score = {key: one.to(dtype) for key, one in self.score.items()}
        return {key: TensorSpec(dtype=dtype, shape=tuple(one.shape)) for key, one in self.score.items()}

    def merged(self, key: str) -> torch.Tensor:
        """A tensor of a file whose `specs` were asked for. Raises UserError if its values became too large."""
        tensor = self._merged(key)
        if not is_sound(key, tensor):
            kind = str(tensor.dtype).removeprefix("torch.")
            raise UserError(
                f"train.merge: {key} {NOT_FINITE} as {kind} once the adapter is merged; the adapter is damaged, or of "
                "another base: use it beside its base"
            )
        return tensor

    def _merged(self, key: str) -> torch.Tensor:
        if key in self.score:
            return self.score[key]
        if key in self._experts:
            return self._experts.merged(key)
        name, stored = self._names[key], self.stored[key]
        if name in self._biases:  # Of a head; new tokens have none.
            bias = stored.read()
            return F.pad(bias, (0, _shape_with_rows(tuple(bias.shape), self._biases[name])[0] - len(bias)))
        if name in self._rows:
            self.unmerged.remove(name)
            return _with_rows(stored.read(), self.ids[name], self._rows[name])
        if name in self._copies:  # That was trained (train.lora.modules_to_save).
            self.unmerged.remove(name)
            return self._copies[name].to(stored.dtype)
        layer, weight = name.removesuffix(".weight"), stored.read()
        if layer not in self._quantised and layer not in self.unmerged:
            return weight
        weight_NK = as_trained(weight, self._spec, layer in self._quantised)
        if layer in self.unmerged:
            is_KN = layer in self._transposed
            weight_NK = self._with_adapter(weight_NK.T if is_KN else weight_NK, layer)
            weight_NK = weight_NK.T.contiguous() if is_KN else weight_NK
            self.unmerged.remove(layer)
        return weight_NK.to(weight.dtype)

    def _with_adapter(self, weight_NK: torch.Tensor, layer: str) -> torch.Tensor:
        """The weight plus its adapter; with DoRA, rows scaled to their learnt norms."""
        key = f"{PEFT_PREFIX}{layer}.lora_"
        A_RK, B_NR = self._factors[f"{key}A.weight"].float(), self._factors[f"{key}B.weight"].float()
        rank, alpha = len(A_RK), self._layers.alpha(layer)
        scale = alpha / (math.sqrt(rank) if self._adapter.get("use_rslora") else rank)
        merged_NK = weight_NK + scale * (B_NR @ A_RK)
        lengths_N = self._factors.get(f"{key}magnitude_vector")
        if lengths_N is None:
            return merged_NK
        return merged_NK * (lengths_N.float() / torch.linalg.norm(merged_NK, dim=1))[:, None]


def write_merged(base: Path, files: Iterable[str], adapter: Path, weights: BaseWeights, out: Path) -> None:
    """Write the merged model to `out` in the types of the base's files; weights that are quantised there in bf16.

    Weights that training quantised while loading are quantised and dequantised here too: the adapters learnt to
    correct that error, which the original weights do not have.

    Args:
        base: the base model's directory.
        files: files to merge or copy: weights, config.
        adapter: directory of the saved adapter.
        weights: number format of the base in training.
        out: an existing directory.

    Raises:
        UserError: the base has no weight for an adapter, or a weight has NaN or infinite values.
    """
    tensors = MergedWeights(base, adapter, weights)
    first_file = min((name for name in files if name.endswith(SUFFIX)), default="")
    for name in sorted(files):
        if not name.endswith(SUFFIX):
            shutil.copyfile(base / name, out / name)
            continue
        specs = tensors.specs(base / name)
        if name == first_file:
            dtype = next((spec.dtype for spec in specs.values() if spec.dtype.is_floating_point), torch.float32)
            specs |= tensors.scores_as(dtype)
        write_tensors(out / name, specs, tensors.merged)
    if tensors.score:
        _write_reward_model(out, tensors.config, first_file)
    if tensors.ids:
        _write_vocabulary(out / CONFIG_FILE, 1 + max(max(one) for one in tensors.ids.values()))
    if stored_format(tensors.config) is not None:
        write_16_bit_config(out, tensors.stored)
    if tensors.unmerged:
        raise UserError(
            f"train.merge: {base} has no weight for {sorted(tensors.unmerged)[0]}, which has an adapter; set "
            "train.merge=false"
        )


def _write_reward_model(out: Path, config: PretrainedConfig, file: str) -> None:
    """Make the config that of a reward model, and list its head, which is in `file`, in the index of several files."""
    label = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    path, index = out / CONFIG_FILE, out / INDEX
    write_json(
        path, {**read_json(path), **label, "architectures": scoring_config(config).architectures}, sort_keys=False
    )
    if index.exists():
        listed = read_json(index)
        listed["weight_map"][HEAD_OF_SCORES] = file
        write_json(index, listed, sort_keys=False)


def _shape_with_rows(shape: tuple[int, ...], ids: Sequence[int]) -> tuple[int, ...]:
    """The shape of a weight with rows for all ids."""
    return (max(shape[0], max(ids) + 1), *shape[1:]) if ids else shape


def _with_rows(weight_VD: torch.Tensor, ids: Sequence[int], delta_nD: torch.Tensor) -> torch.Tensor:
    """The embedding with its trained rows; between them and the old ones, the mean of these."""
    before = len(weight_VD)
    if (rows := max(ids) + 1) > before:
        added = mean_row(weight_VD).to(weight_VD.dtype).expand(rows - before, -1)
        weight_VD = torch.cat([weight_VD, added])
    weight_VD[list(ids)] = delta_nD.to(weight_VD.dtype)
    return weight_VD


def _write_vocabulary(path: Path, rows: int) -> None:
    """Set the number of embeddings in a config.json, if it has fewer."""
    config = read_json(path)
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    if text.get("vocab_size", 0) < rows:
        text["vocab_size"] = rows
        write_json(path, config, sort_keys=False)


def refuse_merge(base: Path, weights: BaseWeights, *, experts: bool) -> None:
    """Refuse to merge into experts that training packs or adapts, if the files have them in an unknown form.

    Args:
        base: the base model's directory.
        weights: number format of the base in training.
        experts: whether they have adapters.

    Raises:
        UserError: naming the remedy.
    """
    config = read_config(base)
    if (experts or quantisation(weights) is not None) and (
        missing := MergedExperts(file_tensors(base, config), meta_model(config), weights, {}).missing
    ):
        raise UserError(
            f"train.merge: the files of {config.model_type} have {missing[0]} in a form that cannot be merged; got "
            "true; set it to false"
        )


def _layer(key: str) -> str:
    """The adapted layer of a tensor in an adapter's file."""
    return key.removeprefix(PEFT_PREFIX).partition(LORA)[0]


def _quantised_layers(config: PretrainedConfig, weights: BaseWeights) -> set[str]:
    """Names of the layers that training quantises."""
    if quantisation(weights) is None:
        return set()
    model = meta_model(config)
    quantize_on_meta(model, weights)
    kinds = (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt)
    return {name for name, module in model.named_modules() if isinstance(module, kinds)}


def _refuse_unmerged(directory: Path, tensors: Iterable[str]) -> None:
    """Raise UserError if an adapter has tensors that are not merged here, such as those of an adapted embedding."""
    for name in tensors:
        if name.partition(LORA)[2] not in MERGED_PARTS:
            raise fault(directory / ADAPTER_WEIGHTS, f"has {name}, which is not merged here", MERGE_FIRST)
