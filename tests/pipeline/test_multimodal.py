"""The language model of a multimodal checkpoint through the pipeline, and what other programs load from it."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForImageTextToText, AutoTokenizer

from lean_finetune.pinning.locate import TINY_DIRECTORY, TOKENIZER_FILES
from tests.model.small_multimodal import multimodal_config, save_multimodal
from tests.pipeline.clone import make_clone

IDS = torch.arange(5, 60)[None]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Gemma 3 with its vision part, and a tokenizer without a processor."""
    directory = tmp_path_factory.mktemp("base") / "gemma"
    tokenizer = AutoTokenizer.from_pretrained(TINY_DIRECTORY)
    text = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    save_multimodal(multimodal_config("gemma3", **text), directory)
    for name in TOKENIZER_FILES:
        if (TINY_DIRECTORY / name).is_file():
            shutil.copy(TINY_DIRECTORY / name, directory)
    return directory


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model.eval()(input_ids=IDS, attention_mask=torch.ones_like(IDS)).logits
    return found


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # By peft.
@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_multimodal_checkpoint_runs_through_the_pipeline(method, base, tmp_path):
    """A stage that takes the complete model, a report that does not name what is missing, or exports without vision."""
    clone = make_clone(tmp_path / "repo")
    clone.set_params(model__name=str(base), train__method=method, train__merge=method != "full", data__max_rows=60)
    clone.dvc("repro")
    for page in ("report.md", "report.html"):
        text = (clone.root / "data/report" / page).read_text()
        assert "model.vision_tower (32,352 parameters)" in text and "rows of text do not train them" in text
    assert abs(clone.json("metrics/report.json")["predicted_error_percent"]) < 0.1
    clone.run("lean-finetune", "export", "merged")
    merged, plain = (AutoModelForImageTextToText.from_pretrained(one) for one in (clone.root / "merged", base))
    changed = {name for name, value in merged.state_dict().items() if not value.equal(plain.state_dict()[name])}
    assert changed and all("language_model" in name or "lm_head" in name for name in changed)
    if method == "lora":
        clone.run("lean-finetune", "export", "adapter", "--what", "adapter")
        adapted = PeftModel.from_pretrained(plain, str(clone.root / "adapter"))
        assert (logits(adapted) - logits(merged)).abs().max() < 1e-3
    clone.end_processes()
