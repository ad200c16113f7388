"""`train.lr: auto`: a rate that suits the method and the size of the model."""

import pytest

from lean_finetune.model.model_config import read_config
from lean_finetune.pinning.locate import find_model
from lean_finetune.train.usual_lr import usual_lr
from tests.small_model import spec_of


@pytest.mark.parametrize(
    ("model", "method", "expected"),
    [
        ("tiny", "qlora", 3e-3),
        ("tiny", "full", 3e-3),
        ("qwen2.5-0.5b", "lora", 3e-4),
        ("llama-3.1-8b", "int8_lora", 2e-4),
        ("llama-3.1-8b", "full", 1e-5),
        ("llama-3.1-70b", "qlora", 1e-4),
    ],
)
def test_the_rate_follows_method_and_size(model: str, method: str, expected: float):
    """That of the shipped model of 1 M parameters would ruin an 8B."""
    lr, reason = usual_lr(read_config(find_model(model)), spec_of(method=method))
    assert lr == expected and reason.startswith("usual for ")
