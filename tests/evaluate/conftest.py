"""A random two-layer Llama beside the shipped tokenizer, and held-out rows for it."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from lean_finetune.config.schema import BaseWeights, Quant
from lean_finetune.core.atomic_files import sha256_file, write_json, write_sealed
from lean_finetune.evaluate.base_and_tuned import EvaluationRows
from lean_finetune.evaluate.generate import choose_prompts
from lean_finetune.islands.objectives.registry import OBJECTIVES, SFT
from lean_finetune.model.adapters import add_adapters, save_adapter
from lean_finetune.rows.held_out_answers import HeldoutAnswers
from lean_finetune.step.token_rows import TokenRows
from tests.kit.loaded import load_base
from tests.small_model import save_small_llama
from tests.small_model import spec_of as model_spec_of
from tests.token_files import Row, write_tokens

CPU = torch.device("cpu")
PAD = 0
EOS = 2
"""`<|im_end|>` of the shipped tokenizer."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def spec_of(method: str, precision: str = "fp32") -> BaseWeights:
    quant = Quant(type="nf4", double=True)
    return BaseWeights(method=method, quant=quant, precision=precision)  # type: ignore[arg-type]


def save_random_adapter(base: Path, method: str, out: Path) -> Path:
    """An adapter with a random B, as after training: a fresh one changes nothing."""
    spec = model_spec_of(method=method)
    model = add_adapters(load_base(base, spec, CPU), spec, seed=3)
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    save_adapter(model, out, "base")
    return out


def heldout_rows() -> list[Row]:
    """Chat-like rows of three families: prompt, answer, end of turn, newline; two of them with an earlier turn."""
    draw = torch.Generator().manual_seed(11)

    def tokens(count: int) -> list[int]:
        return torch.randint(20, 1500, (count,), generator=draw).tolist()

    rows: list[Row] = []
    for number in range(14):
        prompt, answer = tokens(4 + 7 * (number % 5)), [*tokens(1 + number % 4), EOS]
        spans = [len(prompt), len(prompt) + len(answer)]
        if number % 7 == 3:
            spans = [1, 3, *spans]
        rows.append(([*prompt, *answer, 20], spans, ("sums", "dates", None)[number % 3]))
    return rows


def questions_of(rows: TokenRows, prompts: int) -> EvaluationRows:
    """All rows for the loss, and this number of prompts."""
    chosen, too_long = choose_prompts(
        rows, prompts, max_length=64, max_prompt_tokens=None, max_new_tokens=4, special={EOS}
    )
    numbers = np.arange(len(rows))
    return EvaluationRows(
        rows=rows,
        loss_rows=numbers.tolist(),
        prompts=chosen,
        unanswerable_rows=too_long,
        special={EOS},
        eos_id=EOS,
        pad_id=PAD,
        compared=HeldoutAnswers(rows=rows, better=numbers, worse=numbers[:0], objective=OBJECTIVES[SFT], values={}),
    )


@pytest.fixture(scope="session")
def base_dir(tmp_path_factory, tiny_dir: Path) -> Path:
    """A random Llama with weights large enough that its greedy answers depend on the prompt."""
    directory = save_small_llama(
        tmp_path_factory.mktemp("base"),
        seed=7,
        dtype=torch.float32,
        hidden_size=32,
        intermediate_size=64,
        vocab_size=1536,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    for name in TOKENIZER_FILES:
        shutil.copyfile(tiny_dir / name, directory / name)
    return directory


@pytest.fixture(scope="session")
def tokens_dir(tmp_path_factory) -> Path:
    """The outputs of stage tokenize that evaluate reads."""
    directory = tmp_path_factory.mktemp("tokens")
    write_tokens(directory, heldout_rows(), "heldout")
    write_sealed(directory / "meta.json", {"eos_id": EOS, "pad_id": PAD, "max_length": 64, "chat_template_sha256": "0"})
    return directory


@pytest.fixture(scope="session")
def rows(tokens_dir: Path) -> TokenRows:
    return TokenRows(tokens_dir, "heldout")


@pytest.fixture(scope="session")
def locks_dir(tmp_path_factory, base_dir: Path) -> Path:
    """Pins of the base, as stage pin writes them."""
    directory = tmp_path_factory.mktemp("locks")
    hashes = {path.name: sha256_file(path) for path in base_dir.iterdir()}
    tokenizer = {name: hashes.pop(name) for name in TOKENIZER_FILES}
    lock = {"kind": "directory", "name": str(base_dir), "revision": None, "files": hashes}
    write_json(directory / "model.json", {**lock, "tokenizer_files": sorted(tokenizer)})
    write_json(directory / "tokenizer.json", {"files": tokenizer, "stop_ids": []})
    return directory
