"""One of several processes that share training steps: ours in each mode, plain DDP, and Hugging Face's Trainer.

Run by torchrun as `-m benchmarks.rivals.shared_steps SMALL MODEL OUT ROUNDS`. All processes load in every mode, first
the small model, since PyTorch then reads its own source files. Then they run each way in turn. The last line that the
first one prints is JSON: the bytes read and allocated by each load, and by way and round the seconds of each step and
the bytes sent over the loopback.
"""

import json
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from benchmarks.harness import interleaved
from lean_finetune.config.field_types import Method, Sharding
from lean_finetune.config.schema import Train
from lean_finetune.distributed.processes import World
from lean_finetune.distributed.sharding_modes import load_parallel
from lean_finetune.model.model_config import read_config
from lean_finetune.step.batches import collate, part_of, token_part
from lean_finetune.step.offload.activation_offload import KEPT
from lean_finetune.step.parallel_model import ParallelModel
from lean_finetune.step.run_optimizer import build_optimizer
from lean_finetune.step.step_loss import StepGoal
from lean_finetune.step.training_step import training_step
from lean_finetune.step.update.loss_scaler import LossScaler
from tests.kit.specs import changed, train_of

CPU = torch.device("cpu")
ROWS, LENGTH = 4, 128
"""Shape of each process's micro-batch, one per step."""
LR, MAX_GRAD_NORM = 1e-4, 1.0
LOSS_CHUNK = 512
LOOPBACK = "lo"
LAYERS = 4
MODES: tuple[Sharding, ...] = ("ddp", "zero1", "zero2", "zero3")


Sharing = dict[str, Any]
"""Parameters of section train that say how processes share a run."""


def ways_of(processes: int) -> dict[str, Sharing]:
    """Ways of all processes to share a run with complete rows, divided products, rows or layers."""
    return {
        **{mode: {"sharding": mode} for mode in MODES},
        "tensor_parallel": {"tensor_parallel": processes},
        "context_parallel": {"sharding": "ddp", "context_parallel": processes},
        "context_parallel x zero3": {"sharding": "zero3", "context_parallel": processes},
        "pipeline": {"pipeline_stages": processes},
    }


OF_FOUR: dict[str, Sharing] = {
    "hsdp": {"sharding": "hsdp", "shard_group_gpus": 2},
    "tensor_parallel x zero3": {"sharding": "zero3", "tensor_parallel": 2},
    "context_parallel x zero3": {"sharding": "zero3", "context_parallel": 2},
}
"""Ways that need four processes."""
ADAPTED: tuple[Method, ...] = ("lora", "qlora")
OURS: dict[int, dict[tuple[Method, str], Sharing]] = {
    2: {(method, way): sharing for method in ("full", *ADAPTED) for way, sharing in ways_of(2).items()},
    4: {("full", way): sharing for way, sharing in {**ways_of(4), **OF_FOUR}.items()},
}
"""Ways to share a run, by the number of processes."""
Way = tuple[Method, str]
"""Method, and how processes share a run."""
PLAIN: Way = ("full", "plain DDP")
HF: Way = ("full", "HF Trainer (DDP)")
STEPS = 6
WARM_STEPS = 1
"""First steps of each round, which do not count: the Trainer builds its DDP in each."""


def spec_of(method: Method, sharing: Sharing) -> Train:
    """A model without memory switches, as the other loops have it."""
    return train_of(method, "fp32", grad_ckpt=False, **sharing)


def load_shared(directory: Path, train: Train, world: World) -> ParallelModel:
    """Load a model, with equal stages where it has any."""
    stages = train.pipeline_stages
    layers = (LAYERS // stages,) * stages if stages > 1 else None
    return load_parallel(directory, read_config(directory), train, 1, world, CPU, stage_layers=layers)


def token_rows(rank: int, vocabulary: int) -> list[list[int]]:
    """The rows of a process as token ids."""
    draw = torch.Generator().manual_seed(rank)
    return torch.randint(3, vocabulary, (ROWS, LENGTH), generator=draw).tolist()


def load_plain(directory: Path) -> Any:
    """Load the model as scripts do."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


Run = Callable[[int], list[float]]
"""Runs so many steps and returns the seconds of each."""


def timed(step: Callable[[], torch.Tensor], steps: int) -> list[float]:
    """Seconds of each step, up to the value of its loss."""
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        step().item()
        seconds.append(time.perf_counter() - start)
    return seconds


def ours(directory: Path, method: Method, sharing: Sharing, world: World) -> Run:
    """The training step of stage train; processes of one index in dimension `data` have the rows of all of them."""
    train = spec_of(method, sharing)
    chunk = LOSS_CHUNK if train.tensor_parallel > 1 else None
    train = changed(train, lr=LR, loss_chunk=chunk, max_grad_norm=MAX_GRAD_NORM)
    parallel = load_shared(directory, train, world)
    ranks = range(world.size)[parallel.place.data :: parallel.layout.data]
    optimizer = build_optimizer(parallel.local_shard, train)
    rows = [row for rank in ranks for row in token_rows(rank, read_config(directory).vocab_size)]
    each = [(np.array(row), np.array([[0, LENGTH]])) for row in rows]
    size = ROWS if train.pipeline_stages > 1 else len(each)
    batches = [collate(each[start : start + size], LENGTH, 0) for start in range(0, len(each), size)]
    if (part := token_part(parallel.layout, world.rank)) is not None:
        batches = [part_of(batch, part) for batch in batches]

    def step() -> torch.Tensor:
        return training_step(
            parallel,
            optimizer,
            iter(batches),
            before=(),
            micro_batches=len(batches),
            goal=StepGoal.of_any_rows(train, ROWS * (LENGTH - 1) * world.size),
            train=train,
            foreach=False,
            phase=lambda name: nullcontext(),
            guard=lambda losses, norm: None,
            scaler=LossScaler(),
            offload=KEPT,
        ).loss

    return partial(timed, step)


def plain_ddp(directory: Path, world: World) -> Run:
    """The loop of a tutorial: DDP, clipping, fused AdamW."""
    model = torch.nn.parallel.DistributedDataParallel(load_plain(directory))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=True)
    ids = torch.tensor(token_rows(world.rank, model.module.config.vocab_size))

    def step() -> torch.Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return partial(timed, step)


class Clock(TrainerCallback):
    """Times the Trainer's steps."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._start = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock, after the rows were fetched."""
        self._start = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Stop the clock, after the update."""
        self.seconds.append(time.perf_counter() - self._start)


def hf_trainer(directory: Path, world: World, out: str) -> Run:
    """Hugging Face's Trainer, which uses DDP."""
    model = load_plain(directory)
    rows = [{"input_ids": row, "labels": row} for row in token_rows(world.rank, model.config.vocab_size)]

    def run(steps: int) -> list[float]:
        clock = Clock()
        arguments = TrainingArguments(
            output_dir=out,
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
        dataset = rows * (steps * world.size)
        Trainer(model=model, args=arguments, train_dataset=dataset, callbacks=[clock]).train()
        return clock.seconds

    return run


def loaded(directory: Path, method: Method, sharing: Sharing, world: World) -> dict[str, Any]:
    """Bytes that all processes read from files, and that each allocated, while a model was loaded."""
    process = psutil.Process()
    read, own = process.io_counters().read_chars, process.memory_full_info().uss
    parallel = load_shared(directory, spec_of(method, sharing), world)
    figures = torch.zeros(world.size, 2, dtype=torch.int64)
    figures[world.rank, 0] = process.io_counters().read_chars - read
    figures[world.rank, 1] = process.memory_full_info().uss - own
    dist.all_reduce(figures)
    del parallel
    return {"read_bytes": int(figures[:, 0].sum()), "own_bytes": figures[:, 1].tolist()}


def measured(run: Run) -> dict[str, Any]:
    """Seconds of the steps of a round, and bytes that all processes sent."""
    dist.barrier()
    sent = psutil.net_io_counters(pernic=True)[LOOPBACK].bytes_sent
    seconds = run(WARM_STEPS + STEPS)
    dist.barrier()
    return {"seconds": seconds, "sent_bytes": psutil.net_io_counters(pernic=True)[LOOPBACK].bytes_sent - sent}


def main() -> None:
    """Load, run all rounds, and print."""
    small, directory, out, rounds = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    world = World(rank=rank, size=size, local_rank=rank, local_size=size)
    for (method, _), sharing in OURS[size].items():
        load_shared(small, spec_of(method, sharing), world)
    loads = {name: loaded(directory, name[0], sharing, world) for name, sharing in OURS[size].items()}
    ways: dict[Way, Run] = {name: ours(directory, name[0], sharing, world) for name, sharing in OURS[size].items()}
    ways |= {PLAIN: plain_ddp(directory, world), HF: hf_trainer(directory, world, out)}
    steps = interleaved({name: partial(measured, run) for name, run in ways.items()}, rounds)
    dist.destroy_process_group()
    if world.is_first:
        print(json.dumps({"loads": list(loads.items()), "steps": list(steps.items())}))


if __name__ == "__main__":
    main()
