"""Every family of models that transformers knows: an answer, or a refusal in one line."""

import json
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from lean_finetune.commands.fit import fit
from lean_finetune.config.model_families import families_that
from lean_finetune.memory.predict.layer_repetition import with_layers
from lean_finetune.model.empty_model import causal_class
from lean_finetune.model.recurrent import selective_scan
from tests.kit.estimate_cpu import METHODS, Case, compare, worst_share
from tests.kit.tiny_config import COUNTED, tiny_config
from tests.model.reload import reload_adapter
from tests.small_model import spec_of
from tests.workspace import lay_out

PARTS = 16
"""Number of tests that share the families: a failure in one does not skip the others."""
MOST_LAYERS, MOST_POSITIONS = 4, 256
"""Less than families have: chunks of a long row are traced one by one where layers loop over them."""


def small_config(family: str) -> dict[str, Any] | None:
    """The default config of a family, with few layers and positions where possible; None if it has no default."""
    try:
        config = CONFIG_MAPPING[family]()
        text = config.get_text_config()
        if isinstance(getattr(text, "max_position_embeddings", None), int):
            text.max_position_embeddings = min(text.max_position_embeddings, MOST_POSITIONS)
        values = config.to_dict()
    except Exception:  # A model of several parts, for which its family has no defaults.
        return None
    try:
        return with_layers(config, min(text.num_hidden_layers, MOST_LAYERS)).to_dict()
    except Exception:  # Layers that are counted in another way.
        return values


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
        for values in (small_config(family), {}):
            if values is None:
                continue
            (tmp_path / "config.json").write_text(json.dumps({**values, "model_type": family}, default=str))
            result = CliRunner().invoke(
                fit, ["--params", "params.yaml", "--model", "config.json", "--gpu", "100000GiB"]
            )
            tried += 1
            refused = result.exit_code == 1 and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
            answered = result.exit_code == 0 and result.stdout.startswith("verdict              fits: ")
            if not refused and not answered:
                faults.append((family, bool(values), result.exit_code, repr(result.exception), result.stderr[-300:]))
    assert not faults, faults
    assert tried > 40


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
@pytest.mark.parametrize("family", COUNTED)
def test_a_family_is_predicted_as_it_is_counted(family, method, tmp_path):
    """Experts, Mamba, convolutions or linear attention that are traced unlike they run."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny_config(family)).save_pretrained(tmp_path)
    for grad_ckpt in (False, True):
        pairs = compare(Case(family=family, method=method, grad_ckpt=grad_ckpt), tmp_path)
        assert worst_share(pairs) < 1e-3, pairs


@pytest.mark.slow
def test_a_scan_of_several_chunks_is_predicted_as_it_is_counted(tmp_path, monkeypatch):
    """States between chunks; the rows of the other tests have one chunk."""
    monkeypatch.setattr(selective_scan, "CHUNK_TOKENS", 40)
    AutoModelForCausalLM.from_config(tiny_config("mamba")).save_pretrained(tmp_path)
    pairs = compare(Case(family="mamba", method="lora", grad_ckpt=True), tmp_path)
    assert worst_share(pairs) < 1e-3, pairs


@pytest.mark.slow
@pytest.mark.parametrize("family", families_that("packs_other_layers"))
def test_packed_rows_of_a_hybrid_are_predicted_as_they_are_counted(family, tmp_path):
    """Rows of one to three chunks, which are cut, padded and joined again in every layer."""
    chunk: dict[str, Any] = dict.fromkeys(("mamba_chunk_size", "chunk_size"), 48)
    known = CONFIG_MAPPING[family]().to_dict()
    config = tiny_config(family, **{name: value for name, value in chunk.items() if name in known})
    torch.manual_seed(0)
    causal_class(config)._from_config(config).save_pretrained(tmp_path)
    for method, grad_ckpt in METHODS:
        pairs = compare(Case(family=family, method=method, grad_ckpt=grad_ckpt, layout="joined"), tmp_path)
        assert worst_share(pairs) < 1e-3, pairs


UNLIKE = ("gpt2", "lfm2", "qwen3_next", "glm4_moe", "falcon")
"""Transposed weights, convolutions, linear attention, experts, attention of its own."""


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")
@pytest.mark.parametrize(
    "family", [one if one in UNLIKE else pytest.param(one, marks=pytest.mark.slow) for one in COUNTED]
)
def test_an_adapter_of_a_family_loads_in_peft_with_equal_logits(family, tmp_path):
    """Adapters that peft adds to other layers than we trained, or layers that ignore them."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny_config(family)).save_pretrained(tmp_path / "base")
    reload_adapter(tmp_path / "base", spec_of(), tmp_path / "adapter")
