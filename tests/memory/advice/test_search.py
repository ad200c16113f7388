"""Advice: each proposed change fits, none changes more than needed, and the least harmful is listed first."""

import json
from collections.abc import Iterable
from copy import copy
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from cuda_memory.units import GIB, MIB
from lean_finetune.config.load import COMMON_PARAMS, keeps_rules, load_params, with_flags
from lean_finetune.config.schema import Params
from lean_finetune.memory.advice import search, search_space, what_fits
from lean_finetune.memory.advice.full_rows import fit_run, full_batch, full_rows_run, largest_steps
from lean_finetune.memory.advice.run import Run
from lean_finetune.memory.advice.search import Confirm, Remedy, advise
from lean_finetune.memory.advice.search_space import Candidate, Space
from lean_finetune.memory.advice.step_cost import Costs
from lean_finetune.memory.advice.verdict import answer, predict_tiers
from lean_finetune.memory.advice.what_fits import Largest, largest_fitting, longest_fitting_row, smallest_gpu
from lean_finetune.memory.predict.peak import Prediction
from lean_finetune.memory.switches.switch import (
    EFFECTS,
    OTHER_WEIGHTS,
    ROUNDED,
    SAME,
    SMALLER_STEPS,
    UNCLIPPED,
    setting_with,
)
from lean_finetune.memory.trace.memory_trace import Peak
from lean_finetune.preferences.objectives.pair_objectives import PAIR
from tests.conftest import ROOT
from tests.memory.common import joined, shape
from tests.memory.workloads import CONFIG, H100, peak_of, workload

PARAMS = load_params(ROOT / "params.yaml")


def advice_for(run: Run, usable_bytes: int, confirm: Confirm | None = None) -> list[Remedy]:
    def by_tensors(candidate: Candidate, traced_bytes: int) -> Prediction | None:
        prediction = candidate.run.predict()
        return prediction if prediction.peak.bytes <= usable_bytes else None

    peak = run.predict().peak
    return advise(run, Costs(run), peak=peak, usable_bytes=usable_bytes, confirm=confirm or by_tensors)


def changes(remedy: Remedy) -> set[str]:
    """The switches of a remedy: recomputing some is no part of recomputing all."""
    some = any(flag.startswith("train.grad_ckpt_policy=") for flag in remedy.flags)
    return set(remedy.flags) - ({"train.grad_ckpt=true"} if some else set())


def test_advice_fits_and_the_least_harmful_comes_first():
    """A remedy that does not fit, one with a change too many, or other weights where a smaller budget would do."""
    run = workload(method="full", loss_chunk=None)
    usable = int(peak_of(run) * 0.9)
    found = advice_for(run, usable)
    assert found and all(remedy.peak_bytes <= usable for remedy in found)
    assert found[0].effect == "same training result"
    effects = [EFFECTS.index(remedy.effect) for remedy in found]
    assert effects == sorted(effects)
    assert not any(changes(other) < changes(one) for one in found for other in found)
    same = [remedy.slowdown for remedy in found if remedy.effect == EFFECTS[0]]
    assert same == pytest.approx(sorted(same), abs=2 * search_space.SAME_SPEED)


@pytest.mark.slow
def test_every_change_proposed_for_a_pipeline_is_one_that_params_allow():
    """Commands that end in an error, and fill the few places of the list."""
    params = with_flags(PARAMS, ["hardware.num_gpus=2", "train.pipeline_stages=2", "train.method=full"])
    run = full_rows_run(params, CONFIG, H100)
    offered = Space(run, Costs(run)).of_effect(SAME)
    single = [one.flags for one in offered if sum(bool(option.flags) for option in one.options) == 1]
    assert single
    for change in single:
        with_flags(params, change)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.15, 0.5])
def test_the_best_remedy_has_no_unnecessary_switch(share):
    """Everything turned on, four times as slow, where two switches would do."""
    run = workload(method="full", loss_chunk=None, precision="bf16")
    candidates = Space(run, Costs(run)).of_effect(SAME)
    least = peak_of(max(candidates, key=lambda candidate: candidate.total_level).run)
    usable = int(least + share * (peak_of(run) - least))
    best = advice_for(run, usable)[0]
    offered = next(c for c in candidates if c.flags == best.flags)
    for other in candidates:
        changed = sum(a.level != b.level for a, b in zip(offered.options, other.options, strict=True))
        if changed == 1 and offered.covers(other):
            assert peak_of(other.run) > usable, other.flags


@pytest.mark.slow
def test_a_tight_remedy_comes_with_a_roomier_one():
    run = workload(method="full", loss_chunk=None)
    first = advice_for(run, int(peak_of(run) * 0.9))[0]
    tight = advice_for(run, first.peak_bytes * 100 // 99)
    assert tight[0].flags == first.flags
    assert any(one.peak_bytes <= search.ROOMY * first.peak_bytes / 0.99 for one in tight[1:])


@pytest.mark.parametrize(("norm", "effect"), [(None, SAME), (1.0, UNCLIPPED)])
@pytest.mark.slow
def test_updates_in_backward_are_offered_where_nothing_else_trains_all_weights(norm, effect):
    """Other weights trained for want of the switch that frees each gradient early."""
    given: dict[str, Any] = {"optimizer": "paged_adamw_8bit", "max_grad_norm": norm}  # Nothing is offloaded with it.
    run = workload(method="full", precision="bf16", max_tokens=64, longest=64, tokens_per_step=128, **given)
    costs = Costs(run)
    without = [c for c in Space(run, costs).of_effect(SAME) if not c.level("in_backward")]
    found = advice_for(run, min(costs.least_bytes(c.run.setting) for c in without) - 1)
    assert found[0].effect == EFFECTS[effect]
    assert {"train.optimizer_in_backward=true", "bucket.mode=packed", "bucket.max_tokens=191"} <= {*found[0].flags}
    assert ("train.max_grad_norm=null" in found[0].flags) is (norm is not None)


def test_updates_in_backward_with_a_paged_optimizer_are_the_lightest_full_training():
    """All weights of an 8B, trained on 24 GB, that are not offered, or offered as the same training."""
    run = workload(method="full", precision="bf16", max_tokens=64, longest=64, tokens_per_step=128)
    costs = Costs(run)
    space = Space(run, costs)
    found = [c for effect in range(len(EFFECTS)) for c in space.of_effect(effect) if c.level("in_backward") == 3]
    paged = min(found, key=lambda candidate: candidate.total_level)
    assert {"train.optimizer=paged_adamw_8bit", "train.tokens_per_step=64", "train.max_grad_norm=null"} < {*paged.flags}
    assert paged.effect_text == (
        "smaller optimizer steps without gradient clipping, 8-bit optimizer state, paged from host memory"
    )
    others = [c for c in space.of_effect(SMALLER_STEPS) if c.level("in_backward") == 2 and c.total_level == 2]
    assert min(costs.least_bytes(c.run.setting) for c in others) > costs.least_bytes(paged.run.setting)
    # The state goes to the device and back, and is in host memory.
    assert paged.slowdown > max(c.slowdown for c in others)
    assert costs.offloaded_bytes(paged.run.setting)[0] > 0 == costs.offloaded_bytes(others[0].run.setting)[0]
    unclipped = workload(
        method="full", precision="bf16", max_tokens=64, longest=64, tokens_per_step=64, max_grad_norm=None
    )
    light = [c for c in Space(unclipped, Costs(unclipped)).of_effect(ROUNDED) if c.level("in_backward") == 2]
    assert light and all("8-bit optimizer state" in c.effect_text for c in light)


@pytest.mark.slow
def test_full_training_of_an_8b_is_offered_on_24_gb():
    """Adapters alone offered to somebody with 24 GB who wants to train all weights."""
    flags = ["model.name=llama-3.1-8b", "hardware.gpu=RTX-4090", "train.method=full"]
    run = fit_run(with_flags(load_params(COMMON_PARAMS), flags))
    prediction, memory = predict_tiers(run)
    found = answer(run, prediction, memory).remedies
    (remedy,) = (remedy for remedy in found if "train.optimizer_in_backward=true" in remedy.flags)
    assert 19 * GIB < remedy.peak_bytes < 20 * GIB and remedy.host_bytes > 14 * GIB


@pytest.mark.parametrize(
    ("gpus", "given"),
    [
        (1, {"method": "full", "precision": "bf16", "master_weights": True}),
        (4, {"method": "full", "precision": "bf16", "master_weights": True}),
        (1, {"method": "full", "optimizer": "adafactor", "max_grad_norm": None, "tokens_per_step": 512}),
        (4, {"method": "full", "optimizer": "paged_adamw_8bit", "grad_ckpt": True, "grad_ckpt_policy": "selective"}),
        (1, {"method": "full", "max_grad_norm": None, "optimizer_in_backward": True, "tokens_per_step": 1024}),
        (1, {"method": "int8_lora"}),
        (4, {"method": "qlora"}),
    ],
    ids=str,
)
def test_every_candidate_passes_the_rules_of_params(gpus, given):
    """Advice that ends with `error: train.optimizer: ...` when a user follows it."""
    flags = [f"train.{key}={json.dumps(value)}" for key, value in given.items()]
    flags += ["data.max_length=256", "bucket.max_tokens=1024", "train.loss_chunk=null", f"hardware.num_gpus={gpus}"]
    p = with_flags(PARAMS, [*flags, f"train.sharding={'none' if gpus == 1 else 'hsdp'}"])
    run = full_rows_run(p, CONFIG, H100)
    space = Space(run, Costs(run))
    lines = {candidate.flags for effect in range(len(EFFECTS)) for candidate in space.of_effect(effect)}
    assert lines
    for line in sorted(lines)[:: 1 + len(lines) // 50]:
        assert with_flags(p, line) != p


def test_a_change_that_rules_refuse_alone_is_tried_beside_one_that_makes_it_legal():
    """Rows cut shorter where 4-bit weights and recomputed layers fit, because 8-bit weights refuse one of the two."""
    flags = ["data.max_length=256", "bucket.max_tokens=1024", "train.method=int8_lora", "train.grad_ckpt=false"]
    p = with_flags(PARAMS, [*flags, "train.router_aux_loss=0.01"])
    recomputed, in_4_bits = "train.grad_ckpt=true", "train.method=qlora"
    assert not keeps_rules(p, [recomputed]) and keeps_rules(p, [recomputed, in_4_bits])
    run = full_rows_run(p, CONFIG, H100)
    space = Space(run, Costs(run))
    lines = [one.flags for effect in range(len(EFFECTS)) for one in space.of_effect(effect)]
    assert any({recomputed, in_4_bits} <= {*line} for line in lines)
    assert all(keeps_rules(p, line) for line in lines)


def test_overrides_that_params_refuse_are_recognized():
    """Advice that ends with an error of params.yaml, or changes that are never offered."""
    p = with_flags(PARAMS, ["data.max_length=256", "bucket.max_tokens=1024", "train.method=int8_lora"])
    assert keeps_rules(p, ["train.offload=optimizer"]) and not keeps_rules(p, ["train.offload=parameters"])


@pytest.mark.slow
@pytest.mark.parametrize("refused", [False, True])
def test_advice_offers_only_what_params_accept(refused: bool, monkeypatch: pytest.MonkeyPatch):
    """A command that ends in an error."""

    def keeps(params: Params, flags: Iterable[str]) -> bool:
        return keeps_rules(params, flags) and not (refused and "train.offload=parameters" in flags)

    monkeypatch.setattr(search_space, "keeps_rules", keeps)
    flags = ["data.max_length=256", "bucket.max_tokens=1024", "train.loss_chunk=null", "estimate.headroom_percent=0"]
    p = with_flags(PARAMS, [*flags, "train.method=full", "train.precision=fp32"])
    run = full_rows_run(p, CONFIG, H100)
    prediction = run.predict()
    device = replace(H100, memory_bytes=H100.context.max_bytes + int(0.6 * prediction.peak.bytes))
    small = replace(run, device=device)
    remedies = advice_for(small, small.fitting_bytes)
    assert remedies
    assert any("train.offload=parameters" in one.flags for one in remedies) is not refused


@pytest.mark.slow
def test_a_row_that_does_not_fit_alone_is_divided_among_gpus():
    """Rows cut shorter on GPUs that could share them."""
    flags = ["data.max_length=1024", "bucket.max_tokens=1024", "train.grad_ckpt=true", "train.loss_chunk=128"]
    p = with_flags(PARAMS, [*flags, "hardware.num_gpus=4", "train.sharding=zero3", "train.tokens_per_step=8192"])
    run = full_rows_run(p, CONFIG, H100)
    divided, complete = (
        peak_of(replace(run, setting=setting_with(run.setting, {"train.context_parallel": 4}))),
        peak_of(run),
    )
    found = advice_for(run, int(divided + 0.05 * (complete - divided)))
    remedy = next(one for one in found if "train.context_parallel=4" in one.flags)
    assert remedy.effect == EFFECTS[SAME] and remedy.slowdown > 1
    assert full_rows_run(with_flags(p, remedy.flags), CONFIG, H100).setting.layout.context == 4


@pytest.mark.slow
def test_the_optimizer_on_the_host_is_advised_with_its_price():
    """The switch that makes the largest models fit left out, or its slowdown hidden."""
    run = workload(method="full", precision="bf16", master_weights=True, max_tokens=64, longest=64)
    usable = peak_of(replace(run, setting=setting_with(run.setting, {"train.offload": "optimizer"})))
    remedy = next(one for one in advice_for(run, usable) if "train.offload=optimizer" in one.flags)
    assert remedy.effect == EFFECTS[SAME] and remedy.slowdown > 1.5


@pytest.mark.slow
def test_the_disk_is_advised_where_the_host_has_too_little_memory():
    """Other weights trained, or a host that runs out of memory, where the disk has room for the optimizer's state."""
    given: dict[str, Any] = {"method": "full", "precision": "bf16", "master_weights": True, "offload": "optimizer"}
    run = workload(max_tokens=64, longest=64, **given)
    in_memory, _ = Costs(run).offloaded_bytes(run.setting)
    of_host = with_flags(run.params, [f"hardware.host_ram_gib={in_memory / 2 / GIB}"])
    small = replace(run, params=of_host, setting=replace(run.setting, offload_buffer_bytes=in_memory // 8))
    remedy = advice_for(small, peak_of(run))[0]
    assert remedy.flags == ("train.offload_to=disk",) and remedy.effect == EFFECTS[SAME]
    assert remedy.host_bytes <= in_memory // 2 and remedy.disk_bytes >= 12 * 2**10 and remedy.step_seconds


@pytest.mark.slow
def test_weights_on_the_host_are_advised_where_they_are_too_large():
    """Other weights trained on one GPU that could fetch each layer from the host."""
    run = workload(method="full", loss_chunk=None, precision="bf16", longest=64)
    moved = setting_with(run.setting, {"train.offload": "optimizer"})
    remedy = advice_for(run, Costs(run).least_bytes(moved) - MIB // 8)[0]
    assert "train.offload=parameters" in remedy.flags and remedy.effect == EFFECTS[SAME]
    assert remedy.host_bytes and not remedy.disk_bytes and remedy.slowdown > 2


def test_only_confirmed_candidates_are_offered(monkeypatch: pytest.MonkeyPatch):
    """A line that fits by its tensors alone; a search that confirms hundreds of runs."""
    monkeypatch.setattr(search, "MOST_CONFIRMED", 3)
    run = workload(method="lora", loss_chunk=None)
    tried: list[Run] = []

    def refuse_all_but_the_last(changed: Candidate, peak_bytes: int) -> Prediction | None:
        tried.append(changed.run)
        peak = Peak(bytes=1, by_category={})
        return Mock(Prediction, peak=peak) if len(tried) == search.MOST_CONFIRMED else None

    found = advice_for(run, peak_of(run), refuse_all_but_the_last)
    assert len(tried) == search.MOST_CONFIRMED
    assert [remedy.peak_bytes for remedy in found] == [1], "the confirmed peak"


@pytest.mark.slow
def test_another_method_is_offered_where_states_alone_are_too_large():
    """Shorter rows where another method would do."""
    paged = "paged_adamw_8bit"  # Nothing is offloaded with it.
    run = workload(method="full", loss_chunk=None, precision="bf16", longest=64, optimizer=paged)
    usable = Costs(run).least_bytes(run.setting) - MIB // 8
    found = advice_for(run, usable)
    assert found and all(remedy.effect == EFFECTS[OTHER_WEIGHTS] for remedy in found)


def test_nothing_is_advised_where_nothing_fits():
    assert advice_for(workload(method="qlora"), MIB) == []


def test_smaller_micro_batches_are_set_by_the_parameter_of_the_mode():
    """bucket.max_tokens lowered where bucket.fixed_rows decides."""

    def flags(**changes: Any) -> list[str]:
        return [flag for option in search_space.budgets_of(workload(**changes)) for flag in option.flags]

    assert flags()[:2] == ["bucket.max_tokens=512", "bucket.max_tokens=256"]
    assert flags()[2:4] == ["data.max_length=128", "bucket.max_tokens=128"]
    assert flags(mode="fixed") == ["bucket.fixed_rows=2", "bucket.fixed_rows=1"]


def test_full_micro_batches_of_every_mode():
    """Rows that exceed the budget, or joined ones that leave room."""
    bucketed, packed, fixed = (workload(mode=mode, max_tokens=256).bucket for mode in ("bucketed", "packed", "fixed"))
    assert full_batch(bucketed, 96) == shape(2, 96, 190)
    assert full_batch(packed, 96) == joined((96, 96, 64), 253)
    assert full_batch(fixed, 96) == shape(4, 96, 380)
    pairs = full_batch(packed, 72, PAIR)
    assert pairs.packed_lengths == (72, 72) and full_batch(packed, 200, PAIR).packed_lengths == (200, 200)


@pytest.mark.parametrize("hints", [{}, {0: 50, 200: 650}, {0: 600, 900: 700}, {0: 50, 200: 40}])
@pytest.mark.parametrize("usable", [10, 100, 1000, 5555, 10**6])
def test_the_largest_that_fits_is_found_in_few_traces(usable, hints):
    """An answer that does not fit, or one far below the largest, whatever the hints."""
    traced = []

    def peak_of(count: int) -> int:
        traced.append(count)
        return max(50 + 3 * count, 5 * count - 400)  # Another instant is the peak of large ones.

    found = largest_fitting(peak_of, usable, 5000, hints)
    assert len(traced) <= what_fits.MOST_TRACES
    true = max((count for count in range(1, 5001) if peak_of(count) <= usable), default=0)
    assert true * (1 - 1 / what_fits.PRECISION) - 1 <= found <= true


def test_the_smallest_gpu_and_the_longest_row_fit_by_prediction():
    """A GPU named that is too small or has no bf16; a row length that does not fit."""
    assert smallest_gpu(workload(), {}) == "P4"
    assert smallest_gpu(workload(precision="bf16"), {}) == "RTX-3070"
    run = workload(method="lora", loss_chunk=None)
    usable = int(peak_of(replace(run, steps=largest_steps(shape(1, 512, 511), several=True))) * 1.05)
    found = longest_fitting_row(run, usable, {})
    assert 512 <= found.value < 640 and found.limit is None
    assert longest_fitting_row(run, 10**10, {}) == Largest(value=1024, limit="the model's 1,024 positions")


def test_what_the_run_has_is_the_least_that_fits(monkeypatch):
    """A longest row of 0 tokens for a run that fits, as few traces with images found none."""
    monkeypatch.setattr(what_fits, "largest_fitting", lambda *args, **options: 0)
    monkeypatch.setattr(what_fits, "smallest_gpu", lambda *args: None)
    run = workload(method="lora")
    (last,) = run.steps[-1][-1:]
    found = what_fits.find_limits(run, peak_bytes=1)
    assert (found.longest_row.value, found.largest_max_tokens.value) == (run.longest, last.rows * last.length)
    assert what_fits.find_limits(run, peak_bytes=run.fitting_bytes + 1).longest_row.value == 0


@pytest.mark.slow
def test_gpus_that_divide_rows_take_longer_ones():
    """The longest row of four GPUs as that of one."""
    flags = ["hardware.num_gpus=4", "train.sharding=zero3", "train.method=lora", "train.tokens_per_step=4096"]
    config = copy(CONFIG)
    config.max_position_embeddings = 10_000
    whole, parts = (
        full_rows_run(with_flags(PARAMS, [*flags, f"train.context_parallel={size}"]), config, H100) for size in (1, 4)
    )
    usable = peak_of(whole)
    near = [{0: Costs(run).least_bytes(run.setting), 1024: peak_of(run)} for run in (whole, parts)]
    of_one, of_four = (
        longest_fitting_row(run, usable, known).value for run, known in zip((whole, parts), near, strict=True)
    )
    assert 0 < 2 * of_one < of_four
