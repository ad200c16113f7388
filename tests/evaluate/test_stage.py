"""The stage as a user runs it: base against tuned model for every method, one line for each fault."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from lean_finetune.core.atomic_files import write_sealed
from lean_finetune.evaluate import evaluate_run
from lean_finetune.evaluate.base_and_tuned import RESULTS, ModelOutputs, evaluate_metrics, evaluate_models
from lean_finetune.model.merge_adapters import MERGED, write_merged
from lean_finetune.run.assets import Assets
from lean_finetune.step.evaluation_limits import EvaluationLimits
from lean_finetune.step.token_rows import TokenRows
from stages.evaluate import main
from tests.evaluate.conftest import CPU, EOS, questions_of, save_random_adapter, spec_of
from tests.evaluate.test_row_losses import losses_of
from tests.kit.loaded import load_base
from tests.token_files import Row, heldout, write_tokens
from tests.workspace import error, invoke, lay_out, write_verdict

LIMITS = EvaluationLimits(max_tokens=256, logits_chunk=32, max_new_tokens=4, generate_batch_rows=8)


@pytest.fixture(scope="session")
def adapter(base_dir, tmp_path_factory) -> Path:
    return save_random_adapter(base_dir, "lora", tmp_path_factory.mktemp("tuned") / "lora")


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return lay_out(
        tmp_path,
        train__method="lora",
        evaluate__generate_rows=6,
        evaluate__max_new_tokens=4,
        evaluate__max_tokens=512,
        run__cpu_threads=1,
    )


def evaluate(tokens: Path, locks: Path, tuned: Path):
    return invoke(
        main,
        *("--tokens", str(tokens), "--tuned", str(tuned)),
        *("--model-lock", str(locks / "model.json"), "--tokenizer-lock", str(locks / "tokenizer.json")),
    )


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_base_is_evaluated_without_its_adapter(method, base_dir, rows, tmp_path):
    """An adapter left on would hide what training changed; an adapter left off would hide it too."""
    tuned = save_random_adapter(base_dir, method, tmp_path / method)
    spec = spec_of(method)
    answers = evaluate_models(
        Assets(directory=base_dir), tuned, spec, questions_of(rows, 4), LIMITS, device=CPU, progress=False
    )
    alone = losses_of(load_base(base_dir, spec, CPU, "sdpa").eval(), rows)
    np.testing.assert_allclose(answers["base"].row_losses, alone, rtol=1e-5)
    assert np.abs(answers["tuned"].row_losses - alone).min() > 1e-3
    assert answers["base"].answers != answers["tuned"].answers


def test_full_fine_tuning_compares_two_models(base_dir, rows, tmp_path):
    """The tuned model is the directory that train saved, not the base again."""
    spec = spec_of("full")
    model = load_base(base_dir, spec, CPU)
    torch.manual_seed(23)
    for parameter in model.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "tuned")
    answers = evaluate_models(
        Assets(directory=base_dir), tmp_path / "tuned", spec, questions_of(rows, 4), LIMITS, device=CPU, progress=False
    )
    np.testing.assert_allclose(answers["tuned"].row_losses, losses_of(model.eval(), rows), rtol=1e-5)
    assert np.abs(answers["base"].row_losses - answers["tuned"].row_losses).min() > 1e-4


def test_the_stage_writes_metrics_and_the_same_bytes_again(place, tokens_dir, locks_dir, adapter):
    """The default path, and the determinism that lets DVC skip what follows."""
    assert evaluate(tokens_dir, locks_dir, adapter).exit_code == 0
    written = {path: path.read_bytes() for path in (Path("metrics/evaluate.json"), *Path("data/evaluate").iterdir())}
    metrics = json.loads(Path("data/evaluate/figures.json").read_text())
    assert metrics["evaluated_rows"] == 14 and metrics["generated_rows"] == metrics["compared_rows"] == 6
    assert metrics["unanswerable_rows"] == 0
    assert metrics["tuned_perplexity"] == pytest.approx(np.exp(metrics["tuned_loss"]), rel=1e-5)
    assert sum(bucket["rows"] for bucket in metrics["by_length"].values()) == 14
    assert {name: found["rows"] for name, found in metrics["by_family"].items()} == {"all": 2, "dates": 2, "sums": 2}
    lines = [json.loads(line) for line in Path("data/evaluate/generations.jsonl").read_text().splitlines()]
    assert len(lines) == 6
    assert set(lines[0]) == {"family", "prompt", "expected", "base", "base_correct", "tuned", "tuned_correct"}
    assert evaluate(tokens_dir, locks_dir, adapter).exit_code == 0
    assert {path: path.read_bytes() for path in written} == written


def test_a_base_that_changes_during_the_stage_is_refused(place, tokens_dir, locks_dir, base_dir, adapter, monkeypatch):
    def evaluate_changing(*given, **options):
        os.utime(base_dir / "config.json")
        return evaluate_models(*given, **options)

    monkeypatch.setattr(evaluate_run, "evaluate_models", evaluate_changing)
    line = error(evaluate(tokens_dir, locks_dir, adapter))
    assert line.endswith("config.json changed while it was read; run `dvc repro` again")
    assert not Path("data/evaluate").exists()


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_merged_model_is_evaluated(place, tokens_dir, locks_dir, base_dir, tmp_path, method):
    """How much merging costs must be a figure, not a hope."""
    lay_out(
        place,
        train__method=method,
        train__precision="auto",
        train__merge=True,
        evaluate__merged=True,
        evaluate__generate_rows=0,
        evaluate__max_tokens=512,
    )
    write_verdict(place, precision="fp32")
    tuned = save_random_adapter(base_dir, method, tmp_path / "tuned")
    (tuned / MERGED).mkdir()
    files = ["config.json", "model.safetensors"]
    write_merged(base_dir, files, tuned, spec_of(method), tuned / MERGED)
    assert evaluate(tokens_dir, locks_dir, tuned).exit_code == 0
    metrics = json.loads(Path("data/evaluate/figures.json").read_text())
    assert abs(metrics["merged_minus_tuned_loss"]) < 1e-4 < abs(metrics["base_loss"] - metrics["tuned_loss"])
    assert metrics["merged_loss"] == pytest.approx(metrics["tuned_loss"], abs=1e-4)


def test_answers_shorter_than_the_expected_ones_are_shown_and_not_called_wrong(place, tokens_dir, locks_dir, adapter):
    """Rows whose own answer exceeds evaluate.max_new_tokens had no answer, or would count as wrong."""
    lay_out(place, evaluate__generate_rows=14, evaluate__max_tokens=512, evaluate__max_new_tokens=2)
    assert evaluate(tokens_dir, locks_dir, adapter).exit_code == 0
    metrics = json.loads(Path("data/evaluate/figures.json").read_text())
    lines = [json.loads(line) for line in Path("data/evaluate/generations.jsonl").read_text().splitlines()]
    assert metrics["generated_rows"] == len(lines) == 14 and metrics["unanswerable_rows"] == 0
    compared = [line for line in lines if line["tuned_correct"] is not None]
    assert metrics["compared_rows"] == len(compared) == 8, "of 1 to 4 tokens, those up to 2"
    right = sum(line["tuned_correct"] for line in compared)
    assert metrics["tuned_exact_match_percent"] == pytest.approx(100 * right / len(compared), abs=1e-3)


def test_free_text_is_answered_up_to_the_longest_own_answer_and_not_judged(
    place, tmp_path, locks_dir, base_dir, adapter, tokens_dir
):
    """Chats of long answers had no answer at all, or answers in other words were called wrong."""
    tokenizer = Tokenizer.from_file(str(base_dir / "tokenizer.json"))

    def row(question: str, answer: str) -> Row:
        prompt, ids = (tokenizer.encode(text).ids for text in (question, answer))
        return [*prompt, *ids, EOS], [len(prompt), len(prompt) + len(ids) + 1], None

    tokens = tmp_path / "chats"
    shutil.copytree(tokens_dir, tokens)
    answers = ["Sure", "That depends on the weather, I would say.", "Take two eggs.", "It is late; go home."]
    write_tokens(tokens, [row(f"Question {n}?", text) for n, text in enumerate(answers)], "heldout")
    lay_out(place, train__method="lora", evaluate__max_new_tokens=None, evaluate__max_tokens=512)
    assert evaluate(tokens, locks_dir, adapter).exit_code == 0
    found = json.loads(Path("data/evaluate/figures.json").read_text())
    longest = max(len(tokenizer.encode(text).ids) + 1 for text in answers)
    assert (found["max_new_tokens"], found["compared_rows"], found["free_text_rows"]) == (longest, 0, 4)
    metrics = json.loads(Path("metrics/evaluate.json").read_text())
    assert metrics["tuned_exact_match_percent"] is None and metrics.keys() == set(RESULTS)
    lines = [json.loads(line) for line in Path("data/evaluate/generations.jsonl").read_text().splitlines()]
    assert sorted(line["expected"] for line in lines) == sorted(answers)
    assert all(line["tuned"] and line["tuned_correct"] is None for line in lines)


def test_plain_text_rows_have_a_loss(place, tmp_path, locks_dir, adapter, tokens_dir):
    """A set of plain texts: exact match is null, not zero, and nothing crashes."""
    tokens = tmp_path / "plain"
    shutil.copytree(tokens_dir, tokens)
    write_tokens(tokens, [([30, 31, 32, EOS], [0, 4], None)], "heldout")
    assert evaluate(tokens, locks_dir, adapter).exit_code == 0
    metrics = json.loads(Path("data/evaluate/figures.json").read_text())
    assert metrics["tuned_exact_match_percent"] is None and metrics["by_family"] == {}
    assert metrics["evaluated_tokens"] == 3
    assert Path("data/evaluate/generations.jsonl").read_text() == ""


def test_a_missing_or_foreign_adapter_is_one_line(place, tokens_dir, locks_dir, tmp_path, tiny_dir):
    """The line must name a weight that does not fit, not only that some error happened."""
    line = error(evaluate(tokens_dir, locks_dir, tmp_path / "nowhere"))
    assert "nowhere" in line and "dvc repro" in line
    line = error(evaluate(tokens_dir, locks_dir, save_random_adapter(tiny_dir, "lora", tmp_path / "other")))
    assert "adapter cannot be loaded" in line and "size mismatch" in line and "lora_A" in line
    assert not Path("data/evaluate").exists() and not Path("metrics/evaluate.json").exists()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1e38, "loss of the tuned model must be finite"),
        (torch.inf, "has values that are not finite (NaN or infinity); check the training curves"),
    ],
)
def test_adapter_without_finite_loss_is_one_line(place, tokens_dir, locks_dir, adapter, tmp_path, value, expected):
    """NaN in a metrics file is no JSON, and a mean over it no figure."""
    broken = tmp_path / "broken"
    shutil.copytree(adapter, broken)
    weights = load_file(broken / "adapter_model.safetensors")
    save_file({name: torch.full_like(w, value) for name, w in weights.items()}, broken / "adapter_model.safetensors")
    assert expected in error(evaluate(tokens_dir, locks_dir, broken))
    assert not Path("metrics/evaluate.json").exists()


@pytest.mark.parametrize(
    ("function", "fault"),
    [
        ("run.assets.load_base", torch.OutOfMemoryError("CUDA out of memory")),
        (
            "evaluate.base_and_tuned.row_sums",
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 8 bytes."),
        ),
    ],
)
def test_out_of_memory_names_the_parameters_that_help(
    place, tokens_dir, locks_dir, adapter, monkeypatch, function, fault
):
    """A traceback after hours of training helps nobody."""

    def fail(*_, **__):
        raise fault

    monkeypatch.setattr(f"lean_finetune.{function}", fail)
    line = error(evaluate(tokens_dir, locks_dir, adapter), 3)
    assert line.startswith("evaluate.max_tokens: the base model ran out of memory") and "generate_batch_rows=32" in line


def metrics_without_prompts(rows: TokenRows, **losses: list[float]) -> dict[str, Any]:
    """Metrics of models with these losses of all rows."""
    outputs = {name: ModelOutputs(row_losses=np.array(values), answers=[]) for name, values in losses.items()}
    return evaluate_metrics(questions_of(rows, 0), outputs, [])


def test_a_perplexity_too_large_for_a_float_is_null(tmp_path):
    """A run that diverged to a large finite loss ended in an OverflowError, without its metrics."""
    metrics = metrics_without_prompts(heldout(tmp_path, [([9, 9], [1, 2], None)]), base=[2.0], tuned=[5e3])
    assert (metrics["tuned_loss"], metrics["tuned_perplexity"]) == (5e3, None)
    assert metrics["base_perplexity"] == pytest.approx(np.exp(2.0), rel=1e-5)


def test_metrics_by_length_divide_by_the_tokens_of_their_own_rows(tmp_path):
    """A bucket's mean over all tokens, or a row in the wrong bucket, would go unseen in the overall figure."""
    rows: list[Row] = [
        ([9] * 60, [50, 60], None),
        ([9] * 64, [62, 64], None),
        ([9] * 65, [0, 5], None),
        ([9] * 600, [0, 9], None),
    ]
    losses = {"base": [20.0, 4.0, 12.0, 8.0], "tuned": [10.0, 2.0, 6.0, 4.0]}
    metrics = metrics_without_prompts(heldout(tmp_path, rows), **losses)
    assert {
        name: (found["rows"], found["base_loss"], found["tuned_loss"]) for name, found in metrics["by_length"].items()
    } == {
        "up_to_64": (2, 2.0, 1.0),
        "up_to_128": (1, 3.0, 1.5),
        "over_512": (1, 1.0, 0.5),
    }
    assert metrics["evaluated_tokens"] == 24 and metrics["base_loss"] == pytest.approx(44 / 24, abs=1e-6)


def test_without_held_out_rows_no_model_is_loaded_and_figures_are_null(place, base_dir, locks_dir, tmp_path):
    """Later stages still need its outputs."""
    write_tokens(tmp_path, [], "heldout")
    write_sealed(tmp_path / "meta.json", {"eos_id": EOS, "pad_id": 0, "max_length": 64})
    result = evaluate(tmp_path, locks_dir, tmp_path / "no-weights")
    assert result.exit_code == 0, result.stderr
    assert result.stderr.startswith("note: no rows are held out (data.heldout_fraction is 0)")
    found = json.loads((place / "data/evaluate/figures.json").read_text())
    assert (found["evaluated_rows"], found["generated_rows"]) == (0, 0)
    assert {found[f"{model}_{name}"] for model in ("base", "tuned") for name in ("loss", "perplexity")} == {None}
    assert (place / "data/evaluate/generations.jsonl").read_text() == ""
