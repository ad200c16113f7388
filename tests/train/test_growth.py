"""The causes of growth: leaks are found, what only looks like one is not, and the remedy is one that exists."""

import re
from typing import Any

import numpy as np
import pytest
from ruamel.yaml import YAML

from lean_finetune.core.units import GIB, MIB
from lean_finetune.train.monitor.growth import LEAST_STEPS, SURE, Growth, classify
from lean_finetune.train.monitor.growth_advice import FIRST_LOOK_STEPS, GrowthWatch, growth_line
from tests.conftest import ROOT
from tests.train.series import LEAK, LEVEL, NO_LEAK, STEPS, lengths, rows_of, staircase

NO_LEAK_SEEDS, LEAK_SEEDS = 80, 20
FALSE_ALARMS_SHARE, FOUND_SHARE = 0.01, 0.95
LOOKS = (20, 30, 45, 68, 102, 153, 230, 345)
DRAW = np.random.default_rng(3)


def told(rows: list[dict[str, Any]]) -> set[str]:
    """Causes told in the course of a run."""
    watch = GrowthWatch()
    return {growth.cause for steps in (*LOOKS, len(rows)) for growth in watch.look(rows[:steps])}


def main_cause(rows: list[dict[str, Any]]) -> str:
    return classify(rows)[0].cause


def test_what_is_no_leak_is_called_one_in_less_than_one_run_of_a_hundred():
    """Over more than a thousand whole runs of every kind, each looked at as often as a real one."""
    runs = {
        (name, seed): told(rows_of(**kind(np.random.default_rng(seed))))
        for name, kind in NO_LEAK.items()
        for seed in range(NO_LEAK_SEEDS)
    }
    false_alarms = [run for run, causes in runs.items() if "leak" in causes]
    assert len(runs) >= 1000
    assert len(false_alarms) <= FALSE_ALARMS_SHARE * len(runs), false_alarms


@pytest.mark.parametrize("kind", LEAK)
def test_a_leak_is_found(kind: str):
    """A classifier that never warns has no false alarms either."""
    found = ["leak" in told(rows_of(**LEAK[kind](np.random.default_rng(seed)))) for seed in range(LEAK_SEEDS)]
    assert sum(found) >= FOUND_SHARE * LEAK_SEEDS


@pytest.mark.parametrize("kind", [name for name in NO_LEAK if "length" in name or name == "sorted epochs"])
def test_growth_with_lengths_is_named_so(kind: str):
    """Longer batches blamed on fragmentation, or on nothing."""
    causes = [main_cause(rows_of(**NO_LEAK[kind](np.random.default_rng(seed)))) for seed in range(10)]
    assert causes == ["flat" if kind == "falling lengths" else "length"] * 10


def test_the_slope_of_a_leak_is_that_of_the_leak():
    rows = rows_of(**LEAK["under lengths"](np.random.default_rng(0)))
    leak = classify(rows)[0]
    assert leak.cause == "leak" and leak.series == "allocated_bytes" and leak.at_equal_shape
    assert leak.slope_bytes_per_step == pytest.approx(4 * MIB, rel=0.1)
    assert leak.confidence is not None and leak.confidence >= SURE


@pytest.mark.parametrize("noise_bytes", [0, 5 * MIB])
@pytest.mark.parametrize("column", ["held_bytes", "allocated_bytes"])
def test_a_leak_of_20_mb_a_step_is_named_within_20_steps(column: str, noise_bytes: int):
    """Sixty steps of a large model are an hour."""
    for seed in range(LEAK_SEEDS):
        draw = np.random.default_rng(seed)
        rows = rows_of(**{column: LEVEL + 20e6 * np.arange(20) + draw.normal(0, noise_bytes, 20)})
        assert told(rows) == {"leak"}


def test_one_jump_is_named_with_its_step_and_size():
    """A library that is loaded late, told as a leak or as unclear."""
    for seed in range(LEAK_SEEDS):
        draw = np.random.default_rng(seed)
        values = LEVEL + draw.normal(0, 2 * MIB, STEPS)
        values[150:] += 380 * MIB
        growth = classify(rows := rows_of(held_bytes=values))[0]
        assert (growth.cause, growth.jump_steps) == ("jump", (150,))
        assert growth.largest_jump_bytes == pytest.approx(380 * MIB, rel=0.05)
        assert "one jump of " in growth_line(growth, rows, lambda series: None, {})
    values[300:] += 100 * MIB
    assert classify(rows_of(held_bytes=values))[0].jump_steps == (150, 300)


def test_a_sawtooth_is_periodic_and_no_growth():
    """A cache that fills and empties, told as unclear; noise that remembers itself is none."""
    for seed in range(LEAK_SEEDS):
        draw = np.random.default_rng(seed)
        period = int(draw.integers(3, 21))
        filled = (np.arange(STEPS) + seed) % period / period
        growth = classify(rows := rows_of(rss_bytes=GIB + 300 * MIB * filled + draw.normal(0, 2 * MIB, STEPS)))[0]
        assert growth.cause == "periodic" and growth.period_steps == pytest.approx(period, abs=0.5)
        assert growth.swing_bytes == pytest.approx(300 * MIB, rel=0.4)
        assert "no growth" in growth_line(growth, rows, lambda series: None, {})
    for kind in ("noise", "noise that remembers 0.9", "random walk"):
        causes = {main_cause(rows_of(**NO_LEAK[kind](np.random.default_rng(seed)))) for seed in range(LEAK_SEEDS)}
        assert "periodic" not in causes


def test_advice_on_growth_never_proposes_what_already_runs():
    """`-S train.expandable_segments=true` to a run that has it."""
    running = {
        "train.optimizer": "adamw",
        "train.attention": "sdpa",
        "train.expandable_segments": True,
        "run.loader_threads": 0,
    }
    leak = {"held_bytes": GIB + MIB * np.arange(96)}
    for columns in (leak, {"rss_bytes": leak["held_bytes"]}, staircase(np.arange(16, 1616, 16), expandable=False)):
        growth = classify(rows := rows_of(**columns))[0]
        lines = [growth_line(growth, rows, lambda series: None, settings) for settings in (running, {})]
        for name, value in running.items():
            assert f"{name}={str(value).lower()}" not in lines[0]
        assert "-S " in lines[1]
    flash = growth_line(
        classify(rows_of(**leak))[0], rows_of(**leak), lambda series: None, running | {"train.attention": "flex"}
    )
    assert "-S train.attention=sdpa" in flash and "train.optimizer" not in flash


def test_a_leak_without_noise_is_found_at_the_first_look():
    """512 bytes of a forgotten scalar are too few to tell of; a forgotten MiB is not."""
    steps = np.arange(FIRST_LOOK_STEPS)
    assert main_cause(rows_of(held_bytes=GIB + MIB * steps)) == "leak"
    assert main_cause(rows_of(held_bytes=GIB + 512 * steps)) == "flat"


def test_mapped_files_that_are_read_are_no_growth_of_the_process():
    """Token shards: their pages count as resident once they were read."""
    steps = np.arange(STEPS)
    rows = rows_of(rss_bytes=GIB + MIB * steps, rss_own_bytes=np.full(STEPS, float(GIB)))
    assert main_cause(rows) == "flat"
    assert main_cause([{key: row[key] for key in ("step", "rss_bytes")} for row in rows]) == "leak"


def test_the_staircase_of_batches_that_get_longer_is_fragmentation():
    """Llama-3.1-8B, batch 1: memory climbs in steps until it ends, while tensors take a third of it."""
    tokens = np.sort(lengths(np.random.default_rng(1))[:200])
    found = classify(rows_of(**staircase(tokens, expandable=False)))
    assert [growth.cause for growth in found] == ["fragmentation", "length"]
    assert found[0].growth_bytes > found[1].growth_bytes > GIB
    assert [one.cause for one in classify(rows_of(**staircase(tokens, expandable=True)))] == ["length"]


def test_segments_that_grow_are_not_called_fragmented():
    """A warning for every run of random lengths, whose remedy is set already."""
    for seed in range(20):
        tokens = lengths(np.random.default_rng(seed))[:200]
        assert told(rows_of(**staircase(tokens, expandable=True))) <= {"length"}


def test_an_end_in_the_first_optimizer_step_is_no_growth_over_steps():
    """Llama 8B full on one A100-80G: 46 GB prepared, 61 after backward, out of memory in the optimizer's update."""
    rows = rows_of(allocated_bytes=np.array([61e9]), held_bytes=np.array([46e9]))
    assert main_cause(rows) == main_cause(rows * (LEAST_STEPS - 1)) == "too_short"


def test_what_several_gpus_add_to_each_is_there_from_the_second_step_on():
    """7B in 4 bits on eight P4: buckets of DDP are built anew once, and no card is lightened; that is no leak."""
    steps = np.arange(200)
    held = 5.6 * GIB + np.where(steps > 0, 0.4 * GIB, 0) + DRAW.normal(0, MIB, 200)
    assert main_cause(rows_of(allocated_bytes=held + GIB, held_reserved_bytes=np.full(200, 7.2 * GIB))) == "flat"


def test_a_host_that_fills_up_at_any_length_is_a_leak():
    """Qwen, LoRA and ZeRO-2: memory grows by the same every step until the crash, whatever the batches are."""
    tokens = lengths(DRAW)
    rss = 20 * GIB + 40 * MIB * np.arange(STEPS) + 0.2 * MIB * tokens + DRAW.normal(0, 60 * MIB, STEPS)
    held = np.full(STEPS, 17.0 * GIB) + DRAW.normal(0, MIB, STEPS)
    leak = classify(rows_of(tokens=tokens, rss_bytes=rss, held_bytes=held, allocated_bytes=held + 2 * MIB * tokens))[0]
    assert (leak.cause, leak.series) == ("leak", "rss_bytes")
    assert leak.slope_bytes_per_step == pytest.approx(40 * MIB, rel=0.1)


def test_fragmentation_injected_into_flat_memory_is_named():
    """Reserved memory that grows by a segment now and then while tensors take what they always took."""
    reserved = LEVEL + 20 * MIB * np.cumsum(DRAW.random(STEPS) < 0.25)
    growth = classify(rows_of(allocated_bytes=np.full(STEPS, LEVEL - GIB), held_reserved_bytes=reserved))[0]
    assert growth.cause == "fragmentation"
    assert growth.slope_bytes_per_step == pytest.approx(5 * MIB, rel=0.3)


def test_what_malloc_keeps_is_not_called_fragmentation_of_segments():
    """A remedy for CUDA's allocator given to a run on a CPU, whose rows have an empty cell for its retries."""
    columns = {"held_bytes": np.full(STEPS, LEVEL), "held_reserved_bytes": LEVEL + np.arange(STEPS) * 4 * MIB}
    assert main_cause(rows_of(**columns)) == "fragmentation"
    assert main_cause([{**row, "alloc_retries": None} for row in rows_of(**columns)]) == "flat"


def test_peaks_of_chosen_steps_say_nothing_of_growth():
    """A CPU measures the largest steps and a few others: seen from them, every run grows with length."""
    tokens = np.where(np.arange(STEPS) % 20 == 0, np.arange(STEPS) * 10.0 + 100, 64)
    rows = rows_of(tokens=tokens, allocated_bytes=LEVEL / 10 + MIB * tokens, held_bytes=np.full(STEPS, LEVEL))
    assert main_cause(rows) == "length"
    assert main_cause([row if row["step"] % 20 == 0 else {**row, "allocated_bytes": None} for row in rows]) == "flat"


def test_a_curve_that_is_sparse_is_judged_on_the_rows_it_has():
    rows = rows_of(held_bytes=GIB + MIB * np.arange(STEPS))
    assert main_cause([row if row["step"] % 4 == 0 else {"step": row["step"]} for row in rows]) == "leak"


def test_a_cause_is_told_once_and_again_to_whoever_reads_a_resumed_run():
    rows = rows_of(held_bytes=GIB + MIB * np.arange(STEPS))
    watch = GrowthWatch()
    looks = [len(watch.look(rows[:steps])) for steps in range(1, STEPS + 1)]
    assert sum(looks) == 1 and looks[FIRST_LOOK_STEPS - 1] == 1
    assert [growth.cause for growth in GrowthWatch().look(rows)] == ["leak"]


def test_what_is_said_follows_from_the_rows_alone():
    """A resumed run that judges otherwise than an uninterrupted one."""
    rows = rows_of(**LEAK["under lengths"](np.random.default_rng(5)))
    assert classify(rows) == classify([dict(row) for row in rows])


@pytest.mark.parametrize(
    ("columns", "cause", "pattern"),
    [
        ({"held_bytes": GIB + MIB * np.arange(96)}, "leak", r"1 MiB a step.* the 6 GiB left .* step 6239;"),
        (
            {"held_bytes": GIB + MIB * np.arange(96)},
            "leak",
            r"1 MiB a step.* confidence .*6 GiB left .* about step 6\d{3}",
        ),
        ({"rss_bytes": GIB + MIB * np.arange(96)}, "leak", r"-S run\.loader_threads=0"),
        (staircase(np.arange(16, 1616, 16), expandable=False), "fragmentation", r"-S train\.expandable_segments=true"),
        (staircase(np.arange(16, 1616, 16), expandable=True), "length", r"-S bucket\.max_tokens=1600"),
        ({"held_bytes": GIB + MIB * np.minimum(30, np.arange(96))}, "plateau", "settled"),
        ({"held_bytes": np.full(96, GIB)}, "flat", "nothing to do"),
        ({"held_bytes": np.full(5, GIB)}, "too_short", "5 steps"),
    ],
)
def test_a_cause_is_one_line_with_figures_and_a_remedy_that_exists(columns, cause: str, pattern: str):
    rows = rows_of(**columns)
    growth = next(one for one in classify(rows) if one.cause == cause)
    line = growth_line(growth, rows, lambda series: 6 * GIB, {})
    assert re.search(pattern, line) and "\n" not in line
    for parameter in re.findall(r"-S ([a-z_.]+)=", line):
        section, key = parameter.split(".")
        assert key in PARAMS[section], parameter


PARAMS = YAML(typ="safe").load((ROOT / "params.yaml").read_text())


def test_every_finding_names_its_steps():
    growth = classify(rows_of(held_bytes=GIB + MIB * np.arange(96)))[0]
    assert isinstance(growth, Growth)
    assert (growth.first_step, growth.last_step) == (24, 95)
    assert growth.growth_bytes == 71 * MIB
