"""What GPUs are predicted to send in a step is what the collectives of real steps send."""

from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch

from lean_finetune.commands.fit import gpu_flags
from lean_finetune.config.load import COMMON_PARAMS, load_params, with_flags
from lean_finetune.config.parallel_layout import ParallelLayout
from lean_finetune.memory.advice.full_rows import fit_run
from lean_finetune.memory.advice.run import Run
from lean_finetune.memory.advice.traffic import Traffic, network_lines, traffic_of
from lean_finetune.memory.devices import cpu_device
from lean_finetune.memory.trace.setting import Setting
from lean_finetune.model.model_config import read_config
from lean_finetune.step.batches import BatchShape
from tests.conftest import ROOT
from tests.distributed.cases import Case, divided, layout_of, sharing_of
from tests.distributed.group import Group
from tests.distributed.worker import do_count_sent
from tests.small_model import save_small_llama, spec_of


def trained_by(case: Case, layout: ParallelLayout, rank: int) -> tuple[int, list[BatchShape]]:
    """Tokens and micro-batches of a process."""
    shapes = []
    for batch in divided(case, layout, rank)[0]:
        rows, length = batch.input_ids_BT.shape
        trained = len(batch.supervised_index_N)
        shapes.append(BatchShape(rows=rows, length=length, supervised=trained, packed_lengths=None))
    return sum(shape.rows * shape.length for shape in shapes), shapes


def predicted(case: Case, gpus: int) -> Traffic:
    layout = layout_of(case, gpus)
    tokens, shapes = max((trained_by(case, layout, rank) for rank in range(gpus)), key=itemgetter(0))
    train = spec_of(**{**case.model, **sharing_of(case)}, optimizer="adamw", loss_chunk=None, max_grad_norm=1.0)
    p = load_params(COMMON_PARAMS)
    run = Run(
        params=p,
        device=cpu_device(2**34),
        stored=torch.float32,
        bucket=p.bucket,
        config=read_config(Path(case.directory)),
        setting=Setting(train=train, gpus=gpus, accumulates_gradients=True, stage_layers=case.stages),
        steps=(tuple(shapes),),
        longest=64,
        tokens_per_step=tokens,
        micro_batches_per_step=len(shapes),
    )
    found = traffic_of(run)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def wide_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, and as many inputs of a part as blocks of 4-bit weights need."""
    directory = tmp_path_factory.mktemp("wide_llama")
    return save_small_llama(
        directory, hidden_size=128, intermediate_size=256, num_key_value_heads=4, num_hidden_layers=4
    )


CHECKPOINTS: dict[str, Any] = {"grad_ckpt": True}
SELECTIVE = {**CHECKPOINTS, "grad_ckpt_policy": "selective"}


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpus", "layout", "model"),
    [
        (2, {"mode": "ddp"}, {"method": "lora"}),
        (2, {"mode": "zero1"}, {"method": "full"}),
        (2, {"mode": "zero2"}, {"method": "lora"}),
        (2, {"mode": "zero3"}, {"method": "full"}),
        (2, {"mode": "zero3"}, {"method": "qlora"}),
        (4, {"mode": "hsdp", "group_gpus": 2}, {"method": "full"}),
        (4, {"mode": "ddp", "context": 2}, {"method": "full", **CHECKPOINTS}),
        (4, {"mode": "ddp", "context": 4}, {"method": "full", **CHECKPOINTS}),
        (4, {"mode": "zero3", "context": 2}, {"method": "lora"}),
        (2, {"mode": "none", "tensor": 2}, {"method": "full"}),
        (2, {"mode": "none", "tensor": 2}, {"method": "lora", **SELECTIVE}),
        (4, {"mode": "zero3", "tensor": 2}, {"method": "qlora"}),
        (4, {"mode": "zero3", "tensor": 2}, {"method": "full", **CHECKPOINTS}),
        (2, {"mode": "none", "stages": (1, 3)}, {"method": "full"}),
        (4, {"mode": "none", "stages": (1, 1, 1, 1)}, {"method": "lora"}),
    ],
    ids=repr,
)
def test_predicted_bytes_are_sent(
    request, small_llama: Path, wide_llama: Path, gpus: int, layout: dict[str, Any], model: dict[str, Any]
):
    """Advice for slow networks would be wrong. Two key/value heads for four processes have copies."""
    directory = wide_llama if {"tensor", "stages"} & layout.keys() else small_llama
    case = Case(directory=str(directory), sizes=(1,) * 8 if gpus == 4 else (2,) * 4, chunk=16, model=model, **layout)
    processes: Group = request.getfixturevalue("four" if gpus == 4 else "pair")
    expected = predicted(case, gpus)
    in_rings = expected.in_group_bytes + expected.between_groups_bytes
    total = in_rings + expected.in_products_bytes + expected.exchanged_bytes
    assert (expected.in_products_bytes > 0, expected.exchanged_bytes > 0) == ("tensor" in layout, "context" in layout)
    assert processes.ask(do_count_sent, case) == pytest.approx(total, rel=1e-3)


def test_a_ring_leaves_each_node_once():
    """16 GPUs on two nodes; groups of 8 stay within a node, groups of 16 do not."""
    one = Traffic(gpus=16, group=16, in_group_bytes=100, between_groups_bytes=0)
    assert (one.network_bytes(8), one.network_bytes(16)) == (100, 0)
    assert Traffic(gpus=16, group=8, in_group_bytes=100, between_groups_bytes=3).network_bytes(8) == 24
    assert Traffic(gpus=32, group=16, in_group_bytes=100, between_groups_bytes=3).network_bytes(8) == 124
    exchanging = Traffic(gpus=16, group=8, in_group_bytes=0, between_groups_bytes=0, context=16, exchanged_bytes=150)
    assert (exchanging.network_bytes(8), exchanging.network_bytes(16)) == (80 * 8, 0)
    assert Traffic(gpus=16, group=4, in_group_bytes=100, between_groups_bytes=3).network_bytes(8) == 12
    four_parts = Traffic(gpus=8, group=2, rings=4, in_group_bytes=10, between_groups_bytes=0, in_products_bytes=7)
    assert [four_parts.network_bytes(each) for each in (2, 4, 8)] == [2 * 10 + 7, 4 * 10, 0]
    stages = Traffic(gpus=8, group=8, in_group_bytes=0, between_groups_bytes=0, passed_bytes=5, tied_bytes=2)
    assert [stages.network_bytes(each) for each in (2, 4)] == [10, 7]


def test_the_lines_of_fit_are_those_of_the_documented_example():
    """Bytes of a node that are those of a GPU, or a network speed that docs/several-machines.md does not have."""
    model = f"model.name={ROOT / 'lean_finetune/example_configs/llama-3.1-8b'}"
    flags = [model, "hardware.gpu=H100", "train.method=full", "run.nodes=2"]
    p = load_params(COMMON_PARAMS)
    run = fit_run(with_flags(p, [*flags, *gpu_flags(p, 16, flags)]))
    lines = network_lines(run)
    better = "better on a slower network, if it fits"
    assert lines == [
        ("sent in a step", "40.23 GiB, by each GPU"),
        ("by each node", "40.23 GiB, which costs no time from 1,200 Gbit/s on (run.nodes=2)"),
        ("with hsdp", f"in groups of 8: 14.96 GiB, which costs no time from 430 Gbit/s on; {better}"),
        ("with ddp", f"28.05 GiB, which costs no time from 810 Gbit/s on; {better}"),
    ]
    page = " ".join((ROOT / "docs/several-machines.md").read_text(encoding="utf-8").split())
    assert all(f"{label} {text}" in page for label, text in lines)
