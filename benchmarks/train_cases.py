"""The contestants of benchmarks.train: the same model, rows and tokens per optimizer step, each in a new process."""

import csv
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaForCausalLM

from benchmarks.chat_file import SEED
from benchmarks.chat_text import english
from benchmarks.processes import ROOT, SCRATCH, Rival, run_stage
from lean_finetune.core.atomic_files import read_json
from lean_finetune.core.errors import UserError
from lean_finetune.step.token_rows import TokenRows, read_lengths
from tests.kit.specs import llama
from tests.kit.write_params import write_params

THREADS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
TOKENIZER = ROOT / "lean_finetune/tiny"
LR = 1e-4
MAX_LENGTH = 512
MEDIAN_WORDS, SIGMA = 24, 0.8
"""Length of an answer: with these, prompts and answers are as long as in the alpaca data sets."""
COUNTED_STEPS = 2
"""Steps besides the first in which a rival's memory is measured: those with the largest micro-batches."""
OUR_STEPS = Rival(name="ours")
HF_TRAINER = Rival(name="transformers Trainer")
SOURCE = "rows.jsonl"
TOKENIZED = "tokenized.jsonl"


@dataclass(frozen=True, kw_only=True)
class Steps:
    """What a contestant did, one entry per optimizer step."""

    seconds: Sequence[float]
    supervised: Sequence[int]
    """Tokens that count in the loss."""
    real: Sequence[int]
    """Tokens without padding."""
    padded: Sequence[int]
    """Tokens that went through the model, padding included."""
    largest: Sequence[int]
    """Padded tokens of the largest micro-batch."""
    limit_seconds: Sequence[float] | None = None
    """Bare forward and backward passes over the same batches; None where they were not run."""
    peak_bytes: int | None = None
    """Peak of PyTorch's allocator, loading included; None in a timed run."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of a rival's libraries, as its own process found them."""


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Peak of PyTorch's allocator, loading included."""

    peak_bytes: int
    steps: Sequence[int]
    """Steps in which it was measured, from 0. Step 0 includes loading."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The directory in which our stages run, with the model and the rows that all contestants use."""

    rows: int
    tokens_per_step: int
    max_tokens: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    """More parameters of our run: dotted name → value."""
    name: str = "train"
    """Name of the directory."""

    @property
    def directory(self) -> Path:
        """Its absolute path."""
        return (SCRATCH / "runs" / self.name).resolve()

    def prepare(self) -> None:
        """Write model and rows; pin, tokenize, bucket and estimate once."""
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir(parents=True)
        save_model(self.directory / "model")
        with open(self.directory / SOURCE, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in generated_rows(self.rows))
        changes = {
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
        }
        write_params(self.directory, {**changes, **self.settings})
        for stage in ("pin data", "pin model", "tokenize", "bucket", "estimate"):
            run_stage(stage, self.directory)
        self._write_token_rows()

    def _write_token_rows(self) -> None:
        """Write our tokens and labels as JSON Lines, for rivals that take token ids."""
        tokens = TokenRows(self.directory / "data/tokens", "train")
        with open(self.directory / TOKENIZED, "w", encoding="utf-8") as file:
            for number in range(len(tokens.lengths)):
                ids = tokens.ids(number)
                labels = np.full(len(ids), -100, np.int64)
                for start, end in tokens.spans(number).reshape(-1, 2):
                    labels[start:end] = ids[start:end]
                file.write(json.dumps({"input_ids": ids.tolist(), "labels": labels.tolist()}) + "\n")

    @property
    def steps(self) -> int:
        """Number of optimizer steps in the plan."""
        return int(read_json(self.directory / "data/batches/figures.json")["optimizer_steps"])

    @property
    def rows_per_step(self) -> float:
        """Mean number of rows with train.tokens_per_step tokens."""
        return self.tokens_per_step / float(read_lengths(self.directory / "data/tokens/train-index.arrow").mean())

    def ours(self) -> Steps:
        """Time the loop of stage train, and the bare passes interleaved with it."""
        return Steps(**OUR_STEPS.run("our_steps.py", str(THREADS), cwd=self.directory).figures)

    def our_peak(self) -> Peak:
        """Run stage train itself, which measures the first step, the predicted worst steps and four others."""
        run_stage("train", self.directory)
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
    like: str
    """Name of ours in the same setting."""
    rival: Rival = HF_TRAINER
    """The tool whose environment it runs in."""

    def peak(self, setup: Setup, seen: Steps) -> Peak:
        """Its peak over the steps of a run it has done, measured in the first step and in the largest others.

        The first step has no optimizer state until its end, so it need not be the largest.

        Raises:
            UserError: its batches differ from those of the earlier run.
        """
        others = sorted(range(1, len(seen.largest)), key=lambda step: seen.largest[step], reverse=True)
        counted = sorted(others[:COUNTED_STEPS])
        run = self.run(setup, counted[-1] + 1, counted)
        if list(run.padded) != list(seen.padded[: len(run.padded)]):
            raise UserError("benchmarks.train: a rival's batches changed from run to run, so its largest is unknown")
        assert run.peak_bytes is not None
        return Peak(peak_bytes=run.peak_bytes, steps=[0, *counted])

    def run(self, setup: Setup, steps: int, measured: Sequence[int] | None = None) -> Steps:
        """Train `steps` optimizer steps; `measured` lists steps whose memory is measured besides the first."""
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
        rows = setup.directory / (SOURCE if self.trainer == "trl" else TOKENIZED)
        arguments = (rows, setup.directory / "model", out.resolve(), json.dumps(case))
        return Steps(**self.rival.run("trainer_steps.py", *arguments, cwd=setup.directory, cache=out).figures)


def save_model(directory: Path) -> None:
    """Save a small Llama of random weights with the shipped tokenizer. Its head is 6 % of it, as in an 8B."""
    torch.manual_seed(SEED)
    vocabulary = read_json(TOKENIZER / "config.json")["vocab_size"]
    config = llama(256, 768, layers=6, heads=8, kv_heads=4, vocabulary=vocabulary, tied=True)
    LlamaForCausalLM(config).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TOKENIZER / name, directory)


def generated_rows(count: int) -> list[dict[str, str]]:
    """Prompts and answers in generated English."""
    rng = np.random.default_rng(SEED)
    language = english(rng)
    rows = []
    for _ in range(count):
        words = int(np.clip(MEDIAN_WORDS * np.exp(SIGMA * rng.standard_normal()), 3, 170))
        prompt, answer = language.write(rng, int(rng.integers(5, 18))), language.write(rng, words)
        rows.append({"prompt": f"{prompt}\n", "completion": answer})
    return rows
