"""What each switch changes of the losses and weights: the table of docs/memory-switches.md and its bounds.

Every row trains the same rows for `STEPS` steps on one CPU thread and is compared with the plain run of its method:
the largest difference of a loss, and the norm of the difference of what was learnt, as a share of its own norm.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from lean_finetune.config.field_types import CompressActivations
from lean_finetune.config.schema import Train
from lean_finetune.step.batches import Batch
from lean_finetune.step.offload.activation_offload import make_offload
from tests.conftest import ROOT
from tests.kit.loaded import load_model
from tests.kit.specs import changed
from tests.small_model import CPU, spec_of
from tests.step.common import joined, run, split

STEPS = 20
PLAIN = spec_of(optimizer="adamw", lr=2e-3, weight_decay=0.01, schedule="constant", warmup_fraction=0.0)
LION_RATE = 4e-4
"""Lion takes a third to a tenth of AdamW's."""
DOCS = ROOT / "docs/memory-switches.md"


METHODS = ("full", "lora", "qlora", "int8_lora")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A switch against the plain run of its method."""

    switch: str
    """As in `dvc exp run -S`, without `train.`."""
    method: str = "full"
    model: dict[str, Any] = field(default_factory=dict)
    optim: dict[str, Any] = field(default_factory=dict)
    chunk: int | None = None
    sizes: tuple[int, ...] = (3, 5)
    joined: bool = False
    """Rows of a micro-batch joined (bucket.mode=packed)."""
    on_disk: bool = False
    """Offload activations to a file."""
    bits: CompressActivations = "none"
    """Compress activations."""
    clipped: bool = True
    in_backward: bool = False
    plain: str = ""
    """Its baseline in `PLAINS`; blank = that of its method."""
    loss: float = 0.0
    """Bound of the difference of any loss; 0 = equal bits."""
    learnt: float = 0.0
    """Bound of ‖difference‖ / ‖change of the weights‖; 0 = equal bits."""


CHECKPOINTED = {"grad_ckpt": True}
ROUNDING: dict[str, Any] = {"loss": 1e-5, "learnt": 1e-4}
MEMORY_ONLY = [
    *(Row(switch="grad_ckpt=true", method=method, model=CHECKPOINTED) for method in METHODS),
    *(
        Row(switch=f"grad_ckpt=true grad_ckpt_policy={policy}", method=method, model=model)
        for policy, more in (("first_n", {"grad_ckpt_layers": 1}), ("every_n", {}), ("selective", {}))
        for method in ("full", "lora", "qlora")
        for model in [{**CHECKPOINTED, "grad_ckpt_policy": policy, **more}]
    ),
    *(Row(switch="offload_activations=disk", method=method, on_disk=True) for method in METHODS),
    Row(switch="grad_ckpt=true offload_activations=disk", method="qlora", model=CHECKPOINTED, on_disk=True),
    Row(switch="offload=optimizer", optim={"offload": "optimizer"}),
    Row(switch="offload=optimizer", method="qlora", optim={"offload": "optimizer"}),
    Row(
        switch="optimizer_in_backward=true max_grad_norm=null",
        plain="unclipped",
        clipped=False,
        sizes=(8,),
        in_backward=True,
    ),
    *(
        Row(switch="grad_ckpt=true with lora.dropout=0.1", method=method, plain=f"{method} with dropout", model=model)
        for method in ("lora", "int8_lora")
        for model in [{**CHECKPOINTED, "lora_dropout": 0.1}]
    ),
    Row(switch="attention=eager", model={"attention": "eager"}, **ROUNDING),
    Row(switch="loss_chunk=16", chunk=16, **ROUNDING),
    Row(switch="smaller bucket.max_tokens", sizes=(1,) * 8, **ROUNDING),
    *(Row(switch="bucket.mode=packed", method=method, joined=True, **ROUNDING) for method in ("full", "lora", "qlora")),
]
BF16, FP16 = {"precision": "bf16"}, {"precision": "fp16"}
MASTER, LION_8BIT = {"master_weights": True}, {"optimizer": "lion_8bit", "lr": LION_RATE}
INT8, FP8 = "compress_activations=int8", "compress_activations=fp8"
STORED = "grad_ckpt=true offload_activations=disk"
CHECKPOINTED_ON_DISK: dict[str, Any] = {"method": "qlora", "model": CHECKPOINTED, "on_disk": True}
OTHER_ARITHMETIC = [
    Row(switch="optimizer=paged_adamw_32bit", optim={"optimizer": "paged_adamw_32bit"}, **ROUNDING),
    Row(switch="optimizer=adamw_8bit", optim={"optimizer": "adamw_8bit"}, loss=0.005, learnt=0.1),
    Row(switch="optimizer=paged_adamw_8bit", optim={"optimizer": "paged_adamw_8bit"}, loss=0.005, learnt=0.1),
    Row(switch="optimizer=lion_8bit against lion", plain="lion", optim=LION_8BIT, loss=0.005, learnt=0.2),
    *(
        Row(switch=f"sequence_tiles=4{more}", method=method, model={"sequence_tiles": 4, **model}, **ROUNDING)
        for method in ("full", "lora", "qlora")
        for more, model in (("", {}), (" grad_ckpt=true", CHECKPOINTED))
    ),
    *(Row(switch=INT8, method=method, bits="int8", loss=0.005, learnt=0.15) for method in METHODS),
    *(Row(switch=FP8, method=method, bits="fp8", loss=0.005, learnt=0.2) for method in METHODS),
    Row(switch=f"{INT8} offload_activations=disk", method="lora", bits="int8", on_disk=True, loss=0.005, learnt=0.15),
    *(
        Row(switch=f"{INT8} grad_ckpt=true", method=method, bits="int8", model=CHECKPOINTED, loss=0.005, learnt=0.1)
        for method in METHODS
    ),
    *(
        Row(switch=f"{FP8} grad_ckpt=true", method=method, bits="fp8", model=CHECKPOINTED, loss=0.005, learnt=0.15)
        for method in ("full", "lora")
    ),
    Row(switch=f"{FP8} offload_activations=disk", method="lora", bits="fp8", on_disk=True, loss=0.005, learnt=0.2),
    Row(switch=f"{INT8} {STORED}", bits="int8", loss=0.005, learnt=0.1, **CHECKPOINTED_ON_DISK),
    Row(switch=f"{FP8} {STORED}", bits="fp8", loss=0.005, learnt=0.15, **CHECKPOINTED_ON_DISK),
    Row(switch="precision=bf16", model=BF16, loss=0.2, learnt=0.2),
    Row(switch="precision=bf16 master_weights=true", model=BF16, optim=MASTER, loss=0.02, learnt=0.1),
    Row(switch="precision=fp16", model=FP16, loss=0.001, learnt=0.02),
    Row(switch="precision=bf16", method="lora", model=BF16, loss=0.002, learnt=0.1),
    Row(switch="precision=fp16", method="lora", model=FP16, loss=0.0003, learnt=0.05),
    Row(switch="precision=pure_bf16", method="lora", model={"precision": "pure_bf16"}, loss=0.02, learnt=0.1),
    Row(switch="precision=bf16", method="qlora", model=BF16, loss=0.002, learnt=0.1),
    Row(switch="precision=fp16", method="qlora", model=FP16, loss=0.0003, learnt=0.05),
    Row(switch="precision=bf16", method="int8_lora", model=BF16, loss=0.002, learnt=0.1),
    Row(switch="precision=fp16", method="int8_lora", model=FP16, loss=0.0003, learnt=0.05),
    Row(switch="quant.double=false", method="qlora", model={"quant_double": False}, loss=0.001, learnt=0.1),
    Row(switch="quant.type=fp4", method="qlora", model={"quant_type": "fp4"}, loss=0.01, learnt=0.8),
]
ROWS = MEMORY_ONLY + OTHER_ARITHMETIC
FAST = [row for row in MEMORY_ONLY if row.method == "lora" or row.optim or row.loss] + OTHER_ARITHMETIC[:1]
"""Rows of the fast tests; the slow ones check all."""

PLAINS = {
    **{method: Row(switch="plain", method=method) for method in METHODS},
    **{
        f"{method} with dropout": Row(switch="lora.dropout=0.1", method=method, model={"lora_dropout": 0.1})
        for method in ("lora", "int8_lora")
    },
    "unclipped": Row(switch="max_grad_norm=null", clipped=False, sizes=(8,)),
    "lion": Row(switch="optimizer=lion", optim={"optimizer": "lion", "lr": LION_RATE}),
}
"""Baselines."""

WITHOUT_ROW = {
    "vision": "of rows with images, and changes what is trained: tests/train/test_images.py",
    "projector": "as vision",
    "method": "a column of the table",
    "grad_ckpt_every": "read by grad_ckpt_policy=every_n, which has one",
    "grad_ckpt_layers": "read by grad_ckpt_policy=first_n, which has one",
    "expandable_segments": "of a GPU's allocator: no kernel sees it",
    "fused_kernels": "of a GPU: benchmarks/fused_kernels.py compares losses and gradients",
    "fused_norms": "of a GPU: tests/model/test_fused_norms.py",
    "sharding": "of several GPUs: tests/distributed/test_parity.py",
    "offload_to": "bit-equal with every optimizer: tests/step/test_disk_state.py",
    "shard_group_gpus": "of several GPUs: tests/distributed/test_parity.py",
    **dict.fromkeys(
        ("context_parallel", "tensor_parallel", "pipeline_stages"), "of several GPUs: tests/distributed/test_layouts.py"
    ),
    **dict.fromkeys(
        ("lr", "weight_decay", "schedule", "warmup_fraction", "epochs", "tokens_per_step"), "what is learnt"
    ),
    **dict.fromkeys(("heldout_every_steps", "heldout_rows"), "what is looked at: tests/train/test_loop.py"),
    **dict.fromkeys(("objective", "preference"), "what is learnt: tests/step/test_preference_loss.py"),
    **dict.fromkeys(("keep", "best_by", "stop_after_no_gain"), "whose weights are kept: tests/train/test_kept_step.py"),
    "lora": "what is learnt: tests/model/test_adapters.py",
    **dict.fromkeys(("router", "router_aux_loss"), "what is learnt, of mixtures: tests/model/experts/test_experts.py"),
    "merge": "after training: tests/model/test_adapters.py",
}
"""Keys of `train` that the table leaves out, and why."""


@dataclass(frozen=True, kw_only=True)
class Learnt:
    """Losses and trained tensors of a run."""

    losses: list[float]
    change: dict[str, torch.Tensor]
    """What training added to each trained tensor."""


def micro_batches(row: Row) -> list[Batch]:
    """The batches of the row's run."""
    return joined(list(row.sizes)) if row.joined else split(list(row.sizes))


def learn(directory: Path, row: Row) -> Learnt:
    """Train with the row's switch."""
    start = load_model(directory, spec_of(method=row.method, **row.model), CPU, seed=1)
    before = {name: p.detach().float().clone() for name, p in start.named_parameters() if p.requires_grad}
    optim = changed(PLAIN, **row.optim)
    scratch = directory.parent / "scratch"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        results, weights = run(
            directory,
            micro_batches(row),
            chunk=row.chunk,
            offload=make_offload("disk" if row.on_disk else "none", row.bits, CPU, scratch),
            steps=STEPS,
            optim=optim,
            method=row.method,
            max_grad_norm=1.0 if row.clipped else None,
            in_backward=row.in_backward,
            **row.model,
        )
    finally:
        torch.set_num_threads(threads)
    losses = [result.loss.item() for result in results]
    return Learnt(losses=losses, change={name: value.float() - before[name] for name, value in weights.items()})


@pytest.fixture(scope="module")
def plain(small_llama: Path) -> Callable[[str], Learnt]:
    """Run a baseline of `PLAINS` once, when it is first needed."""
    return lru_cache(None)(lambda name: learn(small_llama, PLAINS[name]))


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=() if row in FAST else pytest.mark.slow) for row in ROWS],
    ids=lambda row: f"{row.method}, {row.switch}",
)
def test_switch_changes_losses_and_weights_within_its_bounds(
    small_llama: Path, plain: Callable[[str], Learnt], row: Row
):
    """A memory switch that changes what is learnt."""
    ours, baseline = learn(small_llama, row), plain(row.plain or row.method)
    assert max(abs(a - b) for a, b in zip(ours.losses, baseline.losses, strict=True)) <= row.loss
    apart = torch.stack([(ours.change[name] - baseline.change[name]).norm() for name in ours.change]).norm()
    assert apart <= row.learnt * torch.stack([change.norm() for change in baseline.change.values()]).norm()


def test_every_switch_of_training_has_a_row_or_a_reason():
    """A new switch that is not compared with the plain run."""
    tested = {re.split("[.=]", part)[0] for row in ROWS for part in row.switch.split()}
    assert set(Train.model_fields) <= tested | WITHOUT_ROW.keys()


def test_table_in_the_docs_has_every_row_and_bound():
    lines = DOCS.read_text(encoding="utf-8").splitlines()
    for row in ROWS:
        start, end = f"| {row.method} | {row.switch} |", f"| {row.loss:g}, {row.learnt:g} |"
        assert any(line.startswith(start) and line.endswith(end) for line in lines), start


GOLDEN = {
    "full": [5.59205, 3.89068, 2.57956],
    "lora": [5.59205, 5.40730, 5.23078],
    "qlora": [5.59316, 5.40721, 5.23354],
    "int8_lora": [5.59186, 5.40711, 5.23049],
}
"""Losses of the first, tenth and last step of the plain run, on a CPU."""


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=() if name in ("full", "lora") else pytest.mark.slow) for name in GOLDEN]
)
def test_losses_of_the_baseline_are_pinned(plain: Callable[[str], Learnt], method: str):
    """A change that moves what every run learns; kernels of another CPU move the last digits."""
    losses = plain(method).losses
    assert [losses[0], losses[9], losses[-1]] == pytest.approx(GOLDEN[method], abs=2e-3)
