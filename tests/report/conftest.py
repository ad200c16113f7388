"""Inputs of a report, in the form in which the other stages write them."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from lean_finetune.core.atomic_files import FIGURES, seal_tables, write_csv, write_json, write_sealed, write_text
from lean_finetune.memory.predict.explanation import TIMELINE_COLUMNS
from lean_finetune.memory.trace.memory_trace import CATEGORIES
from lean_finetune.train.callbacks.callback import CURVE_COLUMNS
from tests.token_files import write_tokens
from tests.workspace import lay_out

MIB = 2**20

BREAKDOWN = {
    "forward": {"weights": 40 * MIB, "activations": 55 * MIB},
    "backward": {"weights": 40 * MIB, "activations": 50 * MIB, "gradients": 30 * MIB},
    "optimizer": {"weights": 40 * MIB, "gradients": 30 * MIB, "update": 0},
}

GROUP = {
    "category": "activations",
    "operation": "mm",
    "module": "model.layers.*.mlp.up_proj",
    "phase": "forward",
    "shape": [4, 64, 128],
    "dtype": "bfloat16",
    "count": 32,
    "bytes": 50 * MIB,
}
PERSISTENT = {
    **GROUP,
    "category": "weights",
    "operation": "existing",
    "module": "",
    "phase": "",
    "shape": None,
    "dtype": None,
}
STATE = {"category": "weights", "why": "bf16, 2 bytes a value", "tensors": 9, "bytes": 40 * MIB}
EXPLANATION = {"peak_bytes": 120 * MIB, "phase": "backward", "top": [GROUP, PERSISTENT], "states": [STATE]}
TIMELINE = [
    {"event": event, "phase": phase, **dict.fromkeys(CATEGORIES, 0.0), "weights": 0.04, "activations": size}
    for event, phase, size in ((0, "forward", 0.01), (9, "forward", 0.05), (20, "backward", 0.06))
]

GPU = {
    "gpu": "L4",
    "deciding_tier": "reserved",
    "reserved_bytes_predicted": 150 * MIB,
    "reserved_bytes_predicted_expandable": 130 * MIB,
    "reserved_bytes_predicted_native": 150 * MIB,
    "process_bytes_predicted": 291 * MIB,
    "host_bytes_predicted": 512 * MIB,
    "processes_per_host": 1,
    "reserved_replayed": "all 3 steps replayed",
    "reserved_settled_step": 1,
    "retries_predicted": 2,
}
"""Figures of stage estimate for a GPU."""
GENERATION = {
    "family": "sums",
    "prompt": "<|im_start|>user\n1 + 1<|im_end|>\n",
    "expected": "Answer: 2",
    "base": "I | do\n```\nnot know",
    "base_correct": False,
    "tuned": "Answer: 2",
    "tuned_correct": True,
}

TOKENIZE = {
    "format": "messages",
    "train_rows": 4749,
    "heldout_rows": 250,
    "train_tokens": 287625,
    "supervised_percent": 35.4,
    "longest": 512,
    "truncated_rows": 1250,
    "dropped_rows": 3,
    "no_answer_rows": 1,
    "dropped_long_rows": 0,
    "empty_answer_rows": 0,
    "bad_rows": 0,
    "duplicate_rows": 2,
}


def metrics() -> dict[str, dict[str, Any]]:
    """Content of each metrics file."""
    by_phase = {phase: sum(found.values()) for phase, found in BREAKDOWN.items()}
    peak = max(by_phase.values())
    losses = {"base_loss": 2.5, "tuned_loss": 1.25, "base_perplexity": 12.18, "tuned_perplexity": 3.49}
    return {
        "tokenize": TOKENIZE,
        "bucket": {
            "mode": "bucketed",
            "optimizer_steps": 3,
            "micro_batches": 9,
            "max_batch_tokens": 1024,
            "max_batch_rows": 25,
            "max_batch_length": 512,
            "padding_percent": 12.157,
            "straggler_percent": 1.5,
            "tokens_per_step": 2048,
            "tokens_per_step_auto": None,
        },
        "estimate": {
            "peak_bytes_predicted": peak,
            "predicted_by_phase": by_phase,
            "reserved_bytes_predicted": None,
            "reserved_bytes_predicted_expandable": None,
            "reserved_bytes_predicted_native": None,
            "process_bytes_predicted": None,
            "host_bytes_predicted": None,
            "worst_phase": "backward",
            "deciding_tier": "tensors",
            "fits": True,
            "gpu": "cpu",
            "capacity_gib": 15.5,
        },
        "train": {
            "peak_bytes_measured": 125 * MIB,
            "measured_by_phase": {
                "load": 41 * MIB,
                "forward": 95 * MIB,
                "backward": 125 * MIB,
                "clip": None,
                "optimizer": 70 * MIB,
            },
            "peak_reserved_bytes": None,
            "peak_measured_how": "torch.profiler memory events",
            "growth": {"cause": "steady", "summary": "steady: live_bytes grows by 0 bytes a step; nothing to do"},
            "device": "cpu",
            "trained_parameters": 184320,
            "lr": 2e-4,
            "tokens_per_second": 4000.5,
        },
        "evaluate": {
            **losses,
            "evaluated_rows": 250,
            "generated_rows": 1,
            "compared_rows": 1,
            "free_text_rows": 0,
            "max_new_tokens": 64,
            "unanswerable_rows": 0,
            "base_exact_match_percent": 0.0,
            "tuned_exact_match_percent": 100.0,
            "by_length": {"up_to_64": {"rows": 200, **losses}, "over_512": {"rows": 50, **losses}},
            "by_family": {"sums": {"rows": 1, "base_exact_match_percent": 0.0, "tuned_exact_match_percent": 100.0}},
        },
    }


PAIR = {
    "pair": 3,
    "became_right": True,
    "prompt": "<|im_start|>user\nBest | city?<|im_end|>\n",
    "chosen": "Ghent",
    "rejected": "<b>None</b>",
    "base_reward_chosen": 0.0,
    "base_reward_rejected": 0.0,
    "tuned_reward_chosen": 0.75,
    "tuned_reward_rejected": -0.5,
}
"""A pair whose order became right, as stage evaluate writes it."""
OF_PAIRS = {
    "evaluated_pairs": 40,
    **{f"base_reward_{name}": 0.0 for name in ("margin", "chosen", "rejected")},
    "base_reward_accuracy": 0.5,
    "tuned_reward_accuracy": 0.925,
    "tuned_reward_margin": 1.5,
    "tuned_reward_chosen": 0.5,
    "tuned_reward_rejected": -1.0,
    "base_logp_chosen": -12.5,
    "base_logp_rejected": -20.25,
    "tuned_logp_chosen": -7.5,
    "tuned_logp_rejected": -30.5,
    "chosen_tokens": 9.25,
    "rejected_tokens": 11.5,
}
"""Figures of stage evaluate for preference pairs."""


def write_pairs(directory: Path, pairs: list[dict[str, Any]]) -> None:
    """Write all inputs of a report of a run with pairs, whose listed pairs are these."""
    write_inputs(directory, evaluate=OF_PAIRS)
    lines = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in pairs)
    write_text(directory / "data/evaluate/pairs.jsonl", lines)
    names = ("reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy")
    rewards = {prefix + name: 0.25 for prefix in ("", "heldout_") for name in names}
    rows = [{**row, **rewards, "heldout_reward_accuracy": None} for row in curves()]
    rows[-1]["heldout_reward_accuracy"] = 0.875
    write_csv(directory / "data/train/curves.csv", [*CURVE_COLUMNS, *rewards], rows)
    seal(directory)


def curves() -> list[dict[str, Any]]:
    """Three steps: the first measured, the last with a held-out loss."""
    row: dict[str, Any] = {name: 1 for name in CURVE_COLUMNS} | {"heldout_loss": None, "allocated_bytes": None}
    return [
        {**row, "step": 0, "loss": 3.0, "allocated_bytes": 125 * MIB},
        {**row, "step": 1, "loss": 2.0},
        {**row, "step": 2, "loss": 1.5, "heldout_loss": 1.75, "allocated_bytes": 110 * MIB},
    ]


def write_inputs(directory: Path, generations: list[dict[str, Any]] | None = None, **changes: dict[str, Any]) -> None:
    """Write all inputs of a report as in the repository; `changes` update the figures of stages."""
    found = {name: values | changes.get(name, {}) for name, values in metrics().items()}
    generations = [GENERATION] if generations is None else generations
    places = {"tokenize": "tokens", "bucket": "batches"}
    for name, values in found.items():
        write_sealed(directory / "data" / places.get(name, name) / FIGURES, values)
    write_locks(directory / "locks", "org/base", "c0ffee", "rows.jsonl", None)
    write_tokens(directory / "data/tokens", [([0, 1, 2, 3], [2, 4], None)])
    write_tokenizer(directory / "data/tuned/tokenizer.json")
    write_sealed(directory / "data/estimate/breakdown.json", {**BREAKDOWN, "peak": BREAKDOWN["backward"]})
    write_sealed(directory / "data/estimate/verdict.json", {"enforce": True, "refusal": None})
    write_sealed(directory / "data/estimate/explanation.json", EXPLANATION)
    write_csv(directory / "data/estimate/timeline.csv", TIMELINE_COLUMNS, TIMELINE)
    write_csv(
        directory / "data/estimate/switches.csv",
        ["switch", "peak_gib"],
        [{"switch": "current", "peak_gib": 0.117}, {"switch": "grad_ckpt=true", "peak_gib": 0.08}],
    )
    write_csv(directory / "data/train/curves.csv", CURVE_COLUMNS, curves())
    lines = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in generations)
    write_text(directory / "data/evaluate/generations.jsonl", lines)
    seal(directory)


def write_locks(locks: Path, model: str, revision: str, source: str, data_revision: str | None) -> None:
    """Write the locks of a hub model and of one source."""
    named = {"kind": "hub", "name": model, "revision": revision, "tokenizer_files": ["tokenizer.json"]}
    write_json(locks / "model.json", {**named, "files": {"a.safetensors": "12ab"}})
    files = [{"path": "rows.jsonl", "bytes": 1, "sha256": "34cd"}]
    rows = {"source": source, "kind": "file", "revision": data_revision, "files": files}
    write_json(locks / "data.json", {"schema": 2, "bytes": 1, "chat_template_sha256": None, "sources": [rows]})


def seal(directory: Path) -> None:
    """Write the hashes of the tables of all stages again, after a change of one."""
    for stage in ("estimate", "train", "evaluate"):
        seal_tables(directory / "data" / stage)


def write_tokenizer(path: Path) -> None:
    """A tokenizer whose tokens are words."""
    words = ("Ask:", "<b>2+2</b>", "It", "is&")
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="Ask:"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A working directory with everything a report needs."""
    monkeypatch.chdir(tmp_path)
    write_inputs(tmp_path)
    return lay_out(tmp_path)
