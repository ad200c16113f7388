"""The cost model: it ranks switches as they are known to rank, and its parts have known closed forms."""

from dataclasses import replace

import pytest

from lean_finetune.memory.advice.step_cost import ARITHMETIC_SHARE, StepWork, relative_slowdown, step_seconds
from lean_finetune.memory.advice.workload import RANKED_AS, ranking_speed
from lean_finetune.memory.devices import resolve_gpu
from lean_finetune.memory.gpus import GPUS, Speed

EIGHT_B = StepWork(
    parameters=7_500_000_000,
    trained_parameters=8_000_000_000,
    layers=32,
    width=4096,
    tokens=16_384,
    length=2048,
    micro_batches=4,
    method="full",
    precision="bf16",
    optimizer="adamw",
    grad_ckpt=False,
    offloaded_optimizer=False,
    offloaded_activations_bytes=0,
)
LORA = replace(EIGHT_B, method="lora", trained_parameters=42_000_000)


def speed_of(name: str) -> Speed:
    """The speed of a known GPU."""
    return ranking_speed(resolve_gpu(name)[0])[0]


H100 = speed_of("H100")


def test_the_speeds_of_the_table_are_in_its_units():
    """A figure in the column of another one."""
    for speed in (gpu.speed for gpu in GPUS if gpu.speed is not None):
        assert speed.half_flops >= speed.fp32_flops > 1e12
        assert speed.bytes_per_second > speed.link_bytes_per_second > 1e10


@pytest.mark.parametrize("gpu", ["24GiB", "B300"])
def test_a_gpu_of_unknown_speed_says_by_which_one_changes_are_ranked(gpu):
    """A card of which only the memory is known: advice would fail where the verdict did not."""
    speed, reason = ranking_speed(resolve_gpu(gpu)[0])
    assert speed == speed_of(RANKED_AS) and reason == f"by the speed of {RANKED_AS}: that of {gpu} is not known"


def test_products_are_six_flop_per_parameter_and_token():
    """A pass counted twice or not at all: 6 · P · tokens, 8 with checkpointing, 4 where weights are frozen."""
    unit = EIGHT_B.parameters * EIGHT_B.tokens / (H100.half_flops * ARITHMETIC_SHARE)
    assert step_seconds(EIGHT_B, H100)["products"] == pytest.approx(6 * unit)
    assert step_seconds(replace(EIGHT_B, grad_ckpt=True), H100)["products"] == pytest.approx(8 * unit)
    assert step_seconds(LORA, H100)["products"] == pytest.approx(4 * unit)


def test_attention_grows_with_the_square_of_the_length():
    """Long rows ranked as if attention were free."""
    longer = replace(EIGHT_B, length=2 * EIGHT_B.length)
    seconds = [step_seconds(work, H100)["attention"] for work in (EIGHT_B, longer)]
    assert seconds[1] == pytest.approx(2 * seconds[0])  # At the same number of tokens.


@pytest.mark.parametrize("gpu", ["T4", "A100-80GB", "RTX-4090", "H100"])
def test_switches_rank_as_they_are_known_to(gpu):
    """Offloading the update offered before checkpointing, or a saving that costs nothing."""
    speed = speed_of(gpu)
    slow = {
        "8-bit": relative_slowdown(replace(EIGHT_B, optimizer="adamw_8bit"), EIGHT_B, speed),
        "checkpointing": relative_slowdown(replace(EIGHT_B, grad_ckpt=True), EIGHT_B, speed),
        "fp32": relative_slowdown(replace(EIGHT_B, precision="fp32"), EIGHT_B, speed),
        "qlora": relative_slowdown(replace(LORA, method="qlora"), LORA, speed),
        "halved": relative_slowdown(replace(EIGHT_B, micro_batches=8), EIGHT_B, speed),
    }
    assert relative_slowdown(EIGHT_B, EIGHT_B, speed) == 1.0
    assert relative_slowdown(LORA, EIGHT_B, speed) < 1.0
    assert 0.98 < slow["8-bit"] < 1.05
    assert 1.2 < slow["checkpointing"] < 1.34
    assert 1.0 < slow["halved"] < slow["checkpointing"]
    assert 1.0 < slow["qlora"]
    assert slow["fp32"] > slow["checkpointing"]


def test_an_offloaded_update_costs_the_link_and_the_host_and_adapters_hardly_any():
    """Offloading 8 billion values priced as offloading 42 million."""
    full = relative_slowdown(replace(EIGHT_B, offloaded_optimizer=True), EIGHT_B, H100)
    adapters = relative_slowdown(replace(LORA, offloaded_optimizer=True), LORA, H100)
    assert full > 2.0
    assert 1.0 < adapters < 1.1
    kept = relative_slowdown(replace(EIGHT_B, offloaded_activations_bytes=40 * 10**9), EIGHT_B, H100)
    assert kept > 1.2


def test_steps_of_other_sizes_are_compared_per_token():
    """Half the tokens taken for twice the speed."""
    half = replace(EIGHT_B, tokens=EIGHT_B.tokens // 2, micro_batches=2)
    assert 1.0 < relative_slowdown(half, EIGHT_B, H100) < 1.1  # The update is shared by fewer tokens.
