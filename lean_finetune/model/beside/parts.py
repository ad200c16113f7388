"""The parts of a multimodal model beside its decoder and head, and a model that keeps those of a tower."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from lean_finetune.config.schema import Train
from lean_finetune.core.errors import UserError
from lean_finetune.islands.tower import TOWER
from lean_finetune.patches.of_models import FROZEN_TOWER
from lean_finetune.pinning.adapter_files import LORA

UNREAD = "unread"
"""The kind of a tower's layers that nothing reads; others are those of `ImageTower.kinds`."""


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


class WholeModel:
    """Mixed into the class of a multimodal model: it keeps its parts beside decoder and head.

    Those that are not trained stay in evaluation mode.
    """

    def __init__(self, config: PretrainedConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        model: Any = self
        self.left_out: dict[str, int] = dict(_leave_out_others(model))
        """Parameters of parts that no row reaches, by name."""
        known = getattr(self, "_keys_to_ignore_on_load_unexpected", None) or ()
        self._keys_to_ignore_on_load_unexpected = {*known, *(f"^{re.escape(part)}" for part in self.left_out)}
        self.kept_parts = tuple(name for _, _, name, _ in parts_beside_text(model))
        """Names of the parts beside decoder and head."""
        self.frozen_parts: tuple[nn.Module, ...] = ()

    def train(self, mode: bool = True) -> Any:
        """Set the mode of the decoder, and of the other parts that are trained."""
        super().train(mode)  # type: ignore[misc]
        for part in self.frozen_parts:
            part.eval()
        return self


def _leave_out_others(model: PreTrainedModel) -> Iterator[tuple[str, int]]:
    """Remove the parts that no row reaches; yield their names and numbers of parameters."""
    for owner, name, full_name, part in list(parts_beside_text(model)):
        if full_name in TOWER.left_out:
            setattr(owner, name, None)
            yield full_name, sum(parameter.numel() for parameter in part.parameters())


def kept_parts(model: nn.Module) -> tuple[str, ...]:
    """Names of a model's parts beside decoder and head; empty for a model of text."""
    return getattr(model, "kept_parts", ())


def part_kinds(model: PreTrainedModel) -> dict[str, str]:
    """The kind of each parameter and module of a model's parts beside decoder and head, by name."""
    beside = kept_parts(model)
    if not beside:
        return {}
    unread = _unread_parts(model)
    named = [name for name, _ in (*model.named_parameters(), *model.named_modules()) if name.startswith(beside)]
    return {name: UNREAD if f"{name}.".startswith(unread) else TOWER.kind_of(name) for name in named}


def part_mode(kind: str | None, train: Train) -> str | None:
    """How a part is trained, by its kind: frozen, lora or full; None of what is in no part."""
    return None if kind is None else {**TOWER.modes(train), UNREAD: "frozen"}[kind]


def frozen_names(model: PreTrainedModel, train: Train) -> list[str]:
    """Names of the parameters and modules of a model's parts beside decoder and head that are not trained."""
    return [name for name, kind in part_kinds(model).items() if part_mode(kind, train) == "frozen"]


def fully_trained_modules(model: PreTrainedModel, modes: Mapping[str, str]) -> list[str]:
    """Names of the modules of parts that are trained in full beside adapters, by the modes of all kinds of parts.

    They are the outermost ones without a list of layers, which peft cannot wrap; so each layer of a tower is one.
    A parameter that is in no module of these parts, as LLaVA-Next has one, stays frozen.
    """
    trained = {name for name, kind in part_kinds(model).items() if modes.get(kind) == "full"}
    modules = {name: module for name, module in model.named_modules() if name in trained}
    whole = {name for name, module in modules.items() if [*module.parameters()] and not _has_list(module)}
    return [name for name in modules if name in whole and not _parents(name) & whole]


def _has_list(module: nn.Module) -> bool:
    return any(isinstance(inner, nn.ModuleList) for inner in module.modules())


def _parents(name: str) -> set[str]:
    return {name[: match.start()] for match in re.finditer(r"\.", name)}


def _unread_parts(model: PreTrainedModel) -> tuple[str, ...]:
    """Names, each with a dot behind it, of the tower's parts that follow the last layer that is read: no gradient."""
    if (read := TOWER.layers_read(model.config)) is None:
        return ()
    count, last = read
    tower = {name: part for name, part in model.named_modules() if name.startswith(kept_parts(model))}
    layers = [name for name, part in tower.items() if isinstance(part, nn.ModuleList) and len(part) == count]
    after = [f"{name}.{number}." for name in layers for number in range(last, count)]
    return (*after, *(f"{name}." for name in tower if name.endswith(TOWER.behind_layers)))


def unadapted_layers(model: PreTrainedModel, train: Train) -> set[str]:
    """Names of the layers in a model's parts beside decoder and head that get no adapter."""
    parameters, kinds = {name for name, _ in model.named_parameters()}, part_kinds(model)
    layers = {n.rpartition(".")[0] for n, kind in kinds.items() if n in parameters and part_mode(kind, train) != "lora"}
    return {name for name in layers if name.startswith(kept_parts(model))}  # A part may be a parameter alone.


def refuse_unadapted(adapted: nn.Module, train: Train) -> None:
    """Refuse adapters of a part where none of its layers has one.

    Raises:
        UserError: naming the parameter.
    """
    trained = [name for name, one in adapted.named_parameters() if one.requires_grad and TOWER.is_beside(name)]
    for kind, mode in TOWER.modes(train).items():
        if mode == "lora" and not any(TOWER.kind_of(name) == kind for name in trained):
            raise UserError(
                f"train.{kind}: adapts no layer: the model has no linear layer there that train.lora.targets names; "
                "got lora; set it to frozen, or change train.lora.targets"
            )


def adapted_parts(tensors: Iterable[str]) -> dict[str, str]:
    """How training made the parts of an adapter with these tensors."""
    return {
        **dict.fromkeys(TOWER.kinds, "frozen"),
        **{TOWER.kind_of(name): "lora" if LORA in name else "full" for name in filter(TOWER.is_beside, tensors)},
    }


def other_copies(adapter: Mapping[str, Any], tensors: Iterable[str]) -> list[str]:
    """`modules_to_save` of an adapter with these tensors, without those in parts beside decoder and head."""
    beside = [f".{name}" for name in filter(TOWER.is_beside, tensors)]
    return [one for one in adapter.get("modules_to_save") or () if not any(f".{one}." in name for name in beside)]


def freeze_parts(model: PreTrainedModel, train: Train) -> None:
    """Freeze the parts beside decoder and head that are not trained.

    They stay in evaluation mode. A frozen tower keeps nothing for backward.

    Call it before adapters are added: they are in no frozen part.
    """
    if not kept_parts(model):
        return
    frozen = set(frozen_names(model, train))
    for name, parameter in model.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)
    modules = dict(model.named_modules())
    trained = {name for name, _ in model.named_parameters() if name.startswith(kept_parts(model))} - frozen
    complete = {
        name: module
        for name, module in modules.items()
        if name in frozen and not any(other.startswith(f"{name}.") for other in trained)
    }
    outermost = [module for name, module in complete.items() if name.rpartition(".")[0] not in complete]
    for module in outermost if TOWER.is_frozen(train) else ():  # Other frozen parts pass gradients to the tower.
        # transformers makes the output of the patch embedding require a gradient when layers are recomputed, so that
        # a frozen tower would keep all its activations.
        FROZEN_TOWER.give_method(module, torch.no_grad()(module.forward))
    owner: Any = model
    owner.frozen_parts = tuple(outermost)
