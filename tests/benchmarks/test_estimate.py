"""The comparison with published figures: each has a row, fitted ones do not count, every option has an effect."""

from typing import Any

import pytest

from benchmarks import estimate
from benchmarks.estimate_facts import (
    FACTS,
    PEFT_STATISTICS,
    Fact,
    openrlhf_facts,
    peft_fact,
    peft_runs,
    published_facts,
    spec_of,
)
from benchmarks.estimate_t4 import t4_figures, t4_runs
from benchmarks.published_configs import published_configs
from benchmarks.published_rows import published_rows
from benchmarks.variants import Variant, replayed, trace_variant
from tests.kit.estimate_cpu import FAMILIES
from tests.memory.common import gpu_target

SHAPES = ((2, 64), (2, 64))


def peak(method: str = "full", **options: Any) -> int:
    spec = spec_of(method, 4, ("q_proj", "v_proj"), grad_ckpt=False)
    variant = Variant(**options)
    return trace_variant(FAMILIES["Llama"], spec, variant, SHAPES, gpu_target("A100-40GB")).peak_bytes


def test_every_figure_of_the_files_has_its_row():
    lines = {path.name: len(path.read_text().splitlines()) - 1 for path in FACTS.glob("*.csv")}
    rows = [peft_fact(row, statistic, 300) for row in peft_runs().values() for statistic in PEFT_STATISTICS]
    assert len(rows) == 3 * lines.pop("peft_l40s_measured.csv")
    assert len(t4_runs()) == lines.pop("t4_measured.csv")
    others = [fact for fact, _ in openrlhf_facts()]
    assert len([*published_facts(), *others]) == lines.pop("published_memory.csv")
    del lines["cuda_traces.csv"]  # Of benchmarks.cuda_traces.
    assert len(published_rows()) == lines.pop("published_2026.csv")
    assert len(published_configs()) == lines.pop("published_configs.csv")
    assert not lines, "no benchmark reads this file"
    assert all(fact.assumed for fact in [*rows, *published_facts(), *others])


def test_a_fitted_figure_does_not_count():
    fact = Fact(source="OpenRLHF", run="r", figure_bytes=100, assumed="a", why_off="w")
    rows = [estimate.row_of(fact, 90), estimate.row_of(fact, 130, estimate.FITTED)]
    assert rows[0]["error_percent"] == pytest.approx(-10) and rows[0]["note"] == "w"
    (summary,) = estimate.summary_of(rows)
    assert summary["figures"] == 1 and summary["worst_percent"] == pytest.approx(10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("less", "more"),
    [
        ({}, {"padding_mask": True}),
        ({}, {"eager_attention": True}),
        ({}, {"kept_outputs": "next_step"}),
        ({"trained": ("norm",)}, {}),
        ({"method": "qlora"}, {"method": "qlora", "upcast": True}),
    ],
    ids=str,
)
def test_every_option_changes_memory(less: dict[str, Any], more: dict[str, Any]):
    assert peak(**less) < peak(**more)


@pytest.mark.slow
def test_a_multi_tensor_update_copies_the_weights():
    spec = spec_of("full", 1, ("none",), grad_ckpt=True)
    one, other = (
        trace_variant(FAMILIES["Llama"], spec, Variant(foreach_update=foreach), ((1, 8),) * 2, gpu_target("L40S"))
        for foreach in (False, True)
    )
    assert one.peak_bytes < other.peak_bytes


@pytest.mark.slow
def test_a_key_value_cache_outlives_its_step():
    """As in a harness that does not set model.config.use_cache to False."""
    spec = spec_of("full", 1, ("none",), grad_ckpt=False)
    live = []
    for cache in (False, True):
        variant = Variant(kept_outputs="next_step", kv_cache=cache)
        traced = trace_variant(FAMILIES["Llama"], spec, variant, SHAPES, gpu_target("L40S"))
        live.append(sum(change for _, change in traced.events[: traced.step_ends[-1]]))
    layers, kv_heads, head = 2, 2, 16
    assert live[1] - live[0] == layers * 2 * (2 * 64 * kv_heads * head) * 2


@pytest.mark.slow
def test_emptying_the_cache_forgets_what_was_reserved_before():
    spec = spec_of("lora", 4, ("q_proj",), grad_ckpt=False)
    shapes = ((64, 128), (1, 16))
    traced = trace_variant(FAMILIES["Llama"], spec, Variant(), shapes, gpu_target("L40S"))
    assert len(traced.step_ends) == 2
    assert replayed(traced, emptied_after=(0,)).reserved_bytes < replayed(traced).reserved_bytes


@pytest.mark.slow
def test_a_step_on_a_t4_takes_what_was_measured_there():
    """LoRA in fp16, where loading is deterministic: loaded and peak bytes of blocks, AdamW's counters aside."""
    row = next(row for row in t4_runs() if "135M" in row["model"] and row["quantization"] == "none")
    (_, step), (fact, allocated), _ = t4_figures(row)
    assert (allocated - step) / 2**20 == float(row["loaded_mib"])
    assert fact.figure_bytes == pytest.approx(allocated, rel=2e-4)
