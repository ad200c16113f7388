"""Parts for images that are trained in full beside adapters: in peft's form, without peft's copy."""

from collections.abc import Iterable
from typing import Any

from peft import PeftModel
from peft.utils.other import ModulesToSaveWrapper
from torch import nn

from lean_finetune.model.adapter_init import ADAPTER
from lean_finetune.model.images.image_config import part_of_images


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


def train_parts(adapted: PeftModel, names: Iterable[str]) -> None:
    """Train modules of the base model in full; peft saves them with the adapter and loads them."""
    base: Any = adapted.get_base_model()
    config: Any = adapted.peft_config[ADAPTER]
    for name in names:
        owner, _, last = name.rpartition(".")
        setattr(base.get_submodule(owner), last, TrainedPart(base.get_submodule(name), ADAPTER))
        config.modules_to_save = [*(config.modules_to_save or ()), name]


def forget_originals(adapted: PeftModel) -> None:
    """Free the modules that a loaded adapter replaces; without its adapter the model then has no parts for images."""
    for name, module in adapted.named_modules():
        if isinstance(module, ModulesToSaveWrapper) and part_of_images(name):
            module.original_module = None
