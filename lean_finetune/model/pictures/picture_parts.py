"""The parts of a multimodal model beside its decoder and head, and a model that keeps those for pictures."""

import re
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from lean_finetune.config.schema import Train

PROJECTOR = re.compile(r"(^|[._])(merger|projector|connector|newline|deepstack_merger_list)([._]|$)")
"""Names of what turns the output of a vision tower into the decoder's inputs."""


def parts_beside_text(model: PreTrainedModel) -> Iterator[tuple[Any, str, str, Any]]:
    """The parts that text never reaches: (owner, name there, full name, module or parameter), outermost ones alone."""
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
                yield owner, name, full_name, part


class WithPictures:
    """Mixed into the class of a multimodal model: it keeps its parts for pictures.

    Those that are not trained stay in evaluation mode.
    """

    def __init__(self, config: PretrainedConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        model: Any = self
        self.vision_parts = tuple(name for _, _, name, _ in parts_beside_text(model))
        """Names of the parts beside decoder and head."""
        self.frozen_parts: tuple[nn.Module, ...] = ()

    def train(self, mode: bool = True) -> Any:
        """Set the mode of the decoder, and of the parts for pictures that are trained."""
        super().train(mode)  # type: ignore[misc]
        for part in self.frozen_parts:
            part.eval()
        return self


def vision_parts(model: nn.Module) -> tuple[str, ...]:
    """Names of a model's parts for pictures; empty for a model of text."""
    return getattr(model, "vision_parts", ())


def vision_parameters(model: nn.Module, *, projector: bool) -> list[str]:
    """Names of the parameters of a model's projector, or of its vision tower."""
    parts = vision_parts(model)
    names = [name for name, _ in model.named_parameters() if name.startswith(parts)] if parts else []
    return [name for name in names if bool(PROJECTOR.search(name)) == projector]


def freeze_pictures(model: PreTrainedModel, train: Train) -> None:
    """Freeze a model's parts for pictures (train.vision, train.projector)."""
    for name in vision_parts(model):
        part: Any = model.get_submodule(name) if name in dict(model.named_modules()) else model.get_parameter(name)
        part.requires_grad_(False)
    owner: Any = model
    if vision_parts(model):
        modules = dict(model.named_modules())
        owner.frozen_parts = tuple(modules[name] for name in vision_parts(model) if name in modules)
