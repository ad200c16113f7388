"""Objectives of preferences against TRL's trainers: losses, speed and memory, step by step on the same token ids.

A small Llama of random weights is fully fine-tuned in fp32 on generated pairs, or labelled rows, of equal length, in
the same order and with as many of them in each optimizer step. Both sides take turns. TRL runs the reference in every
step of DPO, IPO and KTO, ours in a stage before. Peak memory is that of PyTorch's allocator in a separate run. TRL's
ORPO also trains the prompt, so its prompts are one token, which no position predicts: then both train the answer alone.
"""

import csv
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np
from transformers import AutoTokenizer

from benchmarks.chat_file import SEED
from benchmarks.chat_text import english
from benchmarks.harness import Measured, at_least, at_most, benchmark, interleaved, median_ratio
from benchmarks.processes import SCRATCH, TRL, run_stage
from benchmarks.train_cases import THREADS, TOKENIZER, save_model
from lean_finetune.core.atomic_files import read_json
from lean_finetune.plan.batch_plan import read_plan
from lean_finetune.preferences.labels import COLUMN
from lean_finetune.step.token_rows import TokenRows
from tests.kit.write_params import write_params

COMPARED = ("dpo", "ipo", "kto", "cpo", "simpo", "orpo")
STEPS, QUICK_STEPS = 20, 3
ROUNDS, QUICK_ROUNDS = 3, 1
ROWS_OF_STEP = 8
ROW_TOKENS = 64
PROMPT_TOKENS = {"orpo": 1}
USUAL_PROMPT_TOKENS = 16
LR = 1e-5
BETA = {"dpo": 0.1, "ipo": 0.1, "kto": 0.1, "cpo": 0.1, "simpo": 2.0, "orpo": 0.1}
LOSS_LIMIT = 1e-5
SPEED_LIMIT = 1.0
WARM_UP_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one side did."""

    losses: Sequence[float]
    seconds: Sequence[float]
    peak_bytes: int | None = None


def measure(quick: bool) -> Measured:
    """Run every objective on both sides."""
    if reason := TRL.prepare():
        click.echo(f"note: TRL is skipped: {reason}", err=True)
        return Measured(rows=[{"objective": name, "skipped": reason} for name in COMPARED], bars=[])
    steps, rounds = (QUICK_STEPS, QUICK_ROUNDS) if quick else (STEPS, ROUNDS)
    rows: list[dict[str, Any]] = []
    for objective in COMPARED:
        directory = prepare(objective, steps)
        sides = {"ours": partial(ours, directory), "TRL": partial(trl, directory, objective, steps)}
        runs = interleaved(sides, rounds, warm_up=False)
        peaks = {"ours": ours(directory).peak_bytes, "TRL": trl(directory, objective, steps, measured=True).peak_bytes}
        rows.append(_row(objective, runs, peaks))
        click.echo(f"{objective}: {rows[-1]}", err=True)
    worst = max(row["largest difference of losses"] for row in rows)
    slowest = min(row["times as fast"] for row in rows)
    bars = [at_most("largest difference of losses", worst, LOSS_LIMIT)]
    return Measured(
        rows=rows, bars=bars if quick else [*bars, at_least("times as fast, at least", slowest, SPEED_LIMIT)]
    )


def _row(objective: str, runs: Mapping[str, Sequence[Run]], peaks: Mapping[str, int | None]) -> dict[str, Any]:
    own, other = (np.array(runs[side][0].losses) for side in ("ours", "TRL"))
    seconds = {side: [median(run.seconds[WARM_UP_STEPS:]) for run in runs[side]] for side in runs}
    return {
        "objective": objective,
        "first loss": round(float(own[0]), 7),
        "last loss": round(float(own[-1]), 7),
        "largest difference of losses": float(np.abs(own - other).max()),
        "ours_s": round(median(seconds["ours"]), 4),
        "TRL_s": round(median(seconds["TRL"]), 4),
        "times as fast": round(median_ratio(seconds["TRL"], seconds["ours"]), 2),
        "ours_bytes": peaks["ours"],
        "TRL_bytes": peaks["TRL"],
    }


def prepare(objective: str, steps: int) -> Path:
    """Write model and rows, run our stages up to training, and write the ids in the order of training."""
    directory = (SCRATCH / "runs" / f"preference-{objective}").resolve()
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    save_model(directory / "model")
    labelled = objective == "kto"
    with (directory / "rows.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in generated(objective, ROWS_OF_STEP * steps))
    sides = 1 if labelled else 2
    values = {
        "model.name": "model",
        "data.source": "rows.jsonl",
        "data.max_length": 2 * ROW_TOKENS,
        "data.heldout_fraction": 0.0,
        "bucket.max_tokens": ROWS_OF_STEP * sides * 2 * ROW_TOKENS,
        "train.tokens_per_step": ROWS_OF_STEP * sides * ROW_TOKENS,
        "train.objective": objective,
        "train.preference.beta": BETA[objective],
        "train.method": "full",
        "train.precision": "fp32",
        "train.grad_ckpt": False,
        "train.lr": LR,
        "train.weight_decay": 0.0,
        "train.schedule": "constant",
        "train.warmup_fraction": 0.0,
        "train.epochs": 1,
        "train.heldout_every_steps": None,
        "evaluate.generate_rows": 0,
        "run.progress": False,
        "run.cpu_threads": THREADS,
    }
    write_params(directory, values)
    for stage in ("pin data", "pin model", "tokenize", "bucket", "estimate", "reference"):
        run_stage(stage, directory)
    with (directory / "ids.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in ids_in_order(directory, labelled=labelled))
    return directory


def generated(objective: str, count: int) -> Iterator[dict[str, Any]]:
    """Rows of an objective whose prompts and answers have the same number of tokens each."""
    prompt_tokens = PROMPT_TOKENS.get(objective, USUAL_PROMPT_TOKENS)
    rng = np.random.default_rng(SEED)
    language, tokenizer = english(rng), AutoTokenizer.from_pretrained(TOKENIZER)

    def text(tokens: int, after: str = "") -> str:
        before = len(tokenizer(after).input_ids)
        while True:
            words = language.write(rng, tokens).split(" ")
            for size in range(len(words) // 4, len(words) + 1):
                found = " ".join(words[:size])
                if len(tokenizer(after + found).input_ids) - before == tokens:
                    return found

    for number in range(count):
        prompt = f"{text(prompt_tokens - 1)}\n" if prompt_tokens > 1 else "\n"
        first, second = (text(ROW_TOKENS - prompt_tokens - 1, prompt) for _ in range(2))
        if objective == "kto":
            yield {"prompt": prompt, "completion": first, "label": bool(number % 2)}
        else:
            yield {"prompt": prompt, "chosen": first, "rejected": second}


def ids_in_order(directory: Path, *, labelled: bool) -> Iterator[dict[str, Any]]:
    """The rows as our plan trains them; every step has as many."""
    tokens, plan = TokenRows(directory / "data/tokens", "train"), read_plan(directory / "data/batches/plan.arrow")
    sizes = np.bincount(plan.step, weights=plan.sizes)
    expected = ROWS_OF_STEP * (1 if labelled else 2)
    assert (sizes[:-1] == expected).all(), f"steps have {sizes.tolist()} rows instead of {expected}"
    rows = plan.rows[: len(plan.rows) // expected * expected]
    for row in rows.tolist() if labelled else rows[::2].tolist():
        prompt, (first, second) = _divided(tokens, row)
        if labelled:
            found = {"completion_ids": first, "KL_completion_ids": second, "label": tokens.value(COLUMN, row)}
        else:
            found = {"chosen_ids": first, "rejected_ids": second}
        yield {"prompt_ids": prompt, **found}


def _divided(tokens: TokenRows, row: int) -> tuple[list[int], tuple[list[int], list[int]]]:
    """The prompt of rows `row` and `row` + 1, and the answer of each."""
    start = int(tokens.spans(row)[0, 0])
    first, second = (tokens.ids(number).tolist() for number in (row, row + 1))
    return first[:start], (first[start:], second[start:])


def ours(directory: Path) -> Run:
    """Run stage train, which measures some of its steps."""
    run_stage("train", directory)
    with (directory / "data/train/curves.csv").open(encoding="utf-8", newline="") as file:
        found = list(csv.DictReader(file))
    peak_bytes = read_json(directory / "data/train/figures.json")["peak_bytes_measured"]
    timed = [row for row in found if row["measured"] != "True"]
    return Run(
        losses=[float(row["loss"]) for row in found],
        seconds=[float(row["seconds"]) for row in timed],
        peak_bytes=peak_bytes,
    )


def trl(directory: Path, objective: str, steps: int, *, measured: bool = False) -> Run:
    """Run TRL's trainer."""
    out = directory / "trainer"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    arguments = {"beta": BETA[objective], "per_device_train_batch_size": ROWS_OF_STEP, "max_grad_norm": 1.0}
    case = {"objective": objective, "arguments": arguments, "steps": steps, "lr": LR, "threads": THREADS}
    case["measured"] = measured
    paths = (directory / "ids.jsonl", directory / "model", out)
    found = TRL.run("preference_steps.py", *paths, json.dumps(case), cwd=directory, cache=out).figures
    return Run(losses=found["losses"], seconds=found["seconds"], peak_bytes=found["peak_bytes"])


main = benchmark("preference_train", measure)

if __name__ == "__main__":
    main()
