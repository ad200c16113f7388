"""Whether the head shares the embedding's weights, where config.json leaves it to a default that is often wrong."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lean_finetune.memory.predict.state_formulas import model_shapes
from lean_finetune.model.model_config import read_config
from tests.kit.image_models import image_models

MODELS = {"mistral3": "Mistral Small 3.1 24B", "internvl": "InternVL3 1B"}
EMBEDDING, HEAD = "model.language_model.embed_tokens.weight", "language_model.lm_head.weight"
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...], bool]] = {
    "as published": ({}, (), False),
    "text part ties": ({"text_config": {"tie_word_embeddings": True}}, (), True),
    "whole ties": ({"tie_word_embeddings": True}, (), True),
    "files without a head": ({}, (EMBEDDING,), True),
    "files with a head": ({"text_config": {"tie_word_embeddings": True}}, (EMBEDDING, HEAD), False),
}


@pytest.mark.parametrize("as_index", [False, True])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", MODELS)
def test_the_files_decide_or_else_the_text_part(family: str, case: str, as_index: bool, tmp_path: Path):
    """A prediction without the head of Mistral Small 3.1, or a tied model whose head is missed in its files."""
    changes, names, tied = CASES[case]
    config = dict(image_models()[MODELS[family]])
    for key, value in changes.items():
        config[key] = {**config[key], **value} if isinstance(value, dict) else value
    (tmp_path / "config.json").write_text(json.dumps(config))
    if names and as_index:
        index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    elif names:
        save_file({name: torch.zeros(2, 2) for name in names}, tmp_path / "model.safetensors")
    assert read_config(tmp_path).tie_word_embeddings is tied


def test_the_head_is_counted(tmp_path: Path):
    config = image_models()["InternVL3 1B"]
    text, counts = config["text_config"], []
    for tied in (True, False):
        (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": tied}))
        counts.append(model_shapes(read_config(tmp_path)).values)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_shapes(read_config(tmp_path)).values == counts[1]
    assert counts[1] - counts[0] == text["vocab_size"] * text["hidden_size"]
