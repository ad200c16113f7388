"""config.json of strangers: what no model has is refused in one line before transformers builds anything from it."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from lean_finetune.core.errors import UserError
from lean_finetune.pinning import locate
from lean_finetune.pinning.config_file import read_config_json
from lean_finetune.pinning.locate import find_model
from lean_finetune.pinning.model_source import pin_model

LLAMA = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 256}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_labels": 10**9}, "num_labels must be at most 65536; got 1000000000"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 512; got 1000000000"),
        ({"n_layer": 513}, "n_layer must be at most 512; got 513"),
        ({"text_config": {"num_hidden_layers": 10**9}}, "text_config.num_hidden_layers must be at most 512"),
        ({"vision_config": {"depth": 10**6}}, "vision_config.depth must be at most 512"),
        ({"depths": [2, 10**6]}, "depths must be at most 512"),
        ({"num_experts": 10**9}, "num_experts must be at most 65536"),
        ({"vocab_size": 2**60}, "vocab_size must be at most 1099511627776"),
        ({"layer_types": ["full_attention"] * 100_001}, "layer_types must have at most 10000 entries; got 100001"),
        ({"layers": [["x"] * 5000] * 30}, "it has too many values"),
        ({"dtype": ["x"]}, 'dtype must be a text; got ["x"]'),
        ({"torch_dtype": 16}, "torch_dtype must be a text; got 16"),
        ({"model_type": {}}, "model_type must be a text; got {}"),
        ({"quantization_config": "nf4"}, 'quantization_config must be an object; got "nf4"'),
        ({"text_config": []}, "text_config must be an object; got []"),
        ({"rope_scaling": "linear"}, 'rope_scaling must be an object; got "linear"'),
    ],
)
def test_values_that_no_model_has_are_refused(change: dict[str, Any], message: str, tmp_path: Path):
    """`"num_labels": 1000000000` took all memory, `"num_hidden_layers": 1000000000` all time."""
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **change}))
    start = time.perf_counter()
    with pytest.raises(UserError) as caught:
        read_config_json(tmp_path)
    text = str(caught.value)
    assert text.startswith(f"model.name: {tmp_path}/config.json: {message}") and "\n" not in text and len(text) < 400
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": ' + "[" * 200_000 + "]" * 200_000 + "}", "is not JSON (nested too deeply)"),
        ('{"a":' * 50 + "1" + "}" * 50, "is nested more than 30 levels deep"),
        ("{", "is not JSON (Expecting property name"),
        ("[]", "must be a JSON object; got list"),
        ('{"a": ' + "9" * 5000 + "}", "is not JSON (Exceeds the limit"),
        ('{"a": "' + "x" * (17 << 20) + '"}', "has more than 16777216 bytes"),
        ("\0", "is not JSON"),
    ],
)
def test_what_is_no_config_is_refused(text: str, message: str, tmp_path: Path):
    """Nested brackets ended in a RecursionError."""
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError) as caught:
        read_config_json(tmp_path)
    assert message in str(caught.value) and len(str(caught.value)) < 400


def test_what_models_have_is_read(tmp_path: Path):
    """Limits that published models meet: 126 layers, 16,384 experts, 262,144 tokens, ten million positions."""
    config = {
        **LLAMA,
        "num_hidden_layers": 126,
        "num_experts": 16_384,
        "vocab_size": 262_144,
        "max_position_embeddings": 10_485_760,
        "rope_theta": 1e12,
        "id2label": {str(number): "x" for number in range(1000)},
        "layer_types": ["full_attention"] * 126,
        "quantization_config": {"ignore": [f"layers.{number}" for number in range(5000)]},
        "time_step_limit": [0.0, float("inf")],
        "sliding_window": None,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_config_json(tmp_path) == config


def test_an_adapter_alone_names_its_base_model(tmp_path: Path):
    """`has no config.json` for the directory that peft saved."""
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    expected = f"model.name: {tmp_path} is an adapter without a model; name its base model \\(org/base\\), or merge"
    with pytest.raises(UserError, match=expected):
        find_model(str(tmp_path))
    with pytest.raises(UserError, match=expected):
        pin_model(str(tmp_path), None, tmp_path / "locks")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert find_model(str(tmp_path)) == tmp_path


def test_an_adapter_on_the_hub_names_its_base_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`config.json is not JSON (No such file)` for a repository that has no config.json."""
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    monkeypatch.setattr(locate, "download", lambda parameter, name, kind, commit, paths: tmp_path)
    with pytest.raises(UserError, match=r"org/adapter is an adapter .* name its base model \(org/base\)"):
        find_model("org/adapter")
    (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(UserError, match="org/adapter has no config.json; name a model"):
        find_model("org/adapter")


def test_a_shipped_configuration_is_a_model_for_predictions_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its name works in any directory; a directory of that name comes first; it has no weights to pin."""
    monkeypatch.chdir(tmp_path)
    assert json.loads((find_model("llama-3.1-8b") / "config.json").read_text())["num_hidden_layers"] == 32
    with pytest.raises(UserError, match="llama-3.1-8b is a configuration without weights"):
        pin_model("llama-3.1-8b", None, tmp_path)
    own = tmp_path / "llama-3.1-8b"
    own.mkdir()
    (own / "config.json").write_text("{}")
    assert find_model("llama-3.1-8b") == Path("llama-3.1-8b")
