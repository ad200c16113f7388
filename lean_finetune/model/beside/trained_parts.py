"""Parts beside the decoder that are trained in full beside adapters: in peft's form, without peft's copy."""

from collections.abc import Sequence
from typing import Any

from peft import PeftModel
from peft.utils.other import ModulesToSaveWrapper
from torch import nn

from lean_finetune.islands.tower import TOWER
from lean_finetune.patches.of_models import TRAINED_PARTS


class TrainedPart(ModulesToSaveWrapper):
    """A module that is trained and saved as one of peft's `modules_to_save`.

    peft would train a copy, and keep the module as it was for a model without its adapter. Here the module itself is
    trained, so it is in memory once.
    """

    original_module: nn.Module | None

    def update(self, adapter_name: str, tied_module: Any = None, **kwargs: Any) -> None:
        """Train the module itself; peft calls this to make a copy."""
        assert self.original_module is not None
        self._adapters.add(adapter_name)
        self.modules_to_save[adapter_name] = self.original_module.requires_grad_(True)
        self.original_module = None


def train_parts(adapted: PeftModel, names: Sequence[str]) -> None:
    """Train modules of the base model in full; peft saves them with the adapter and loads them."""
    base: Any = adapted.get_base_model()
    config: Any = adapted.active_peft_config
    for name in names:
        owner, _, last = name.rpartition(".")
        module = base.get_submodule(name)
        part = TrainedPart(module, adapted.active_adapter)
        part.original_module = _of_type(module) if name == names[0] else None
        TRAINED_PARTS.give_part(base.get_submodule(owner), last, part)
    if names:
        config.modules_to_save = [*(config.modules_to_save or ()), *names]


def forget_originals(adapted: PeftModel) -> None:
    """Free the modules that a loaded adapter replaces; without its adapter the model then lacks these parts."""
    named = ((name, module) for name, module in adapted.named_modules() if isinstance(module, ModulesToSaveWrapper))
    replaced: list[Any] = [module for name, module in named if TOWER.is_beside(name)]
    for number, module in enumerate(replaced):
        module.original_module = None if number else _of_type(module.original_module)


def _of_type(module: nn.Module) -> nn.Module:
    """A module that computes nothing, whose only parameter has one value in the type of another's.

    The type of its first parameter is that of a model for transformers (`dtype`), to which SmolVLM converts the output
    of its tower. Trained parts have the type of adapters, and the others expect that of the base.
    """
    first = next(parameter for parameter in module.parameters() if parameter.is_floating_point())
    only = nn.Module()
    only.register_parameter("of_base", nn.Parameter(first.new_zeros(1), requires_grad=False))
    return only
