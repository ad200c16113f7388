"""What GPUs are predicted to send in a step is what the collectives of real steps send."""

from pathlib import Path

import pytest

from lean_finetune.config.parallel_layout import ParallelLayout
from lean_finetune.distributed.sharding_modes import ShardSpec
from lean_finetune.memory.advice.traffic import Traffic, traffic_of
from lean_finetune.memory.advice.workload import Workload
from lean_finetune.memory.predict.setting import Setting
from lean_finetune.memory.trace.fake_distributed import Sharing
from lean_finetune.model.model_config import read_config
from tests.distributed.cases import Case, divided
from tests.distributed.group import Group
from tests.distributed.worker import do_count_sent
from tests.small_model import spec_of

MICRO_BATCHES = 2


def predicted(case: Case, gpus: int, tokens_per_step: float = 128.0) -> Traffic:
    layout = ParallelLayout(data=gpus // case.context, context=case.context)
    spec = ShardSpec(mode=case.mode, group_gpus=case.group_gpus, layout=layout)  # type: ignore[arg-type]
    sharing = Sharing(spec=spec, gpus=gpus, accumulates_gradients=True)
    model = spec_of(**case.model)
    run = Workload(
        config=read_config(Path(case.directory)),
        setting=Setting(model=model, optimizer="adamw", loss_chunk=None, max_grad_norm=1.0, sharing=sharing),
        steps=(),
        mode="bucketed",
        max_tokens=64,
        fixed_rows=1,
        longest=64,
        tokens_per_step=tokens_per_step,
        micro_batches_per_step=MICRO_BATCHES,
        unpadded_tokens_per_step=128,
    )
    found = traffic_of(run)
    assert found is not None
    return found


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "method"),
    [("ddp", "lora"), ("zero1", "full"), ("zero2", "lora"), ("zero3", "full"), ("zero3", "qlora"), ("hsdp", "full")],
)
def test_predicted_bytes_are_sent(request, small_llama: Path, mode: str, method: str):
    """Advice for slow networks would be wrong."""
    gpus, group = (4, 2) if mode == "hsdp" else (2, None)
    processes: Group = request.getfixturevalue("four" if mode == "hsdp" else "pair")
    sizes = (8 // MICRO_BATCHES // gpus,) * MICRO_BATCHES * gpus
    case = Case(directory=str(small_llama), mode=mode, group_gpus=group, sizes=sizes, model={"method": method})
    expected = predicted(case, gpus)
    sent = processes.ask(do_count_sent, case)
    assert sent == pytest.approx(expected.in_group_bytes + expected.between_groups_bytes, rel=1e-3)


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("context", [2, 4])
def test_predicted_exchanges_are_sent(small_llama: Path, four: Group, context: int):
    """Copies of two key/value heads for four processes, or what checkpointing sends again, left out."""
    model = {"method": "full", "grad_ckpt": True}
    case = Case(directory=str(small_llama), mode="ddp", context=context, sizes=(2, 2, 2, 2), model=model)
    layout = ParallelLayout(data=4 // context, context=context)
    tokens = sum(batch.input_ids_BT.numel() for batch in divided(case, layout, 0)[0])
    expected = predicted(case, 4, tokens)
    assert expected.exchanged_bytes > 0
    sent = four.ask(do_count_sent, case)
    assert sent == pytest.approx(expected.in_group_bytes + expected.exchanged_bytes, rel=1e-3)


def test_a_ring_leaves_each_node_once():
    """16 GPUs on two nodes; groups of 8 stay within a node, groups of 16 do not."""
    one = Traffic(gpus=16, group=16, in_group_bytes=100, between_groups_bytes=0)
    assert (one.network_bytes(8), one.network_bytes(16)) == (100, 0)
    assert Traffic(gpus=16, group=8, in_group_bytes=100, between_groups_bytes=3).network_bytes(8) == 24
    assert Traffic(gpus=32, group=16, in_group_bytes=100, between_groups_bytes=3).network_bytes(8) == 124
    exchanging = Traffic(gpus=16, group=8, in_group_bytes=0, between_groups_bytes=0, context=16, exchanged_bytes=150)
    assert (exchanging.network_bytes(8), exchanging.network_bytes(16)) == (80 * 8, 0)
    assert Traffic(gpus=16, group=4, in_group_bytes=100, between_groups_bytes=3).network_bytes(8) == 12
