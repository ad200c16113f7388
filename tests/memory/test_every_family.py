"""Every family of models that transformers knows: an answer, or a refusal in one line."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from transformers import CONFIG_MAPPING, PretrainedConfig

from lean_finetune.cli import fit
from lean_finetune.memory.predict.layer_structure import with_layers
from tests.workspace import lay_out

PARTS = 16
"""Families are tried in so many tests: a fault in one leaves the others to be tried."""
MOST_LAYERS, MOST_POSITIONS = 4, 256
"""Less than families have: chunks of a long row are traced one by one where layers loop over them."""


def written(directory: Path, family: str) -> bool:
    """Write the config of a family's class by default, with few layers; False where it has none."""
    try:
        values = _values(CONFIG_MAPPING[family]())
    except Exception:  # A model of several parts, which its family gives no defaults.
        return False
    (directory / "config.json").write_text(json.dumps({**values, "model_type": family}, default=str))
    return True


def _values(config: PretrainedConfig) -> dict[str, Any]:
    """What a config.json says: of all sizes, and of few layers where the family allows that."""
    text = config.get_text_config()
    if isinstance(getattr(text, "max_position_embeddings", None), int):
        text.max_position_embeddings = min(text.max_position_embeddings, MOST_POSITIONS)
    whole = config.to_dict()
    try:
        layers = text.num_hidden_layers
        return with_layers(config, min(layers, MOST_LAYERS)).to_dict() if layers > MOST_LAYERS else whole
    except Exception:  # Layers that are counted in another way.
        return whole


@pytest.mark.slow
@pytest.mark.parametrize("method", ["qlora", "full"])
@pytest.mark.parametrize("part", range(PARTS))
def test_no_config_ends_in_a_traceback(part, method, tmp_path, monkeypatch):
    """A family that nobody tried: 12 of them ended in tracebacks."""
    monkeypatch.chdir(tmp_path)
    small = {"data__max_length": 64, "bucket__max_tokens": 64, "train__tokens_per_step": 64}
    lay_out(tmp_path, train__method=method, train__precision="bf16", run__progress=False, **small)
    faults, tried = [], 0
    for family in sorted(CONFIG_MAPPING)[part::PARTS]:
        found = written(tmp_path, family)
        for whole in (True, False) if found else (False,):
            if not whole:
                (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
            result = CliRunner().invoke(fit, ["--model", "config.json", "--gpu", "100000GiB"])
            tried += 1
            refused = result.exit_code == 1 and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
            answered = result.exit_code == 0 and "\nverdict              fits: " in result.stdout
            if not refused and not answered:
                faults.append((family, whole, result.exit_code, repr(result.exception), result.stderr[-300:]))
    assert not faults, faults
    assert tried > 40
