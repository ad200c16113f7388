"""Advice: what it names fits, does no more than is needed, and the least harmful comes first."""

import json
from dataclasses import replace
from typing import Any

import pytest

from lean_finetune.config.load import load_params
from lean_finetune.config.overrides import with_flags
from lean_finetune.core.units import MIB
from lean_finetune.memory.advice import largest_that_fits, search, search_space
from lean_finetune.memory.advice.fit_command import workload_of
from lean_finetune.memory.advice.largest_that_fits import Largest, largest_fitting, longest_row, smallest_gpu
from lean_finetune.memory.advice.search import Confirm, Remedy, advise
from lean_finetune.memory.advice.search_space import Candidate, Space
from lean_finetune.memory.advice.switch import EFFECTS, OTHER_WEIGHTS, SAME, UNCLIPPED
from lean_finetune.memory.advice.switches import setting_with
from lean_finetune.memory.advice.workload import Costs, Workload, full_batch, largest_steps
from lean_finetune.memory.predict.peak import predict
from tests.conftest import ROOT
from tests.memory.common import joined, shape
from tests.memory.workloads import CONFIG, H100, TARGET, peak_of, workload

PARAMS = load_params(ROOT / "params.yaml")


def ask(run: Workload, usable_bytes: int, confirm: Confirm | None = None) -> list[Remedy]:
    costs = Costs(run, H100, TARGET)
    found = predict(run.config, run.setting, run.steps, TARGET).peak
    return advise(
        run,
        costs,
        TARGET,
        peak=found,
        usable_bytes=usable_bytes,
        native_bf16=True,
        progress=False,
        confirm=confirm,
    )


def changes(remedy: Remedy) -> set[str]:
    """The switches of a remedy: recomputing some is no part of recomputing all."""
    some = any(flag.startswith("train.grad_ckpt_policy=") for flag in remedy.flags)
    return set(remedy.flags) - ({"train.grad_ckpt=true"} if some else set())


def test_what_is_advised_fits_and_the_least_harmful_comes_first():
    """A remedy that does not fit, one with a change too many, or other weights where a smaller budget would do."""
    run = workload(method="full", loss_chunk=None)
    usable = int(peak_of(run) * 0.9)
    found = ask(run, usable)
    assert found and all(remedy.peak_bytes <= usable for remedy in found)
    assert found[0].effect == "changes nothing that is learnt"
    effects = [EFFECTS.index(remedy.effect) for remedy in found]
    assert effects == sorted(effects)
    for one in found:
        assert not any(changes(other) < changes(one) for other in found)
    same = [remedy.slowdown for remedy in found if remedy.effect == EFFECTS[0]]
    assert same == pytest.approx(sorted(same), abs=2 * search_space.SAME_SPEED)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.15, 0.5])
def test_no_switch_of_the_first_line_can_be_left_out(share):
    """Everything turned on, four times as slow, where two switches would do."""
    run = workload(method="full", loss_chunk=None, precision="bf16")
    space = Space(run, Costs(run, H100, TARGET), native_bf16=True)
    candidates = space.of_effect(SAME)
    least = peak_of(max(candidates, key=lambda c: sum(option.strength for option in c.options)).run)
    usable = int(least + share * (peak_of(run) - least))
    best = ask(run, usable)[0]
    offered = next(c for c in candidates if c.flags == best.flags)
    for other in candidates:
        changed = sum(a.strength != b.strength for a, b in zip(offered.options, other.options, strict=True))
        if changed == 1 and offered.covers(other):
            assert peak_of(other.run) > usable, other.flags


@pytest.mark.slow
def test_a_line_with_little_room_has_a_roomier_one_beside_it():
    run = workload(method="full", loss_chunk=None)
    first = ask(run, int(peak_of(run) * 0.9))[0]
    tight = ask(run, first.peak_bytes * 100 // 99)
    assert tight[0].flags == first.flags
    assert any(one.peak_bytes <= search.ROOMY * first.peak_bytes / 0.99 for one in tight[1:])


@pytest.mark.parametrize(("norm", "effect"), [pytest.param(None, SAME, marks=pytest.mark.slow), (1.0, UNCLIPPED)])
@pytest.mark.slow
def test_updates_in_backward_are_offered_where_nothing_else_trains_all_weights(norm, effect):
    """Other weights trained for want of the switch that frees each gradient at once."""
    # Whole steps in one micro-batch of joined rows, as a plan cuts them in mode packed.
    run = workload(method="full", precision="bf16", max_tokens=64, longest=64, tokens_per_step=128, max_grad_norm=norm)
    costs = Costs(run, H100, TARGET)
    space = Space(run, costs, native_bf16=True)
    without = [c for c in space.of_effect(SAME) if not c.strength("in_backward")]
    usable = min(costs.least_bytes(c.run.setting) for c in without) - 1
    found = ask(run, usable)
    assert found[0].effect == EFFECTS[effect]
    assert {"train.optimizer_in_backward=true", "bucket.mode=packed", "bucket.max_tokens=191"} <= {*found[0].flags}
    assert ("train.max_grad_norm=null" in found[0].flags) is (norm is not None)


@pytest.mark.parametrize(
    "given",
    [
        {"method": "full", "precision": "bf16", "master_weights": True},
        {"method": "full", "optimizer": "adamw_foreach", "max_grad_norm": None, "tokens_per_step": 512},
        {"method": "full", "optimizer": "paged_adamw_8bit", "grad_ckpt": True, "grad_ckpt_policy": "selective"},
        {"method": "full", "max_grad_norm": None, "optimizer_in_backward": True},
        {"method": "int8_lora"},
        {"method": "qlora", "optimizer": "adamw_foreach"},
    ],
    ids=lambda given: "-".join(map(str, given.values())),
)
@pytest.mark.parametrize("sharding", ["none", "hsdp"])
def test_every_line_that_can_be_offered_passes_the_rules_of_params(given, sharding):
    """A line that ends with `error: train.optimizer: ...` when it is given."""
    gpus = 1 if sharding == "none" else 4
    if gpus > 1 and given.get("optimizer_in_backward") or sharding == "hsdp" and given["method"] == "int8_lora":
        return
    flags = [f"train.{key}={json.dumps(value)}" for key, value in given.items()]
    flags += ["data.max_length=256", "bucket.max_tokens=1024", "train.loss_chunk=null"]
    p = with_flags(PARAMS, [*flags, f"train.sharding={sharding}", f"hardware.num_gpus={gpus}"])
    run = workload_of(p, CONFIG, given.get("precision", "fp32"))
    space = Space(run, Costs(run, H100, TARGET), native_bf16=True)
    lines = {candidate.flags for effect in range(len(EFFECTS)) for candidate in space.of_effect(effect)}
    assert lines
    for line in sorted(lines)[:: 1 + len(lines) // 50]:
        assert with_flags(p, line) != p


@pytest.mark.slow
def test_the_optimizer_on_the_host_is_advised_with_its_price():
    """The switch that makes the largest models fit left out, or its slowdown hidden."""
    run = workload(method="full", precision="bf16", master_weights=True, max_tokens=64, longest=64)
    usable = peak_of(replace(run, setting=setting_with(run.setting, {"train.offload": "optimizer"})))
    remedy = next(one for one in ask(run, usable) if "train.offload=optimizer" in one.flags)
    assert remedy.effect == EFFECTS[SAME] and remedy.slowdown > 1.5


@pytest.mark.slow
def test_a_remedy_is_the_prediction_of_the_run_it_names():
    """A peak told for other flags than those in the line."""
    run = workload(method="lora", loss_chunk=None, longest=1024)
    some = "train.grad_ckpt_policy=selective"
    kept = {"train.grad_ckpt=true", "train.loss_chunk=512", some}
    found = [remedy for remedy in ask(run, int(peak_of(run) * 0.9)) if set(remedy.flags) <= kept]
    assert found
    for remedy in found:
        policy: Any = "selective" if some in remedy.flags else "full"
        model = replace(run.setting.model, grad_ckpt="train.grad_ckpt=true" in remedy.flags, grad_ckpt_policy=policy)
        chunk = 512 if "train.loss_chunk=512" in remedy.flags else None
        changed = replace(run, setting=replace(run.setting, model=model, loss_chunk=chunk))
        assert peak_of(changed) == remedy.peak_bytes
        assert remedy.command == "dvc exp run " + " ".join(f"-S {flag}" for flag in remedy.flags)


def test_what_is_not_confirmed_is_not_offered():
    """A line that fits by its tensors alone; a search that holds hundreds of runs against the device."""
    run = workload(method="lora", loss_chunk=None)
    asked: list[Workload] = []

    def refuse_all_but_the_last(changed: Candidate, peak_bytes: int) -> int | None:
        asked.append(changed.run)
        return 1 if len(asked) == search.MOST_CONFIRMED else None

    found = ask(run, peak_of(run), refuse_all_but_the_last)
    assert len(asked) == search.MOST_CONFIRMED
    assert [remedy.peak_bytes for remedy in found] == [1], "the peak that was confirmed is told"


@pytest.mark.slow
def test_states_alone_rule_out_and_shorter_rows_are_the_last_resort(monkeypatch):
    """Traces spent on full training where its states are too large; rows cut where another method would do."""
    traced = []
    real = predict

    def counting(config, setting, steps, target):
        traced.append(setting.model.method)
        return real(config, setting, steps, target)

    monkeypatch.setattr(search, "predict", counting)
    run = workload(method="full", loss_chunk=None, precision="bf16", longest=64)
    costs = Costs(run, H100, TARGET)
    usable = costs.least_bytes(replace(run.setting, offload="optimizer")) - MIB // 8
    found = ask(run, usable)
    assert "full" not in traced and len(traced) <= search.MOST_TRACES
    assert found and all(remedy.effect == EFFECTS[OTHER_WEIGHTS] for remedy in found)


def test_nothing_is_advised_where_nothing_fits():
    """A remedy invented."""
    assert ask(workload(method="qlora"), MIB) == []


def test_the_budgets_flag_is_the_one_that_the_mode_heeds():
    """bucket.max_tokens lowered where fixed_rows decide."""

    def flags(**changes: Any) -> list[str]:
        return [flag for option in search_space.budgets_of(workload(**changes)) for flag in option.flags]

    assert flags()[:2] == ["bucket.max_tokens=512", "bucket.max_tokens=256"]
    assert flags()[2:4] == ["data.max_length=128", "bucket.max_tokens=128"]
    assert flags(mode="fixed") == ["bucket.fixed_rows=2", "bucket.fixed_rows=1"]


def test_full_micro_batches_of_every_mode():
    """Rows that overfill the budget, or joined ones that do not."""
    assert full_batch("bucketed", 96, max_tokens=256, fixed_rows=4) == shape(2, 96, 190)
    assert full_batch("packed", 96, max_tokens=256, fixed_rows=4) == joined((96, 96, 64), 253)
    assert full_batch("fixed", 96, max_tokens=256, fixed_rows=4) == shape(4, 96, 380)


@pytest.mark.parametrize("hints", [{}, {0: 50, 200: 650}, {0: 600, 900: 700}, {0: 50, 200: 40}])
@pytest.mark.parametrize("usable", [10, 100, 1000, 5555, 10**6])
def test_the_largest_that_fits_is_found_in_few_traces(usable, hints):
    """An answer that does not fit, or one far below the largest, whatever was hinted."""
    asked = []

    def peak_of(count: int) -> int:
        asked.append(count)
        return max(50 + 3 * count, 5 * count - 400)  # Another instant is the peak of large ones.

    found = largest_fitting(peak_of, usable, 5000, hints)
    true = max((count for count in range(1, 5001) if peak_of(count) <= usable), default=0)
    assert true * (1 - 1 / largest_that_fits.PRECISION) - 1 <= found <= true
    assert len(asked) - 5000 <= largest_that_fits.MOST_TRACES + 1


def test_the_smallest_gpu_and_the_longest_row_hold_by_prediction():
    """A GPU named that is too small or has no bf16; a row length that does not fit."""
    assert smallest_gpu(workload(), 8.0, {}) == "P4"
    assert smallest_gpu(workload(precision="bf16"), 8.0, {}) == "RTX-3070"
    run = workload(method="lora", loss_chunk=None)
    usable = int(peak_of(replace(run, steps=largest_steps(shape(1, 512, 511), several=True))) * 1.05)
    found = longest_row(run, TARGET, usable, 1024, {})
    assert 512 <= found.value < 640 and found.limit is None
    assert longest_row(run, TARGET, 10**10, 1024, {}) == Largest(value=1024, limit="the model's 1024 positions")
