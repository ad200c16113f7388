"""From rows to a saved model through the stages, on a base whose files are quantised already."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lean_finetune.core.atomic_files import FIGURES, read_json
from stages.bucket import main as bucket
from stages.estimate import main as estimate
from stages.evaluate import main as evaluate
from stages.pin import main as pin
from stages.tokenize import main as tokenize
from stages.train import main as train
from tests.kit.loaded import load_base
from tests.model.quantized import QWEN3, resized, save_fp8
from tests.small_model import CPU, spec_of
from tests.workspace import invoke, lay_out, write_rows

SMALL: dict[str, Any] = {
    "data__source": "rows.jsonl",
    "data__heldout_fraction": 0.3,
    "data__max_length": 128,
    "bucket__max_tokens": 256,
    "train__tokens_per_step": 256,
    "train__epochs": 1,
    "train__precision": "bf16",
    "train__loss_chunk": None,
    "evaluate__loss_rows": 4,
    "evaluate__generate_rows": 2,
    "evaluate__max_new_tokens": 2,
    "run__cpu_threads": 1,
    "run__data_workers": 1,
    "run__tokenizer_engine": "tokenizers",
    "model__name": "base",
}
ROWS = [{"instruction": f"add {n} and {n}", "output": str(2 * n)} for n in range(24)]


def run(place: Path, tiny_dir: Path, **changes: Any) -> None:
    """Run the stages on the model in `base`."""
    for file in tiny_dir.glob("tokenizer*"):
        shutil.copyfile(file, place / "base" / file.name)
    shutil.copyfile(tiny_dir / "chat_template.jinja", place / "base/chat_template.jinja")
    write_rows(place / "rows.jsonl", ROWS)
    lay_out(place, **{**SMALL, **changes})
    for what in ("data", "model"):
        assert invoke(pin, what).exit_code == 0
    for stage in (tokenize, bucket, estimate, train, evaluate):
        result = invoke(stage)
        assert result.exit_code == 0, result.output


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DVC_STAGE", raising=False)
    return tmp_path


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # In peft.
def test_an_adapter_of_fp8_loads_on_the_16_bit_model_and_merges(place: Path, tiny_dir: Path):
    """An adapter that plain PEFT cannot load, or merged weights that transformers takes for FP8."""
    save_fp8(place / "base", config=resized(QWEN3, vocab_size=1280))
    run(place, tiny_dir, train__method="lora", train__merge=True, evaluate__merged=True)
    figures = read_json(place / "data/estimate" / FIGURES)
    assert figures["weights"] == "FP8 in the model's files, unpacked to bf16 while loading"
    spec, tuned = spec_of(method="full", precision="bf16"), place / "data/tuned"
    base = load_base(place / "base", spec, CPU)
    base.save_pretrained(place / "16_bit")
    ids = torch.arange(4, 20)[None]
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(place / "16_bit", dtype=torch.bfloat16)
        adapted = PeftModel.from_pretrained(plain, str(tuned))(ids).logits
        merged = AutoModelForCausalLM.from_pretrained(tuned / "merged", dtype=torch.bfloat16)
        assert not hasattr(merged.config, "quantization_config")
        assert {tensor.dtype for tensor in load_file(tuned / "merged/model.safetensors").values()} == {torch.bfloat16}
        assert torch.allclose(merged(ids).logits, adapted, atol=0.05)
        assert not torch.allclose(load_base(place / "base", spec, CPU)(ids).logits, adapted, atol=1e-3)
