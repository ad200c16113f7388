"""A tuned adapter and a full model, small enough for each test."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lean_finetune.model.adapters import save_adapter
from lean_finetune.pinning.locate import TINY_DIRECTORY, TOKENIZER_FILES
from tests.kit.loaded import load_model
from tests.small_model import CPU, spec_of


@pytest.fixture(scope="session")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of an adapter of the shipped model that changes its answers, with tokenizer and chat template."""
    directory = tmp_path_factory.mktemp("adapter")
    model: Any = load_model(TINY_DIRECTORY, spec_of(method="lora", precision="fp32"), CPU)
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = 0.3 * torch.randn_like(parameter)
    save_adapter(model, directory, str(TINY_DIRECTORY))
    for name in TOKENIZER_FILES:
        if (TINY_DIRECTORY / name).is_file():
            shutil.copy(TINY_DIRECTORY / name, directory)
    return directory
