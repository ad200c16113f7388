"""Predicted memory of each of several GPUs that train an 8B, for every sharding mode, and the seconds it takes.

Nothing is measured but the seconds: CPU seconds after imports, in a new process with one thread for each case.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from benchmarks.gpu.model_configs import MODELS
from benchmarks.harness import Measured, Row, at_most, benchmark, in_new_processes
from lean_finetune.config.field_types import Method, OffloadState, Precision, Sharding
from lean_finetune.config.parallel_layout import ParallelLayout
from lean_finetune.memory.devices import resolve_gpu
from lean_finetune.memory.predict.peak import predict
from lean_finetune.memory.predict.traced_step import TracedModel
from lean_finetune.memory.trace.cuda_kernels import target_of
from lean_finetune.memory.trace.setting import Setting
from tests.kit.specs import padded, train_of

MODEL = MODELS["Llama-3.1-8B"]
TOKENS = 2048
TURNS = 2
"""Micro-batches of a GPU in a step."""
METHODS: tuple[Method, ...] = ("full", "lora", "qlora")
MODES: tuple[Sharding, ...] = ("ddp", "zero1", "zero2", "zero3", "hsdp")
GPUS = (2, 8, 64)
DIVIDED: tuple[tuple[Sharding, ParallelLayout, str], ...] = (
    *(("none", ParallelLayout(data=1, pipeline=stages), "RTX-4090") for stages in (2, 4)),
    *(("none", ParallelLayout(data=1, tensor=parts), "RTX-4090") for parts in (2, 4)),
    ("zero3", ParallelLayout(data=4, tensor=2), "A100-80GB"),
    ("ddp", ParallelLayout(data=1, context=2), "A100-80GB"),
    ("zero3", ParallelLayout(data=1, context=8), "A100-80GB"),
    ("zero3", ParallelLayout(data=4, context=2), "A100-80GB"),
)
"""Runs whose layers, matrices or rows are divided among GPUs."""
NODE_GPUS = 8
MOST_SECONDS = 20
QUICK_CASES = 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run on one or several GPUs."""

    method: Method
    mode: Sharding
    gpus: int
    divided: ParallelLayout | None = None
    """Layers, matrices or rows divided among GPUs; None: each GPU takes other rows."""
    offload: OffloadState = "none"
    card: str = "A100-80GB"
    precision: Precision = "bf16"

    @property
    def layout(self) -> ParallelLayout:
        """The dimensions of the mesh."""
        return self.divided or ParallelLayout(data=self.gpus)

    @property
    def group_gpus(self) -> int | None:
        """GPUs of a group of hsdp: a node's, or half of a single node's."""
        return None if self.mode != "hsdp" else min(NODE_GPUS, self.gpus // 2)

    @property
    def setting(self) -> Setting:
        """The setting that stage estimate would read from the parameters."""
        alone = Setting(train=train_of(self.method, self.precision, loss_chunk=512, max_grad_norm=1.0))
        if self.gpus == 1:
            return alone
        shared = alone.with_train(
            sharding=self.mode,
            shard_group_gpus=self.group_gpus,
            context_parallel=self.layout.context,
            tensor_parallel=self.layout.tensor,
            pipeline_stages=self.layout.pipeline,
            offload=self.offload,
        )
        return replace(shared, gpus=self.gpus, accumulates_gradients=True)


def cases() -> Iterator[Case]:
    """Every mode, method and number of GPUs; then the other rows of docs/many-gpus.md."""
    for method in METHODS:
        yield Case(method=method, mode="none", gpus=1)
        for mode, layout, card in DIVIDED:
            yield Case(method=method, mode=mode, gpus=layout.size, divided=layout, card=card)
        for mode in MODES:
            for gpus in GPUS:
                if mode != "hsdp" or gpus > GPUS[0]:  # A group of one GPU is ddp.
                    yield Case(method=method, mode=mode, gpus=gpus)
    for offload in ("optimizer", "parameters"):
        for gpus in GPUS:
            yield Case(method="full", mode="zero3", gpus=gpus, offload=offload)
    for mode in ("none", "ddp", "zero3"):
        yield Case(method="qlora", mode=mode, gpus=1 if mode == "none" else 8, card="P4", precision="fp16")


def predicted(case: Case) -> Row:
    """Bytes of tensors on one GPU, and the seconds of the prediction."""
    torch.set_num_threads(1)
    device, _ = resolve_gpu(case.card)
    batch = padded(1, TOKENS, TOKENS // 2)
    start = time.process_time()
    found = predict(
        TracedModel(MODEL, case.setting, target_of(device)), ((batch,) * (TURNS + case.layout.pipeline - 1),)
    )
    cpu_s = time.process_time() - start
    parts = found.peak.by_category
    return {
        "method": case.method,
        "sharding": case.mode,
        "gpus": case.gpus,
        "group_gpus": case.group_gpus,
        **vars(case.layout),
        "stage_layers": [layers for layers, _ in found.stages] or None,
        "offload": case.offload,
        "card": case.card,
        "peak_bytes": found.peak.bytes,
        "phase": found.worst_phase,
        "weights_bytes": parts.get("weights", 0),
        "gradients_bytes": parts.get("gradients", 0),
        "optimizer_bytes": parts.get("optimizer", 0),
        "sharding_bytes": parts.get("sharding", 0),
        "layers_traced": found.layers_traced,
        "cpu_s": cpu_s,
    }


def measure(quick: bool) -> Measured:
    """Predict every case once; with `quick` the first two only."""
    chosen = list(cases())[: QUICK_CASES if quick else None]
    rows = in_new_processes(predicted, chosen, "fork")
    slowest = max(row["cpu_s"] / row["pipeline"] for row in rows)
    return Measured(rows=rows, bars=[at_most("slowest case, CPU seconds for a stage", slowest, MOST_SECONDS)])


if __name__ == "__main__":
    benchmark("estimate_sharded", measure)()
