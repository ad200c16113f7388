"""One process of several that count what their allocator does while they share a run for real."""

import gc
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from lean_finetune.distributed.processes import World
from lean_finetune.distributed.sharding_modes import make_parallel
from lean_finetune.images.attachment import sizes_of
from lean_finetune.images.image_inputs import ImageInputs, ImagePart
from lean_finetune.memory.predict.traced_step import TracedSteps
from lean_finetune.memory.trace.cuda_kernels import without_launches
from lean_finetune.memory.trace.setting import Setting
from lean_finetune.step.batches import Batch, BatchShape, TokenPart, idle_batch, token_part
from lean_finetune.step.offload.activation_offload import make_offload
from lean_finetune.step.parallel_model import ParallelModel
from lean_finetune.step.run_optimizer import build_optimizer
from lean_finetune.step.step_loss import StepGoal
from lean_finetune.step.training_step import training_step
from lean_finetune.step.update.loss_scaler import loss_scaler
from lean_finetune.train.checkpoint.training_state import restored_after_fault
from lean_finetune.train.monitor.measured_peak import make_meter
from tests.distributed.image_rows import inputs_of
from tests.kit.estimate_cpu import make_code_books, without_onednn
from tests.kit.loaded import load_model
from tests.kit.specs import changed, random_batch
from tests.memory.common import host_bytes, joined, setting_of, shape
from tests.small_model import CPU, VOCABULARY

STEPS: dict[str, TracedSteps] = {
    "one turn": ((shape(4, 96, 200),), (shape(6, 64, 300),)),
    "two turns": ((shape(4, 96, 200), shape(2, 128, 100)), (shape(6, 64, 300),)),
    "joined": ((joined((96, 40, 24), 100), joined((64, 64, 32), 150)), (joined((80, 80), 80),)),
}


SETTLED_SECONDS = 0.002


@contextmanager
def as_nccl() -> Iterator[None]:
    """Gather and scatter in place, as NCCL does.

    gloo makes copies and frees them in its own threads, which the profiler does not observe: its count would grow with
    every layer. Sums and broadcasts are in place; a pause lets those threads free their buffers.
    """
    add, send, swap = dist.all_reduce, dist.broadcast, dist.all_to_all_single

    def settled(work: Any) -> Any:
        work.wait()
        time.sleep(SETTLED_SECONDS)
        return work

    def all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        work = settled(add(tensor, op=op, group=group, async_op=True))
        return work if async_op else None

    def broadcast(tensor: torch.Tensor, src: int, async_op: bool = False) -> Any:
        work = settled(send(tensor, src=src, async_op=True))
        return work if async_op else None

    def gather(output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False) -> None:
        for rank, part in enumerate(output_tensor.chunk(group.size())):
            if rank == group.rank() and part.data_ptr() != input_tensor.data_ptr():
                part.copy_(input_tensor)
            settled(send(part, group=group, group_src=rank, async_op=True))

    def scatter(output: torch.Tensor, input: torch.Tensor, group: Any, op: Any, async_op: bool = False) -> None:
        settled(add(input, op=op, group=group, async_op=True))
        output.copy_(input.chunk(group.size())[group.rank()])

    def exchange(output: torch.Tensor, input: torch.Tensor, group: Any) -> None:
        settled(swap(output, input, group=group, async_op=True))

    replaced = {
        "all_reduce": all_reduce,
        "broadcast": broadcast,
        _existing("all_gather_single", "all_gather_into_tensor"): gather,
        _existing("reduce_scatter_single", "reduce_scatter_tensor"): scatter,
        "all_to_all_single": exchange,
    }
    with ExitStack() as stack:
        for name, collective in replaced.items():
            stack.enter_context(patch.object(dist, name, collective))
        yield


def _existing(name: str, before: str) -> str:
    """The collective's name in this torch; until 2.11 FSDP2 called it by another one."""
    return name if hasattr(dist, name) else before


def shared_setting(mode: str, gpus: int, steps: str, context: int = 1, tensor: int = 1, **changes: Any) -> Setting:
    """A setting shared by some processes; `hsdp` in groups of two, each row by `context`, each product by `tensor`."""
    return setting_of(
        **changes,
        sharding=mode,
        shard_group_gpus=2 if mode == "hsdp" else None,
        context_parallel=context,
        tensor_parallel=tensor,
        gpus=gpus,
        accumulates_gradients=len(STEPS[steps][0]) > 1,
    )


def batch_of(shape: BatchShape, part: TokenPart | None) -> Batch:
    """A random batch, or a part of one with as many trained tokens as there can be."""
    if part is None:
        return random_batch(shape, VOCABULARY)
    length = shape.length // part.parts
    trained = min(shape.supervised, shape.rows * length)
    own = random_batch(replace(shape, length=length, supervised=trained, packed_lengths=None), VOCABULARY)
    complete = random_batch(shape, VOCABULARY).packed_rows
    positions = torch.arange(shape.length)[None] if complete is None else complete.positions_BT
    positions = positions.chunk(part.parts, dim=1)[part.index].clone()
    rows = None if complete is None else replace(complete, positions_BT=positions)
    return replace(own, packed_rows=rows, positions_BT=positions)


def with_images(batch: Batch, shape: BatchShape, inputs: ImageInputs | None) -> Batch:
    """The batch with black images, as many as the shape has; the meter counts them."""
    if inputs is None:
        return batch
    sizes = sizes_of(shape.attached)
    made = inputs.of_shapes(batch.input_ids_BT, sizes) if sizes else {}
    beside = any(one.beside for one in shape.attached)
    return replace(batch, parts=(ImagePart(shown=made, blank=inputs.blank if beside else {}),)).to(CPU)


IN_FLIGHT: TracedSteps = (
    (shape(4, 96, 200), shape(2, 128, 100), shape(6, 64, 300), shape(3, 96, 100)),
    (shape(6, 64, 300),),
)
"""Steps with more micro-batches than stages, and with fewer."""


def pipeline_setting(stage_layers: tuple[int, ...] | None, stages: int = 2, **changes: Any) -> Setting:
    """A setting of a pipeline."""
    stages = len(stage_layers or range(stages))
    return setting_of(
        **changes, pipeline_stages=stages, gpus=stages, stage_layers=stage_layers, accumulates_gradients=True
    )


def load_shared(directory: Path, setting: Setting, world: World, *, images: bool = False) -> ParallelModel:
    """The model, shared among the processes; with `images`, with its parts for them."""
    model = load_model(directory, setting.train, CPU, images=images)
    return make_parallel(model, setting.train, world, CPU, stage_layers=setting.stage_layers)


def count(
    world: World, directory: Path, setting: Setting, steps: TracedSteps, *, images: bool = False
) -> dict[str, int]:
    """Load and train under the CPU's meter, as train does; peaks by phase. With `images`, rows may have some."""
    part = token_part(setting.layout, world.rank)
    inputs = inputs_of(str(directory)) if images else None
    train, scratch = setting.train, Path(tempfile.gettempdir())
    offload = make_offload(train.offload_activations, train.compress_activations, CPU, scratch)
    make_code_books()
    for wanted in (one for step in steps for one in step if inputs is not None):
        with_images(batch_of(wanted, part), wanted, inputs)  # Caches of the processor.
    gc.collect()
    meter = make_meter(CPU)
    with as_nccl(), meter.window("run"):
        with meter.phase("load"):
            parallel = load_shared(directory, setting, world, images=images)
            optimizer = build_optimizer(parallel.local_shard, changed(setting.train, lr=1e-3, weight_decay=0.01))
        for shapes in steps:
            idle = setting.accumulates_gradients and len(shapes) == 1 and setting.layout.pipeline == 1

            def batches(shapes: Any = shapes, idle: bool = idle) -> Any:
                for wanted in shapes:
                    yield with_images(batch_of(wanted, part), wanted, inputs)
                if idle:
                    yield idle_batch(0, part)

            with restored_after_fault(CPU):
                training_step(
                    parallel,
                    optimizer,
                    batches(),
                    before=batches() if setting.train.row_kind.passes > 1 else (),
                    micro_batches=len(shapes) + idle,
                    goal=StepGoal.of_any_rows(setting.train, 300),
                    train=setting.train,
                    foreach=False,
                    phase=meter.phase,
                    guard=lambda losses, norm: None,
                    scaler=loss_scaler(setting.train),
                    offload=offload,
                )
    return dict(meter.result().peak_bytes_by_phase)


def do_peaks(world: World, *arguments: Any) -> dict[str, int]:
    """Peaks by phase, of each the largest of all processes; arguments as of `do_peaks_by_rank`."""
    by_rank = do_peaks_by_rank(world, *arguments)
    return {name: max(found[name] for found in by_rank) for name in by_rank[0]}


def do_peaks_by_rank(
    world: World, directory: Path, model: Path, setting: Setting, steps: TracedSteps, onednn: bool = False
) -> list[dict[str, int]]:
    """Peaks by phase of every process."""
    kernels = nullcontext() if onednn else without_onednn()
    with kernels, without_launches(setting.train.fused_kernels, 1):  # Triton has no kernels for a CPU.
        return gathered(world, count(world, model, setting, steps))


def gathered(world: World, found: dict[str, int]) -> list[dict[str, int]]:
    """Peaks by phase of every process, from those of this one."""
    peaks = torch.zeros(world.size, len(found), dtype=torch.int64)
    peaks[world.rank] = torch.tensor([found[name] for name in sorted(found)])
    dist.all_reduce(peaks)
    return [dict(zip(sorted(found), row, strict=True)) for row in peaks.tolist()]


def do_image_peaks(
    world: World, directory: Path, model: Path, setting: Setting, steps: tuple[TracedSteps, ...]
) -> list[dict[str, int]]:
    """Peaks by phase of every process; `steps` are those of each."""
    with without_onednn():
        return gathered(world, count(world, model, setting, steps[world.rank], images=True))


def do_host_bytes(world: World, directory: Path, model: Path, setting: Setting) -> int:
    """Bytes of what the optimizer of train.offload=optimizer allocates: the most of all processes."""
    parallel = load_shared(model, setting, world)
    most = torch.tensor(host_bytes(build_optimizer(parallel.local_shard, setting.train), setting))
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most)
