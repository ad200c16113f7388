"""One of several processes that share training steps: ours in each mode, plain DDP, and Hugging Face's Trainer.

Run as `python -m benchmarks.rivals.shared_steps MODEL OUT` with torchrun's variables set. Each line of standard input
is a JSON request: way, steps, load. The answer has the seconds of each step and the bytes sent over the loopback; with
`load`, the bytes read and allocated while the model was loaded.
"""

import json
import os
import sys
import time
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from benchmarks.specs import model_spec
from lean_finetune.distributed.processes import World
from lean_finetune.distributed.sharding_modes import ShardSpec, make_parallel
from lean_finetune.model.load_model import load_model, uninitialized_model
from lean_finetune.model.model_config import read_config
from lean_finetune.step.batches import Batch, collate
from lean_finetune.step.run_optimizer import OptimSpec, build_optimizer
from lean_finetune.step.training_step import StepSpec, training_step

CPU = torch.device("cpu")
ROWS, LENGTH = 4, 128
"""Shape of each process's micro-batch, one per step."""
LR, MAX_GRAD_NORM = 1e-4, 1.0
LOOPBACK = "lo"
SPEC = model_spec("full", "fp32", grad_ckpt=False)


def token_rows(rank: int, vocabulary: int) -> list[list[int]]:
    """The rows of a process as token ids."""
    draw = torch.Generator().manual_seed(rank)
    return torch.randint(3, vocabulary, (ROWS, LENGTH), generator=draw).tolist()


def load_ours(directory: Path, mode: str, world: World) -> Any:
    """Load the model as stage train shares it."""
    sharing = ShardSpec(mode=mode)  # type: ignore[arg-type]
    reads = sharing.reads_weights(world, "full")
    model = load_model(directory, SPEC, CPU) if reads else uninitialized_model(read_config(directory), SPEC, CPU)
    return make_parallel(model, world, sharing, CPU)


class Ours:
    """The training step of stage train."""

    def __init__(self, directory: Path, mode: str, world: World):
        """Load the model and make the optimizer."""
        self._parallel = load_ours(directory, mode, world)
        spec = OptimSpec(name="adamw", lr=LR, weight_decay=0.0, schedule="constant", warmup_fraction=0.0)
        self._optimizer = build_optimizer(self._parallel.owned, spec)
        rows = token_rows(world.rank, read_config(directory).vocab_size)
        self._rows = [(np.array(row), np.array([[0, LENGTH]])) for row in rows]
        self._supervised = ROWS * (LENGTH - 1) * world.size

    def run(self, steps: int) -> list[float]:
        """Seconds of each step."""
        batch: Batch = collate(self._rows, LENGTH, 0, flat=False)
        seconds = []
        for _ in range(steps):
            start = time.perf_counter()
            result = training_step(
                self._parallel.owned,
                self._optimizer,
                iter([batch]),
                supervised_tokens=self._supervised,
                model_spec=SPEC,
                spec=StepSpec(loss_chunk=None, max_grad_norm=MAX_GRAD_NORM, foreach=False),
                phase=lambda name: nullcontext(),
                guard=lambda losses, norm: None,
                parallel=self._parallel,
                micro_batches=1,
            )
            result.loss.item()
            seconds.append(time.perf_counter() - start)
        return seconds


class PlainDdp:
    """The loop of a tutorial: DDP, clipping, fused AdamW."""

    def __init__(self, directory: Path, world: World):
        """Load the model and make the optimizer."""
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self._model = torch.nn.parallel.DistributedDataParallel(model)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LR, weight_decay=0.0, fused=True)
        self._ids = torch.tensor(token_rows(world.rank, model.config.vocab_size))

    def run(self, steps: int) -> list[float]:
        """Seconds of each step."""
        seconds = []
        for _ in range(steps):
            start = time.perf_counter()
            loss = self._model(input_ids=self._ids, labels=self._ids).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), MAX_GRAD_NORM)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            loss.item()
            seconds.append(time.perf_counter() - start)
        return seconds


class Clock(TrainerCallback):
    """Times the Trainer's steps."""

    def __init__(self) -> None:
        """Start with no steps."""
        self.seconds: list[float] = []
        self._start = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock, after the rows were fetched."""
        self._start = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Stop the clock, after the update."""
        self.seconds.append(time.perf_counter() - self._start)


class HfTrainer:
    """Hugging Face's Trainer, which uses DDP."""

    def __init__(self, directory: Path, world: World, out: str):
        """Load the model and make the optimizer."""
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self._rows = [
            {"input_ids": row, "labels": row} for row in token_rows(world.rank, self._model.config.vocab_size)
        ]
        self._out = out

    def run(self, steps: int) -> list[float]:
        """Seconds of each step."""
        clock = Clock()
        arguments = TrainingArguments(
            output_dir=self._out,
            max_steps=steps,
            per_device_train_batch_size=ROWS,
            learning_rate=LR,
            max_grad_norm=MAX_GRAD_NORM,
            lr_scheduler_type="constant",
            optim="adamw_torch_fused",
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            ddp_backend="gloo",
            ddp_find_unused_parameters=False,
            dataloader_pin_memory=False,
        )
        rows = self._rows * (steps * dist.get_world_size())
        Trainer(model=self._model, args=arguments, train_dataset=rows, callbacks=[clock]).train()
        return clock.seconds


def loaded(directory: Path, mode: str, world: World) -> dict[str, Any]:
    """Bytes that all processes read from files, and that each allocated, while a model was loaded."""
    process = psutil.Process()
    read, own = process.io_counters().read_chars, process.memory_full_info().uss
    parallel = load_ours(directory, mode, world)
    figures = torch.zeros(world.size, 2, dtype=torch.int64)
    figures[world.rank, 0] = process.io_counters().read_chars - read
    figures[world.rank, 1] = process.memory_full_info().uss - own
    dist.all_reduce(figures)
    del parallel
    return {"read_bytes": int(figures[:, 0].sum()), "own_bytes": figures[:, 1].tolist()}


def main() -> None:
    """Answer requests until standard input ends."""
    directory, out = Path(sys.argv[1]), sys.argv[2]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    world = World(rank=rank, size=size, local_rank=rank, local_size=size)
    ways: dict[str, Any] = {}
    for line in sys.stdin:
        request = json.loads(line)
        way, steps = request["way"], request["steps"]
        if request.get("load"):
            answer = loaded(directory, way, world)
        else:
            if way not in ways:
                made = {"ddp_plain": lambda: PlainDdp(directory, world), "hf": lambda: HfTrainer(directory, world, out)}
                ways[way] = made[way]() if way in made else Ours(directory, way, world)
            dist.barrier()
            sent = psutil.net_io_counters(pernic=True)[LOOPBACK].bytes_sent
            seconds = ways[way].run(steps)
            dist.barrier()
            sent = psutil.net_io_counters(pernic=True)[LOOPBACK].bytes_sent - sent
            answer = {"seconds": seconds, "sent_bytes": sent}
        print(json.dumps(answer), file=answers, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
