"""Causes of memory growth: leaks are found early, other growth is not called a leak, remedies exist."""

import re
from typing import Any

import numpy as np
import pytest
from ruamel.yaml import YAML

from cuda_memory.growth import CONFIDENCE, LEAST_STEPS, classify
from cuda_memory.units import GIB, MIB
from lean_finetune.train.monitor.growth_advice import FIRST_CHECK_STEPS, check_is_due, growth_line
from tests.conftest import ROOT
from tests.train.series import LEAK, LEVEL, NO_LEAK, STEPS, lengths, rows_of, staircase

PARAMS = YAML(typ="safe").load((ROOT / "params.yaml").read_text())
RNG = np.random.default_rng(3)
LINE = GIB + MIB * np.arange(96)
STAIRS = staircase(np.arange(16, 1616, 16), expandable=False)


def causes_reported(rows: list[dict[str, Any]]) -> set[str]:
    """Causes found by the checks of a training run, and by one at its end."""
    checked = [steps for steps in range(len(rows)) if check_is_due(steps)] + [len(rows)]
    causes: set[str] = {growth.cause for steps in checked for growth in classify(rows[:steps])}
    return causes & {"leak", "fragmentation", "length"}


def main_cause(rows: list[dict[str, Any]]) -> str:
    return classify(rows)[0].cause


@pytest.mark.parametrize(
    "seeds", [pytest.param(4, id="few runs"), pytest.param(80, id="a thousand runs", marks=pytest.mark.slow)]
)
def test_no_leak_is_reported_where_there_is_none(seeds: int):
    """False alarms: each kind of growth that is no leak, checked as often as a real run."""
    runs = [(name, seed) for name in NO_LEAK for seed in range(seeds)]
    leaks = [
        run for run in runs if "leak" in causes_reported(rows_of(**NO_LEAK[run[0]](np.random.default_rng(run[1]))))
    ]
    assert len(leaks) <= len(runs) / 1000, leaks


@pytest.mark.parametrize("kind", LEAK)
def test_leak_is_found_in_noise(kind: str):
    found = ["leak" in causes_reported(rows_of(**LEAK[kind](np.random.default_rng(seed)))) for seed in range(20)]
    assert sum(found) >= 19


@pytest.mark.parametrize("noise_bytes", [0, 5 * MIB])
@pytest.mark.parametrize("column", ["live_bytes", "allocated_bytes"])
def test_leak_of_20_mb_a_step_is_reported_after_20_steps(column: str, noise_bytes: int):
    """Sixty steps of a large model are an hour."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        rows = rows_of(**{column: LEVEL + 20e6 * np.arange(20) + rng.normal(0, noise_bytes, 20)})
        assert causes_reported(rows) == {"leak"}


def test_leak_has_the_slope_and_the_steps_of_the_leak():
    leak = classify(rows_of(**LEAK["under lengths"](np.random.default_rng(0))))[0]
    assert (leak.cause, leak.series, leak.at_equal_shape) == ("leak", "allocated_bytes", True)
    assert leak.slope_bytes_per_step == pytest.approx(4 * MIB, rel=0.1)
    assert leak.confidence is not None and leak.confidence >= CONFIDENCE
    plain = classify(rows_of(live_bytes=LINE))[0]
    assert (plain.first_step, plain.last_step, plain.growth_bytes) == (24, 95, 71 * MIB)


def test_leak_below_one_mib_is_not_reported():
    """A warning for the 512 bytes of a forgotten scalar per step."""
    steps = np.arange(FIRST_CHECK_STEPS)
    assert main_cause(rows_of(live_bytes=GIB + MIB * steps)) == "leak"
    assert main_cause(rows_of(live_bytes=GIB + 512 * steps)) == "steady"


def test_host_memory_that_grows_at_any_length_is_a_leak():
    """Qwen with LoRA and ZeRO-2: memory grows by the same amount every step until the crash."""
    tokens, live = lengths(RNG), np.full(STEPS, 17.0 * GIB)
    rss = 20 * GIB + 40 * MIB * np.arange(STEPS) + 0.2 * MIB * tokens + RNG.normal(0, 60 * MIB, STEPS)
    leak = classify(rows_of(tokens=tokens, rss_bytes=rss, live_bytes=live, allocated_bytes=live + 2 * MIB * tokens))[0]
    assert (leak.cause, leak.series) == ("leak", "rss_bytes")
    assert leak.slope_bytes_per_step == pytest.approx(40 * MIB, rel=0.1)


def test_mapped_files_are_no_growth_of_the_process():
    """Pages of token shards, which are resident once they were read, reported as a leak."""
    rows = rows_of(rss_bytes=LINE, rss_own_bytes=np.full(96, float(GIB)))
    assert main_cause(rows) == "steady"
    assert main_cause([{key: row[key] for key in ("step", "rss_bytes")} for row in rows]) == "leak"


@pytest.mark.parametrize(
    ("cause", "kinds"),
    [
        ("length", ("random lengths", "rising lengths", "sorted epochs")),
        ("steady", ("falling lengths", "sawtooth", "noise")),
    ],
)
def test_growth_with_batch_length_and_a_cache_that_empties_are_not_called_a_leak(cause: str, kinds: tuple[str, ...]):
    for kind in kinds:
        causes = {main_cause(rows_of(**NO_LEAK[kind](np.random.default_rng(seed)))) for seed in range(10)}
        assert causes == {cause}, kind


def test_jumps_are_reported_with_step_and_size():
    """A library that is loaded late is reported as a leak."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        values = LEVEL + rng.normal(0, 2 * MIB, STEPS)
        values[150:] += 380 * MIB
        growth = classify(rows := rows_of(live_bytes=values))[0]
        assert growth.cause == "jump"
        assert re.search(r"live_bytes jumps by 0\.3\d+ GiB at step 150;", growth_line(growth, rows, None, {}))
    values[300:] += 100 * MIB
    assert str(classify(rows_of(live_bytes=values))[0].jumps).endswith("at steps 150, 300")


def test_staircase_of_longer_batches_is_fragmentation():
    """Llama-3.1-8B, batch 1: reserved memory climbs until it ends, while tensors take a third of it."""
    tokens = np.sort(lengths(np.random.default_rng(1))[:200])
    found = classify(rows_of(**staircase(tokens, expandable=False)))
    assert [growth.cause for growth in found] == ["fragmentation", "length"]
    assert found[0].growth_bytes > found[1].growth_bytes > GIB
    for seed in range(3):
        tokens = lengths(np.random.default_rng(seed))[:200]
        assert causes_reported(rows_of(**staircase(tokens, expandable=True))) <= {"length"}


def test_fragmentation_of_flat_memory_is_found_on_cuda_only():
    """The remedy for CUDA's allocator is proposed to a run on a CPU."""
    reserved = LEVEL + 20 * MIB * np.cumsum(RNG.random(STEPS) < 0.25)
    rows = rows_of(allocated_bytes=np.full(STEPS, LEVEL - GIB), reserved_bytes=reserved)
    growth = classify(rows)[0]
    assert growth.cause == "fragmentation"
    assert growth.slope_bytes_per_step == pytest.approx(5 * MIB, rel=0.3)
    assert main_cause([{**row, "alloc_retries": None} for row in rows]) == "steady"


def test_reserved_memory_that_has_settled_is_no_fragmentation():
    """A cache that has filled, reported as memory that grows until the run ends."""
    reserved = LEVEL + 20 * MIB * np.minimum(np.arange(STEPS), STEPS // 2)
    rows = rows_of(allocated_bytes=np.full(STEPS, LEVEL - GIB), reserved_bytes=reserved)
    assert "fragmentation" not in {growth.cause for growth in classify(rows)}


def test_short_runs_are_too_short():
    """Llama 8B full on one A100-80G: out of memory in the first optimizer update."""
    rows = rows_of(allocated_bytes=np.array([61e9]), live_bytes=np.array([46e9]))
    assert main_cause(rows) == main_cause(rows * (LEAST_STEPS - 1)) == "too_short"


def test_sparse_columns():
    """Peaks on a CPU are measured in the largest steps only: seen from them, every run grows with length."""
    tokens = np.where(np.arange(STEPS) % 20 == 0, np.arange(STEPS) * 10.0 + 100, 64)
    rows = rows_of(tokens=tokens, allocated_bytes=LEVEL / 10 + MIB * tokens, live_bytes=np.full(STEPS, LEVEL))
    assert main_cause(rows) == "length"
    assert main_cause([row if row["step"] % 20 == 0 else {**row, "allocated_bytes": None} for row in rows]) == "steady"
    leak = rows_of(live_bytes=GIB + MIB * np.arange(STEPS))
    assert main_cause([row if row["step"] % 4 == 0 else {"step": row["step"]} for row in leak]) == "leak"


def test_checks_become_rarer():
    """A long run that spends its time on checks."""
    assert [steps for steps in range(150) if check_is_due(steps)] == [20, 30, 45, 68, 102]


def test_remedies_that_are_set_are_not_proposed():
    """`-S train.expandable_segments=true` for a run that has it."""
    current = {
        "train.optimizer": "adamw",
        "train.attention": "auto",
        "train.expandable_segments": True,
        "run.loader_threads": 0,
    }
    for columns in ({"live_bytes": LINE}, {"rss_bytes": LINE}, STAIRS):
        growth = classify(rows := rows_of(**columns))[0]
        already_set, unknown = (growth_line(growth, rows, None, settings) for settings in (current, {}))
        assert not any(name in already_set for name in current) and "-S " in unknown


@pytest.mark.parametrize(
    ("columns", "cause", "pattern"),
    [
        ({"live_bytes": LINE}, "leak", r"1 MiB a step.* confidence .* 6 GiB .* step 6239;"),
        ({"rss_bytes": LINE}, "leak", r"-S run\.loader_threads=0"),
        (STAIRS, "fragmentation", r"-S train\.expandable_segments=true"),
        (staircase(np.arange(16, 1616, 16), expandable=True), "length", r"-S bucket\.max_tokens=1600"),
        ({"live_bytes": GIB + MIB * np.minimum(30, np.arange(96))}, "steady", "nothing to do"),
        ({"live_bytes": np.full(5, GIB)}, "too_short", "5 steps"),
    ],
)
def test_each_cause_is_one_line_with_figures_and_parameters_that_exist(columns, cause: str, pattern: str):
    rows = rows_of(**columns)
    growth = next(one for one in classify(rows) if one.cause == cause)
    line = growth_line(growth, rows, 6 * GIB, {})
    assert re.search(pattern, line) and "\n" not in line
    for parameter in re.findall(r"-S ([a-z_.]+)=", line):
        section, key = parameter.split(".")
        assert key in PARAMS[section], parameter
