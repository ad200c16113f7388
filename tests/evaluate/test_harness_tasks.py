"""Tasks of lm-evaluation-harness: from local files, with the same figures as its own model, within the limits."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from lean_finetune.core.atomic_files import write_json
from lean_finetune.core.errors import UserError
from lean_finetune.data.chat.tokenizer_files import compile_own_template
from lean_finetune.evaluate.harness_tasks import HarnessTasks, load_tasks
from lean_finetune.step import loss
from lean_finetune.step.evaluation_limits import EvaluationLimits
from tests.evaluate.conftest import CPU, EOS, PAD, TOKENIZER_FILES, save_random_adapter, spec_of
from tests.kit.loaded import load_base
from tests.workspace import error, invoke, lay_out

lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is not installed")
from lean_finetune.evaluate.harness_model import score_tasks  # noqa: E402 -- it needs lm_eval

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # Of the harness.

LIMITS = EvaluationLimits(max_tokens=128, logits_chunk=7, max_new_tokens=4, generate_batch_rows=3)
WORDS = ["the sum of two and two", "a date in May", "list the words", "copy this line", "what is seven times six?"]
TASKS: dict[str, dict[str, Any]] = {
    "local_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        "metadata": {"version": 3.0},
    },
    "local_answer": {
        "output_type": "generate_until",
        "description": "Answer in a word.",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["e"], "max_gen_toks": 6, "do_sample": False},
        "num_fewshot": 1,
        "fewshot_split": "test",
        "metric_list": [{"metric": "exact_match"}],
        "metadata": {"version": 1.5},
    },
    "local_text": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
        "metadata": {"version": 2.0},
    },
}
"""The three kinds of requests of the harness."""


@pytest.fixture
def task_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Paths of the tasks' YAML files, beside their rows."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    rows = [{"question": text * n, "choices": ["yes", "no", text], "answer": n % 3} for n, text in enumerate(WORDS, 1)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows_of = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
    for name, task in TASKS.items():
        write_json(tmp_path / f"{name}.yaml", {"task": name, **rows_of, **task})  # JSON is YAML.
    return {name: str(tmp_path / f"{name}.yaml") for name in TASKS}


def tasks_of(
    names: list[str], base: Path, limits: EvaluationLimits = LIMITS, rows: int | None = None, chat: bool = False
) -> HarnessTasks:
    manager, tasks = load_tasks(names)
    return HarnessTasks(
        manager=manager,
        tasks=tasks,
        rows=rows,
        tokenizer=Tokenizer.from_file(str(base / "tokenizer.json")),
        template=compile_own_template(base, "2024-07-26") if chat else None,
        max_length=limits.max_tokens,
        limits=limits,
        weights=spec_of("full"),
        pad_id=PAD,
        eos_id=EOS,
        device=CPU,
    )


@pytest.mark.parametrize("chat", [False, True])
def test_scores_are_those_of_the_harness_with_its_own_model(base_dir: Path, task_files, chat: bool):
    """Another split into batches or chunks, a shifted target or another chat template would give other scores."""
    model = load_base(base_dir, spec_of("full"), CPU, "sdpa").eval()
    names = list(task_files.values())
    ours = score_tasks(tasks_of(names, base_dir, chat=chat), model, [EOS])
    from lm_eval.models.huggingface import HFLM

    plain = AutoModelForCausalLM.from_pretrained(base_dir)
    theirs = HFLM(pretrained=plain, tokenizer=AutoTokenizer.from_pretrained(base_dir), max_length=128, batch_size=1)
    manager, tasks = load_tasks(names)
    expected = lm_eval.simple_evaluate(
        model=theirs,
        tasks=tasks,
        task_manager=manager,
        log_samples=False,
        apply_chat_template=chat,
        fewshot_as_multiturn=chat,
    )
    assert set(ours) == set(TASKS)
    for name, found in ours.items():
        figures = {key: value for key, value in expected["results"][name].items() if isinstance(value, float)}
        assert figures and {key: found["metrics"][key] for key in figures} == pytest.approx(figures, rel=1e-4)
    assert {name: (found["version"], found["rows"], found["shots"]) for name, found in ours.items()} == {
        "local_choice": (3.0, 5, 0), "local_answer": (1.5, 5, 1), "local_text": (2.0, 5, 0)
    }  # fmt: skip
    assert {found["chat_template"] for found in ours.values()} == {chat}


def test_no_batch_is_larger_than_the_limits(base_dir: Path, task_files, monkeypatch):
    """A task's long prompts would need more memory than the verdict is for."""
    model = load_base(base_dir, spec_of("full"), CPU, "sdpa").eval()
    tokens, logits = [], []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: tokens.append((kwargs.get("input_ids", args[0] if args else None)).numel()),
        with_kwargs=True,
    )
    head_logits = loss.head_logits

    def counted(lm: Any, hidden: torch.Tensor) -> torch.Tensor:
        logits.append(len(hidden))
        return head_logits(lm, hidden)

    monkeypatch.setattr(loss, "head_logits", counted)
    limits = replace(LIMITS, max_tokens=40)
    found = score_tasks(tasks_of(list(task_files.values()), base_dir, limits, rows=4), model, [EOS])
    assert found["local_choice"]["rows"] == 4
    assert max(tokens) <= 40 and max(logits) <= LIMITS.logits_chunk and len(tokens) > 10


def test_the_stage_writes_scores_of_both_models_with_versions(
    base_dir: Path, tokens_dir: Path, locks_dir: Path, task_files, tmp_path: Path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    settings = {"train__method": "lora", "evaluate__generate_rows": 2, "evaluate__max_new_tokens": 4}
    lay_out(
        tmp_path, **settings, evaluate__max_tokens=512, run__cpu_threads=1,
        evaluate__tasks=[task_files["local_choice"]], evaluate__task_rows=3,
    )  # fmt: skip
    from stages.evaluate import main

    tuned = save_random_adapter(base_dir, "lora", tmp_path / "adapter")
    for name in TOKENIZER_FILES:
        shutil.copyfile(base_dir / name, tuned / name)
    locks = ("--model-lock", str(locks_dir / "model.json"), "--tokenizer-lock", str(locks_dir / "tokenizer.json"))
    invoke(main, "--tokens", str(tokens_dir), "--tuned", str(tuned), *locks)
    metrics = json.loads((tmp_path / "metrics/evaluate.json").read_text())
    figures = metrics["tasks"]["local_choice"]
    assert figures["chat_template"] is True
    assert figures["version"] == 3.0 and figures["rows"] == 3 and figures["shots"] == 0
    assert figures["base"].keys() == figures["tuned"].keys() >= {"acc,none", "acc_norm,none"}
    assert metrics["lm_eval_version"] == lm_eval.__version__ and metrics["tuned_loss"] > 0
    lay_out(tmp_path, **settings, evaluate__max_tokens=512, run__cpu_threads=1, evaluate__tasks=["gsm9k"])
    line = error(invoke(main, "--tokens", str(tokens_dir), "--tuned", str(tuned), *locks))
    assert line.startswith("evaluate.tasks: lm_eval ") and "gsm9k" in line


def test_answers_longer_than_a_batch_are_refused(base_dir: Path, task_files):
    model = load_base(base_dir, spec_of("full"), CPU, "sdpa").eval()
    tasks = tasks_of([task_files["local_answer"]], base_dir, replace(LIMITS, max_tokens=6))
    with pytest.raises(UserError, match=r"^evaluate\.max_tokens: a task answers in up to 6 tokens"):
        score_tasks(tasks, model, [EOS])


def test_a_missing_file_is_refused():
    with pytest.raises(UserError, match=r"^evaluate\.tasks: no such file; got no_such\.yaml"):
        load_tasks(["no_such.yaml"])
    assert torch.is_grad_enabled()
