"""The cost model: it ranks switches as they are known to rank, and its parts have known closed forms."""

import json
import statistics
from dataclasses import replace
from typing import Any

import pytest

from cuda_memory.gpus import GPUS
from lean_finetune.config.load import with_flags
from lean_finetune.memory.advice.run import Run
from lean_finetune.memory.advice.step_cost import (
    ARITHMETIC_SHARE,
    RANKED_AS,
    Costs,
    duration_text,
    ranking_speed,
    step_seconds,
    tokens_per_second,
)
from lean_finetune.memory.devices import resolve_gpu
from lean_finetune.memory.predict.state_formulas import model_shapes, trained_values
from tests.conftest import ROOT
from tests.memory.common import LLAMA_3_1_8B
from tests.memory.workloads import H100, PARAMS, workload

SHAPES = model_shapes(LLAMA_3_1_8B)


def of_8b(*, max_tokens: int = 4096, tokens_per_step: int = 16_384, longest: int = 2048, **changes) -> Run:
    setting = {"method": "full", "precision": "bf16", **changes}
    sizes = {"max_tokens": max_tokens, "tokens_per_step": tokens_per_step, "longest": longest}
    return workload(config=LLAMA_3_1_8B, **sizes, **setting)


def seconds(run: Run) -> dict[str, float]:
    assert H100.speed is not None
    return step_seconds(run, SHAPES, H100.speed, trained_values(SHAPES, run.setting.train))


def slowdown(changed: Run, run: Run, gpu: str = "H100") -> float:
    return Costs(replace(run, device=resolve_gpu(gpu)[0])).slowdown(changed)


def test_the_speeds_of_the_table_are_in_its_units():
    """A figure in the column of another one."""
    for speed in (gpu.speed for gpu in GPUS if gpu.speed is not None):
        assert speed.half_flops >= speed.fp32_flops > 1e12
        assert speed.bytes_per_second > speed.link_bytes_per_second > 1e10


@pytest.mark.parametrize("gpu", ["24GiB", "B300"])
def test_a_gpu_of_unknown_speed_is_ranked_by_another_ones(gpu):
    """Advice that fails for a card of which only the memory is known."""
    speed, reason = ranking_speed(resolve_gpu(gpu)[0])
    assert speed == resolve_gpu(RANKED_AS)[0].speed
    assert reason == f"by the speed of {RANKED_AS}: that of {gpu} is not known"


def test_products_are_six_flop_per_parameter_and_token():
    """A pass counted twice or not at all: 6 · P · tokens, 8 with checkpointing, 4 where weights are frozen."""
    assert H100.speed is not None
    multiplied = SHAPES.values - 128256 * 4096  # Input embeddings are looked up.
    unit = multiplied * 16_384 / (H100.speed.half_flops * ARITHMETIC_SHARE)
    for flop, changes in ((6, {}), (8, {"grad_ckpt": True}), (4, {"method": "lora"})):
        assert seconds(of_8b(**changes))["products"] == pytest.approx(flop * unit)


def test_attention_grows_with_the_square_of_the_length():
    """Long rows ranked as if attention were free."""
    short, long = (seconds(of_8b(longest=longest))["attention"] for longest in (2048, 4096))
    assert long == pytest.approx(2 * short)  # At the same number of tokens.


def test_tiles_compute_mlps_again_and_attention_never():
    """Tiles ranked behind checkpointing for long rows, whose attention it computes again."""
    plain, tiled, recomputed = (
        seconds(of_8b(longest=65_536, **one)) for one in ({}, {"sequence_tiles": 8}, CHECKPOINTED)
    )
    assert tiled["attention"] == plain["attention"] < recomputed["attention"]
    assert plain["products"] < tiled["products"] < recomputed["products"]


@pytest.mark.parametrize("gpu", ["T4", "A100-80GB", "RTX-4090", "H100"])
def test_switches_rank_as_they_are_known_to(gpu):
    """A slower switch offered before a faster one, or a switch that costs nothing."""
    full, lora = of_8b(), of_8b(method="lora")
    assert slowdown(full, full, gpu) == 1.0 and slowdown(lora, full, gpu) < 1.0
    checkpointing = slowdown(of_8b(grad_ckpt=True), full, gpu)
    assert 1.2 < checkpointing < 1.34 < slowdown(of_8b(precision="fp32"), full, gpu)
    assert 1.0 < slowdown(of_8b(max_tokens=2048), full, gpu) < checkpointing
    assert 0.98 < slowdown(of_8b(optimizer="adamw_8bit"), full, gpu) < 1.05
    assert 1.0 < slowdown(of_8b(method="qlora"), lora, gpu)


def test_offloading_costs_the_link_and_the_host_and_adapters_hardly_any():
    """Offloading 8 billion values priced as offloading 42 million."""
    assert slowdown(of_8b(offload="optimizer"), of_8b()) > 2.0
    assert 1.0 < slowdown(of_8b(method="lora", offload="optimizer"), of_8b(method="lora")) < 1.1
    assert slowdown(of_8b(offload_activations="cpu"), of_8b()) > 1.2


def test_steps_of_other_sizes_are_compared_per_token():
    """Half the tokens taken for twice the speed."""
    half = replace(of_8b(), tokens_per_step=8192, micro_batches_per_step=2)
    assert 1.0 < slowdown(half, of_8b()) < 1.1  # The update is shared by fewer tokens.


@pytest.mark.parametrize(("method", "published"), [("full", 1650), ("lora", 3083), ("qlora", 2413)])
def test_published_speeds_are_within_the_range(method: str, published: int):
    """Those in torchtune's README: Llama-3.1-8B, two rows of 2048 tokens, checkpointing, RTX-4090; not by us."""
    run = of_8b(method=method, grad_ckpt=True, tokens_per_step=4096)
    found = tokens_per_second(replace(run, device=resolve_gpu("RTX-4090")[0]))
    assert found is not None and found[0] < published < found[1]


CHECKPOINTED = {"grad_ckpt": True, "optimizer": "adamw_8bit"}
MEASURED: dict[str, dict[str, Any]] = {
    "LoRA, 1 x 4096": {"method": "lora", "longest": 4096},
    "QLoRA, 2 x 2048": {"method": "qlora", **CHECKPOINTED},
    "full bf16, 2 x 2048": {"method": "full", **CHECKPOINTED},
}


@pytest.mark.parametrize("name", MEASURED)
def test_speeds_measured_on_an_h100_are_within_the_range(name: str):
    """A range that our own measurements leave, or that says no more than for a GPU that nobody measured."""
    rows = json.loads((ROOT / "benchmarks/results/gpu.json").read_text())["rows"]
    [measured_s] = [statistics.median(row["seconds"]) for row in rows if row["name"] == name]
    run = replace(of_8b(tokens_per_step=4096, **MEASURED[name]), device=H100)
    found = tokens_per_second(run)
    assert found is not None and found[0] < 4096 / measured_s < found[1] < 2.01 * found[0]
    offloaded = tokens_per_second(replace(run, setting=run.setting.with_train(offload="optimizer")))
    assert offloaded is not None and offloaded[1] > 3.9 * offloaded[0]


def test_a_duration_says_what_it_is_from():
    """A number without its unit or its uncertainty, or one for a device whose speed nobody knows."""
    shared = with_flags(PARAMS, ["hardware.num_gpus=8", "train.sharding=zero3"])
    text = duration_text(replace(of_8b(), params=shared), 1000)
    assert text == "14 to 55 min by the data sheet of H100 (not measured), and longer where GPUs wait for each other"
    assert duration_text(replace(of_8b(), device=resolve_gpu("24GiB")[0]), 1000) is None


def test_half_the_disk_speed_takes_the_disk_twice_as_long():
    """The disk's part in other units than hardware.disk_gb_per_second, or state read once."""
    run = of_8b(offload_activations="disk")
    half_speed = with_flags(PARAMS, [f"hardware.disk_gb_per_second={PARAMS.hardware.disk_gb_per_second / 2}"])
    slow = replace(run, params=half_speed)
    assert seconds(slow)["disk"] == pytest.approx(2 * seconds(run)["disk"]) and seconds(run)["disk"] > 1
    state = of_8b(offload="optimizer", offload_to="disk")
    slow = replace(state, params=half_speed)
    whole, half = (seconds(one)["disk"] + seconds(one)["update"] for one in (state, slow))
    assert half == pytest.approx(2 * whole)  # The host updates while the disk moves the state.
    assert {**seconds(slow), "disk": 0} == {**seconds(state), "disk": 0}
