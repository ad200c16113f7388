"""The contestants of benchmarks.train: the same model, rows and tokens per optimizer step, each in a fresh process."""

import csv
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ruamel.yaml import YAML
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.chat_file import SCRATCH, SEED
from benchmarks.chat_text import english
from benchmarks.data import RIVALS
from benchmarks.data_cases import ROOT, Rival
from lean_finetune.core.atomic_files import read_json
from lean_finetune.core.errors import UserError
from lean_finetune.step.token_rows import TokenRows, read_lengths

THREADS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
TOKENIZER = ROOT / "lean_finetune/tiny"
LR = 1e-4
MAX_LENGTH = 512
MEDIAN_WORDS, SIGMA = 24, 0.8
"""Of an answer: with them prompts and answers are as long as those of the alpaca data sets."""
COUNTED_STEPS = 2
"""Of a rival's, besides the first: those with the largest micro-batches."""
LIGER = "liger-kernel==0.8.5"
SOURCE = "rows.jsonl"
TOKENIZED = "tokenized.jsonl"


@dataclass(frozen=True, kw_only=True)
class Steps:
    """What a contestant did, one entry for each optimizer step."""

    seconds: Sequence[float]
    supervised: Sequence[int]
    """Tokens that count in the loss."""
    real: Sequence[int]
    """Tokens without padding."""
    padded: Sequence[int]
    """Tokens that went through the model."""
    largest: Sequence[int]
    """Of them, those of the largest micro-batch."""
    limit_seconds: Sequence[float] | None = None
    """Of the bare forward and backward passes of the same batches; None where they were not run."""
    peak_bytes: int | None = None
    """Of PyTorch's allocator, loading included; None where time was measured."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of a rival's libraries, as its own process found them."""


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The most that PyTorch's allocator held, loading included."""

    peak_bytes: int
    steps: Sequence[int]
    """In which it was counted, from 0; the first with the loading before it."""


@dataclass(frozen=True, kw_only=True)
class Field:
    """The directory in which ours runs, with the model and the rows that all use."""

    rows: int
    tokens_per_step: int
    max_tokens: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of ours, besides: dotted parameter → value."""
    name: str = "train"
    """Of its directory."""

    @property
    def directory(self) -> Path:
        """Where everything lies."""
        return (SCRATCH / "runs" / self.name).resolve()

    def prepare(self) -> None:
        """Write model and rows; pin, tokenize, bucket and estimate once.

        Raises:
            UserError: a stage failed; its last line is told.
        """
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir(parents=True)
        self._save_model()
        with open(self.directory / SOURCE, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in _rows(self.rows))
        self._write_params()
        for stage in ("pin data", "pin model", "tokenize", "bucket", "estimate"):
            run_python(["-m", *f"stages.{stage}".split()], self.directory)
        tokens = TokenRows(self.directory / "data/tokens", "train")
        with open(self.directory / TOKENIZED, "w", encoding="utf-8") as file:
            for number in range(len(tokens.lengths)):
                ids = tokens.ids(number)
                labels = np.full(len(ids), -100, np.int64)
                for start, end in tokens.spans(number).reshape(-1, 2):
                    labels[start:end] = ids[start:end]
                file.write(json.dumps({"input_ids": ids.tolist(), "labels": labels.tolist()}) + "\n")

    def _save_model(self) -> None:
        """A small Llama of random weights, with the shipped tokenizer: its head is 6 % of it, as that of an 8B is."""
        directory = self.directory / "model"
        torch.manual_seed(SEED)
        config = LlamaConfig(
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=6,
            num_attention_heads=8,
            num_key_value_heads=4,
            vocab_size=read_json(TOKENIZER / "config.json")["vocab_size"],
            max_position_embeddings=2048,
            tie_word_embeddings=True,
        )
        LlamaForCausalLM(config).save_pretrained(directory)
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(TOKENIZER / name, directory)

    def _write_params(self) -> None:
        yaml = YAML()
        values = yaml.load((ROOT / "params.yaml").read_text(encoding="utf-8"))
        changed = {
            "model.name": "model",
            "data.source": SOURCE,
            "data.max_length": MAX_LENGTH,
            "bucket.max_tokens": self.max_tokens,
            "train.method": "full",
            "train.precision": "fp32",
            "train.lr": LR,
            "train.schedule": "constant",
            "train.warmup_fraction": 0.0,
            "train.epochs": 1,
            "train.tokens_per_step": self.tokens_per_step,
            "train.heldout_every_steps": None,
            "run.progress": False,
            "run.cpu_threads": THREADS,
            **self.settings,
        }
        for dotted, value in changed.items():
            *sections, key = dotted.split(".")
            section = values
            for name in sections:
                section = section[name]
            section[key] = value
        with open(self.directory / "params.yaml", "w", encoding="utf-8") as file:
            yaml.dump(values, file)

    @property
    def steps(self) -> int:
        """Optimizer steps of the plan."""
        return int(read_json(self.directory / "data/batches/figures.json")["optimizer_steps"])

    @property
    def rows_per_step(self) -> float:
        """Rows that have as many tokens as a step is to have."""
        return self.tokens_per_step / float(read_lengths(self.directory / "data/tokens/train-index.arrow").mean())

    def ours(self) -> Steps:
        """The loop of stage train, and the limit beside it."""
        told = run_python([str(ROOT / "benchmarks/rivals/our_steps.py"), str(THREADS)], self.directory)
        return Steps(**told)

    def our_peak(self) -> Peak:
        """Of stage train, whole: it counts in the first step, in those said to be the worst, and in four others."""
        run_python(["-m", "stages.train"], self.directory)
        with open(self.directory / "data/train/curves.csv", encoding="utf-8", newline="") as file:
            counted = [int(row["step"]) for row in csv.DictReader(file) if row["measured"] == "True"]
        peak_bytes = read_json(self.directory / "data/train/figures.json")["peak_bytes_measured"]
        return Peak(peak_bytes=peak_bytes, steps=counted)


@dataclass(frozen=True, kw_only=True)
class TrainerCase:
    """Hugging Face's Trainer or TRL's SFTTrainer with some of its arguments."""

    trainer: str
    """hf | trl."""
    arguments: Mapping[str, Any]
    rival: Rival | None = None
    """Whose environment it runs in; None: this one."""

    def peak(self, ground: Field, seen: Steps) -> Peak:
        """Its peak over the steps that a run has `seen`, counted in the first and in the largest of the others.

        The first has no optimizer state before its end; so none of the others is left out for being smaller than it.

        Raises:
            UserError: it failed, or was given other batches than then.
        """
        others = sorted(range(1, len(seen.largest)), key=lambda step: seen.largest[step], reverse=True)
        counted = sorted(others[:COUNTED_STEPS])
        run = self.run(ground, counted[-1] + 1, counted)
        if list(run.padded) != list(seen.padded[: len(run.padded)]):
            raise UserError("benchmarks.train: a rival's batches changed from run to run: its largest is not known")
        assert run.peak_bytes is not None
        return Peak(peak_bytes=run.peak_bytes, steps=[0, *counted])

    def run(self, ground: Field, steps: int, measured: Sequence[int] | None = None) -> Steps:
        """Train `steps` optimizer steps; memory is counted in the first and in those `measured`, if that is a list.

        Raises:
            UserError: it failed; its last line is told.
        """
        out = SCRATCH / "runs" / "trainer"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        case = {
            "trainer": self.trainer,
            "arguments": dict(self.arguments),
            "steps": steps,
            "lr": LR,
            "threads": THREADS,
            "measured": measured,
        }
        script = ROOT / "benchmarks/rivals/trainer_steps.py"
        rows = ground.directory / (SOURCE if self.trainer == "trl" else TOKENIZED)
        arguments = [str(script), str(rows), str(ground.directory / "model"), str(out.resolve()), json.dumps(case)]
        environment = {"HF_HOME": str(out.resolve()), "HF_HUB_OFFLINE": "1"}
        python = None if self.rival is None else self.rival.python
        told = run_python(arguments, ground.directory, environment, python)
        return Steps(**told)


def trl() -> Rival:
    """TRL with the virtual environment of benchmarks.data."""
    return next(rival for rival in RIVALS if rival.script == "trl_sft.py")


def with_liger() -> Rival:
    """TRL in an environment that has Liger's kernels too."""
    rival = trl()
    return replace(rival, requirements=(*rival.requirements, LIGER))


def run_python(
    arguments: Sequence[str], cwd: Path, extra: Mapping[str, str] | None = None, python: Path | None = None
) -> dict[str, Any]:
    """Run Python with this code on its path; the JSON in its last line, or nothing.

    Raises:
        UserError: it failed; its last line is told.
    """
    kept = {key: value for key, value in os.environ.items() if not key.startswith("DVC_")}
    environment = {**kept, "PYTHONPATH": str(ROOT), **(extra or {})}
    done = subprocess.run(
        [str(python or sys.executable), *arguments], cwd=cwd, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()] or ["no output"]
        raise UserError(f"benchmarks.train: `{' '.join(arguments[:2])}` failed: {lines[-1]}")
    last = done.stdout.strip().rpartition("\n")[2]
    return dict(json.loads(last)) if last.startswith("{") else {}


def _rows(count: int) -> list[dict[str, str]]:
    """Prompts and answers of made-up English."""
    rng = np.random.default_rng(SEED)
    language = english(rng)
    rows = []
    for _ in range(count):
        words = int(np.clip(MEDIAN_WORDS * np.exp(SIGMA * rng.standard_normal()), 3, 170))
        prompt, answer = language.write(rng, int(rng.integers(5, 18))), language.write(rng, words)
        rows.append({"prompt": f"{prompt}\n", "completion": answer})
    return rows
