"""The language model inside a multimodal checkpoint: the full model's class without its vision and audio parts.

The model is built by the family's own class, and every part that text never reaches is then left out. So parameters
have the names of the full model, an adapter loads into it, and a saved model only lacks the tensors of those parts,
which are copied from the original files.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForMultimodalLM, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nModel
from transformers.models.timm_wrapper.modeling_timm_wrapper import TimmWrapperModel

from lean_finetune.model.files.safetensors_files import FileTensor


class LanguagePart:
    """Mixed into the class of a multimodal model: leaves out all parts but the decoder and its head."""

    left_out: dict[str, int]
    """Parameters of each part that is left out, by the part's name; 0 if they are unknown."""

    def __init__(self, config: PretrainedConfig, *args: Any, **kwargs: Any):
        with _no_timm_models():
            super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        self.left_out = dict(_leave_out(self))  # type: ignore[arg-type]
        known = getattr(self, "_keys_to_ignore_on_load_unexpected", None) or ()
        self._keys_to_ignore_on_load_unexpected = {*known, *(f"^{re.escape(part)}" for part in self.left_out)}
        for module in self.modules():  # type: ignore[attr-defined]
            if type(module) is Gemma3nModel:
                module.__class__ = _Gemma3nOfText


class _Gemma3nOfText(Gemma3nModel):
    """Gemma 3n's model, which otherwise embeds every token as one of images and of sound too."""

    def forward(self, input_ids: torch.Tensor | None = None, **arguments: Any) -> Any:
        if input_ids is not None:
            arguments["inputs_embeds"] = self.get_input_embeddings()(input_ids)
            arguments["per_layer_inputs"] = self.language_model.get_per_layer_inputs(input_ids)
        return super().forward(**arguments)


def is_multimodal(config: PretrainedConfig) -> bool:
    """Whether transformers has a class for this config that takes images or sound as well as text."""
    return type(config) in AutoModelForMultimodalLM._model_mapping


@contextmanager
def _no_timm_models() -> Iterator[None]:
    """A context that builds models of the package timm without layers: Gemma 3n's vision part, which is left out."""
    kind: Any = TimmWrapperModel
    before = kind.__init__
    kind.__init__ = PreTrainedModel.__init__
    try:
        yield
    finally:
        kind.__init__ = before


def _leave_out(model: PreTrainedModel) -> Iterator[tuple[str, int]]:
    """Remove the parts that text never reaches; yield their names and numbers of parameters."""
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    if decoder is not None and head in decoder.modules():  # Refused by `refuse_other_heads`.
        return
    ends = [part for part in (decoder, head) if part is not None]
    names = [name for name, module in model.named_modules() if any(module is end for end in ends)]
    on_path = {"", *(name[: match.start()] for name in names for match in re.finditer(r"\.", name))}
    for path in sorted(on_path):
        owner = model.get_submodule(path)
        others: list[tuple[str, Any]] = [*owner.named_children(), *owner.named_parameters(recurse=False)]
        for name, part in others:
            full_name = f"{path}.{name}".removeprefix(".")
            if full_name not in names and full_name not in on_path:
                setattr(owner, name, None)
                yield full_name, _size(part)
    yield from _leave_out_nested(model)


def _leave_out_nested(model: PreTrainedModel) -> Iterator[tuple[str, int]]:
    """Remove embeddings of images and sound inside the decoder (Phi-4): the modules that own an encoder."""
    decoder = model.get_decoder()
    base = next(name for name, module in model.named_modules() if module is decoder)
    encoders = [name for name, module in decoder.named_modules() if name and isinstance(module, PreTrainedModel)]
    for path in sorted({name.rpartition(".")[0] for name in encoders} - {""}):
        parent, _, name = path.rpartition(".")
        owner = decoder.get_submodule(parent)
        yield f"{base}.{path}", _size(getattr(owner, name))
        setattr(owner, name, None)


def _size(part: nn.Module | nn.Parameter) -> int:
    """Number of parameters."""
    return part.numel() if isinstance(part, nn.Parameter) else sum(parameter.numel() for parameter in part.parameters())


def left_out(model: nn.Module) -> dict[str, int]:
    """Parameters of the parts that a model lacks, by name; empty if it is complete."""
    return getattr(model, "left_out", {})


def left_out_text(model: nn.Module) -> str | None:
    """The parts that a model lacks, for people; None if it is complete."""
    sizes = {name: f"{count:,} parameters" if count else "a model of timm" for name, count in left_out(model).items()}
    parts = ", ".join(f"{name} ({size})" for name, size in sizes.items())
    return f"{parts}: rows of text do not train them" if parts else None


def pattern_of(parts: Iterable[str]) -> str | None:
    """A regular expression for the names of all modules in these parts, as peft matches them; None without parts."""
    names = "|".join(re.escape(part) for part in sorted(parts))
    return rf"({names})(\..*)?" if names else None


def names_in_model(model: PreTrainedModel, stored: Iterable[str]) -> dict[str, str]:
    """The model's name of each tensor in its files, as transformers renames it while loading."""
    return {key: name for key, (name, _, _) in conversions_in_model(model, stored).items()}


def conversions_in_model(
    model: PreTrainedModel, stored: Iterable[str]
) -> dict[str, tuple[str, str | None, WeightConverter | None]]:
    """What transformers makes of each tensor in a model's files: its name, the pattern that it matches, the operation.

    The last two are None for a tensor that is taken as it is.
    """
    conversions = getattr(model, "_weight_conversions", None) or get_model_conversion_mapping(model)
    renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    prefix, known = model.base_model_prefix, model.state_dict()
    renamed = {key: rename_source_key(key, renamings, converters, prefix, known) for key in stored}
    return {key: (name, pattern, by_pattern.get(pattern or "")) for key, (name, pattern) in renamed.items()}


def stored_left_out(model: PreTrainedModel, stored: Mapping[str, FileTensor]) -> dict[str, FileTensor]:
    """The tensors in a complete model's files, `stored`, that its language part lacks."""
    if not left_out(model):
        return {}
    known = model.state_dict()
    return {name: stored[name] for name, own in names_in_model(model, stored).items() if own not in known}
