"""Figures of held-out preference pairs, against log-probabilities by transformers alone."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from lean_finetune.config.load import load_params
from lean_finetune.core.atomic_files import read_json, write_sealed
from lean_finetune.evaluate.base_and_tuned import RESULTS
from lean_finetune.islands.objectives.registry import KINDS, OBJECTIVES
from lean_finetune.preferences.objectives.pair_objectives import PairObjective
from lean_finetune.preferences.pair_figures import RESULTS as PAIR_RESULTS
from lean_finetune.preferences.pair_figures import HeldoutPairs, PairScores, changed_pairs, pair_metrics
from lean_finetune.step.reference_table import identity, write_table
from lean_finetune.step.token_rows import TokenRows
from stages.evaluate import main
from tests.conftest import ROOT
from tests.evaluate.conftest import EOS, PAD, save_random_adapter
from tests.token_files import Row, heldout, write_tokens
from tests.workspace import error, invoke, lay_out

PAIRS = 9
WEIGHTS = load_params(ROOT / "params.yaml").train.model_copy(update={"method": "lora"})

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # By peft.


def pair_rows() -> list[Row]:
    """Chosen and rejected answers of different lengths to one prompt."""
    draw = torch.Generator().manual_seed(5)

    def tokens(count: int) -> list[int]:
        return torch.randint(20, 1500, (count,), generator=draw).tolist()

    rows: list[Row] = []
    for number in range(PAIRS):
        prompt = tokens(3 + number % 4)
        for length in (2 + number % 5, 6 - number % 3):
            rows.append(([*prompt, *tokens(length), EOS], [len(prompt), len(prompt) + length + 1], None))
    return rows


@pytest.fixture(scope="module")
def adapter(base_dir, tmp_path_factory) -> Path:
    return save_random_adapter(base_dir, "lora", tmp_path_factory.mktemp("tuned") / "lora")


@pytest.fixture(scope="module")
def logps(base_dir, adapter) -> dict[str, np.ndarray]:
    """Summed log-probabilities of the answers, row by row, of both models."""
    model = AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32).eval()

    def plain(model: Any) -> np.ndarray:
        found = []
        for ids, (start, end), _ in pair_rows():
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0].double()
            tokens = torch.tensor(ids)[start:end]
            found.append(logits.log_softmax(-1)[start - 1 : end - 1].gather(1, tokens[:, None]).sum().item())
        return np.array(found)

    base = plain(model)
    return {"base": base, "tuned": plain(PeftModel.from_pretrained(model, adapter).eval())}


@pytest.fixture
def place(tmp_path, monkeypatch, locks_dir, logps) -> Path:
    """A workspace with held-out pairs and their reference."""
    monkeypatch.chdir(tmp_path)
    tokens = write_tokens(tmp_path / "data/tokens", pair_rows(), "heldout", kind=KINDS["pair"])
    write_sealed(tokens / "meta.json", {"eos_id": EOS, "pad_id": PAD, "max_length": 64, "chat_template_sha256": "0"})
    (tmp_path / "data/reference").mkdir()
    of = identity(tokens, read_json(locks_dir / "model.json"), WEIGHTS)
    write_table(tmp_path / "data/reference/heldout.arrow", logps["base"].astype(np.float32), of)
    return tmp_path


def evaluate(place: Path, locks: Path, tuned: Path, **values: Any) -> Any:
    settings = {"evaluate__generate_rows": 2, "evaluate__max_new_tokens": 4, "evaluate__max_tokens": 512}
    lay_out(place, train__method="lora", run__cpu_threads=1, **settings, **values)
    locks_of = {f"--{name}-lock": str(locks / f"{name}.json") for name in ("model", "tokenizer")}
    return invoke(main, "--tuned", str(tuned), *(text for pair in locks_of.items() for text in pair))


def plain_rewards(name: str, logps: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Rewards of rows as papers write them, with usual values."""
    tokens = np.array([end - start for _, (start, end), _ in pair_rows()])
    return {"dpo": 0.1 * (logps - reference), "simpo": 2.0 * logps / tokens, "cpo": 0.1 * logps}[name]


@pytest.mark.parametrize("name", ["dpo", "simpo", "cpo"])
def test_figures_are_those_of_plain_log_probabilities(place, locks_dir, adapter, logps, name):
    """A figure of the wrong side, model or row; a reward other than the objective's; a mean per token for a sum."""
    assert evaluate(place, locks_dir, adapter, train__objective=name).exit_code == 0
    found = json.loads(Path("metrics/evaluate.json").read_text())
    assert tuple(found) == (*RESULTS, *PAIR_RESULTS)
    for model, values in logps.items():
        rewards = plain_rewards(name, values, logps["base"])
        margins = rewards[::2] - rewards[1::2]
        expected = {
            "reward_accuracy": np.where(margins == 0, 0.5, margins > 0).mean(),
            "reward_margin": margins.mean(),
            "reward_chosen": rewards[::2].mean(),
            "reward_rejected": rewards[1::2].mean(),
            "logp_chosen": values[::2].mean(),
            "logp_rejected": values[1::2].mean(),
        }
        assert {key: found[f"{model}_{key}"] for key in expected} == pytest.approx(expected, rel=1e-5, abs=2e-5)
    tokens = [end - start for _, (start, end), _ in pair_rows()]
    assert found["chosen_tokens"] == pytest.approx(np.mean(tokens[::2]), abs=1e-3)
    assert found["rejected_tokens"] == pytest.approx(np.mean(tokens[1::2]), abs=1e-3)
    assert found["tuned_loss"] == pytest.approx(-logps["tuned"][::2].sum() / sum(tokens[::2]), rel=1e-5)
    assert 0 < found["tuned_reward_accuracy"] < 1, "both orders occur"


def test_before_training_the_rewards_of_a_reference_are_zero_and_no_order_is_right(place, locks_dir, adapter):
    """Rounding of another batch shape gives half of the pairs, or none, the right order."""
    assert evaluate(place, locks_dir, adapter, train__objective="ipo").exit_code == 0
    found = json.loads(Path("metrics/evaluate.json").read_text())
    assert (found["base_reward_accuracy"], found["base_reward_margin"], found["base_reward_chosen"]) == (0.5, 0.0, 0.0)
    lines = [json.loads(line) for line in Path("data/evaluate/pairs.jsonl").read_text().splitlines()]
    assert len(lines) == PAIRS and {line["base_reward_chosen"] for line in lines} == {0.0}
    for became_right in (True, False):
        changes = [
            line["tuned_reward_chosen"] - line["tuned_reward_rejected"]
            for line in lines
            if line["became_right"] is became_right
        ]
        assert changes == sorted(changes, key=abs, reverse=True) and all((one > 0) is became_right for one in changes)


def test_a_part_of_the_pairs_is_spread_over_all(place, locks_dir, adapter):
    assert evaluate(place, locks_dir, adapter, train__objective="dpo", evaluate__loss_rows=3).exit_code == 0
    assert json.loads(Path("data/evaluate/figures.json").read_text())["evaluated_pairs"] == 3


def test_rows_that_are_no_pairs_have_no_such_figures(place, locks_dir, adapter):
    """Columns of zeros in `dvc exp show` for supervised fine-tuning."""
    write_tokens(place / "data/tokens", pair_rows(), "heldout")
    assert evaluate(place, locks_dir, adapter).exit_code == 0
    assert tuple(json.loads(Path("metrics/evaluate.json").read_text())) == RESULTS
    figures = json.loads(Path("data/evaluate/figures.json").read_text())
    assert not [name for name in figures if "reward" in name or "pairs" in name]
    assert not Path("data/evaluate/pairs.jsonl").exists()


def test_without_held_out_pairs_figures_are_null(place, locks_dir, adapter):
    write_tokens(place / "data/tokens", [], "heldout", kind=KINDS["pair"])
    of = identity(place / "data/tokens", read_json(locks_dir / "model.json"), WEIGHTS)
    write_table(place / "data/reference/heldout.arrow", np.zeros(0, np.float32), of)
    assert evaluate(place, locks_dir, adapter, train__objective="dpo").exit_code == 0
    found = json.loads(Path("metrics/evaluate.json").read_text())
    assert {found[name] for name in PAIR_RESULTS} == {None}
    assert Path("data/evaluate/pairs.jsonl").read_text() == ""


def test_a_reference_of_other_tokens_is_refused(place, locks_dir, adapter):
    write_tokens(place / "data/tokens", pair_rows()[2:], "heldout", kind=KINDS["pair"])
    line = error(evaluate(place, locks_dir, adapter, train__objective="dpo"))
    assert "heldout.arrow: was computed from other weights or tokens" in line
    assert not Path("metrics/evaluate.json").exists()


def test_pairs_whose_order_changed_are_listed_with_the_largest_change_first(tmp_path, tiny_dir):
    """Twelve became right and fourteen wrong; four kept their order, one with the largest change of all."""
    margins = [(-1.0, 0.1 * n) for n in range(1, 13)] + [(0.5, -0.1 * n) for n in range(1, 15)]
    margins += [(1.0, 99.0), (-1.0, -2.0), (2.0, 1.0), (-1.0, 0.0)]
    tokenizer = Tokenizer.from_file(str(tiny_dir / "tokenizer.json"))
    rows: list[Row] = []
    for number in range(len(margins)):
        texts = (f"question {number} ", f"good {number}", f"bad {number}")
        prompt, *answers = (tokenizer.encode(text, add_special_tokens=False).ids for text in texts)
        rows += [([*prompt, *answer, EOS], [len(prompt), len(prompt) + len(answer) + 1], None) for answer in answers]
    opened: TokenRows = heldout(tmp_path, rows)
    numbers = np.arange(0, len(rows), 2)
    dpo = OBJECTIVES["dpo"]
    assert isinstance(dpo, PairObjective)
    pairs = HeldoutPairs(rows=opened, better=numbers, worse=numbers[:0], objective=dpo, values={"beta": 0.1})
    zeros = np.zeros(len(margins))
    scores = {
        name: PairScores(logp_chosen=zeros, logp_rejected=zeros, reward_chosen=np.array(column), reward_rejected=zeros)
        for name, column in zip(("base", "tuned"), zip(*margins, strict=True), strict=True)
    }
    lines = changed_pairs(pairs, scores, tokenizer)
    assert [line["pair"] for line in lines] == [*range(11, 1, -1), *range(25, 15, -1)]
    assert [line["became_right"] for line in lines] == [True] * 10 + [False] * 10
    assert lines[0] == {
        "pair": 11,
        "became_right": True,
        "prompt": "question 11 ",
        "chosen": "good 11",
        "rejected": "bad 11",
        "base_reward_chosen": -1.0,
        "base_reward_rejected": 0.0,
        "tuned_reward_chosen": 1.2,
        "tuned_reward_rejected": 0.0,
    }
    assert pair_metrics(pairs, scores)["tuned_reward_accuracy"] == pytest.approx(14.5 / 30, abs=1e-6)
