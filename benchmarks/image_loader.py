"""How long a training step waits for its images, and whether memory stays flat over 2,000 of them.

A small Qwen2.5-VL trains on one thread of the CPU, with a photograph as JPEG in each row. A loader thread
(run.loader_threads) reads, decodes and processes images ahead of the step; without one, the training thread does it.
"""

import gc
import json
import shutil
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from PIL import Image
from torch.nn.functional import cross_entropy
from transformers import AutoModelForMultimodalLM

from benchmarks.chat_file import SEED
from benchmarks.harness import Bar, Measured, Row, at_most, benchmark
from benchmarks.processes import SCRATCH, run_stage
from data.synth import vision_model
from lean_finetune.images.attachment import images_of
from lean_finetune.model.model_config import read_config
from lean_finetune.plan.batch_plan import read_plan
from lean_finetune.step.batch_stream import load
from lean_finetune.step.token_rows import TokenRows
from tests.kit.write_params import write_params

IMAGES, QUICK_IMAGES = 2_000, 40
WIDTH, HEIGHT = 448, 336
THREADS = (0, 1)
WAIT_PERCENT_LIMIT = 5.0
GROWTH_PERCENT_LIMIT = 2.0
ROWS_OF_STEP = 4


def measure(quick: bool) -> Measured:
    """Write the images, plan, and train with each number of threads."""
    images = QUICK_IMAGES if quick else IMAGES
    directory = prepare(images)
    torch.set_num_threads(1)
    rows = [train(directory, threads) for threads in THREADS]
    bars: list[Bar] = []
    if not quick:
        waits = {row["threads"]: row["wait percent"] for row in rows}
        growth = max(row["memory growth percent"] for row in rows)
        bars = [
            at_most("1 thread: percent of the time that training waits", waits[1], WAIT_PERCENT_LIMIT),
            at_most("percent that the process grows after the second quarter, medians", growth, GROWTH_PERCENT_LIMIT),
        ]
    return Measured(rows=rows, bars=bars)


def prepare(images: int) -> Path:
    """Write model, images and rows, and run our stages up to the plan."""
    directory = (SCRATCH / "runs" / "image-loader").resolve()
    shutil.rmtree(directory, ignore_errors=True)
    (directory / "images").mkdir(parents=True)
    vision_model.write(directory / "model", SEED)
    draw = np.random.default_rng(SEED)
    with (directory / "rows.jsonl").open("w", encoding="utf-8") as file:
        for number in range(images):
            name = f"images/{number:04}.jpg"
            photograph(draw).save(directory / name, quality=90)
            turns = [
                {"role": "user", "content": f"<image>Which number is this? {number}"},
                {"role": "assistant", "content": str(number)},
            ]
            file.write(json.dumps({"messages": turns, "images": [name]}) + "\n")
    values = {
        "model.name": "model",
        "data.source": "rows.jsonl",
        "data.max_length": 1024,
        "data.heldout_fraction": 0.0,
        "bucket.max_tokens": 1024,
        "train.tokens_per_step": 1024 * ROWS_OF_STEP,
        "train.epochs": 1,
        "train.heldout_every_steps": None,
        "evaluate.generate_rows": 0,
        "run.progress": False,
    }
    write_params(directory, values)
    for stage in ("pin data", "pin model", "tokenize", "bucket"):
        run_stage(stage, directory)
    return directory


def photograph(draw: np.random.Generator) -> Image.Image:
    """Smooth areas with edges and grain, which JPEG compresses like a photograph."""
    areas = Image.fromarray(draw.integers(0, 256, (HEIGHT // 40, WIDTH // 40, 3), dtype=np.uint8))
    smooth = np.asarray(areas.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), np.int16)
    grain = draw.integers(-8, 9, (HEIGHT, WIDTH, 1), dtype=np.int16)
    return Image.fromarray(np.clip(smooth + grain, 0, 255).astype(np.uint8))


def train(directory: Path, threads: int) -> Row:
    """One epoch; how long it took, how long it waited for batches, and what memory the process took."""
    config = read_config(directory / "model", whole=True)
    tokens, plan = TokenRows(directory / "data/tokens", "train"), read_plan(directory / "data/batches/plan.arrow")
    shown = images_of(tokens.attached)
    assert shown is not None, "every row has an image"
    images = int(shown.bounds[-1])
    tokens.attached = (shown.for_model(directory / "model", config),)
    model: Any = AutoModelForMultimodalLM.from_pretrained(directory / "model", dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    memory, waited, process = [], 0.0, psutil.Process()
    gc.collect()
    start = time.perf_counter()
    with closing(load(tokens, plan, pad_id=0, threads=threads)) as stream:
        while True:
            asked = time.perf_counter()
            batch = next(stream, None)
            waited += time.perf_counter() - asked
            if batch is None:
                break
            arguments = {name: value for part in batch.parts for name, value in part.arguments.items()}
            logits_BTV = model(input_ids=batch.input_ids_BT, **arguments).logits
            cross_entropy(logits_BTV[:, :-1].flatten(0, 1), batch.input_ids_BT[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
            memory.append(process.memory_info().rss)
    seconds = time.perf_counter() - start
    quarters = [float(np.median(part)) for part in np.array_split(memory, 4)]
    return {
        "threads": threads,
        "images": images,
        "seconds": round(seconds, 1),
        "wait percent": round(100 * waited / seconds, 2),
        "ms waited for an image": round(1e3 * waited / images, 2),
        "MiB of each quarter": " ".join(str(int(value) >> 20) for value in quarters),
        "memory growth percent": round(100 * (max(quarters[2:]) / quarters[1] - 1), 2),
    }


if __name__ == "__main__":
    benchmark("image_loader", measure)()
