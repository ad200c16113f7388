"""The registry of memory switches: its variants pass the rules of params.yaml, and a new switch needs one entry."""

from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import pytest

from lean_finetune.commands.choose.plan_text import set_words
from lean_finetune.config.load import keeps_rules, load_params, with_flags
from lean_finetune.config.parallel_layout import ParallelLayout
from lean_finetune.config.rule import SWITCHED_OFF, Rule
from lean_finetune.config.train_rules import TRAIN_RULES
from lean_finetune.core.errors import UserError
from lean_finetune.memory.advice.search_space import Space
from lean_finetune.memory.advice.step_cost import Costs
from lean_finetune.memory.advice.what_fits import single_changes
from lean_finetune.memory.switches.all_switches import SWITCHES, switch_table, with_method, with_precision
from lean_finetune.memory.switches.switch import (
    OTHER_WEIGHTS,
    Support,
    Switch,
    Values,
    different,
    flags_of,
    setting_with,
)
from lean_finetune.memory.trace.setting import Setting
from tests.conftest import ROOT
from tests.memory.common import setting_of
from tests.memory.workloads import params_of, workload

GPU = Support(cuda=True, native_bf16=True)
PARAMS = load_params(ROOT / "params.yaml")


def lighter(name: str, setting: Setting, support: Support = GPU) -> list[tuple[str, ...]]:
    """The overrides of a switch's variants that the rules accept."""
    switch = next(switch for switch in SWITCHES if switch.name == name)
    found = (flags_of(different(setting, values)) for values in switch.lighter(setting, support))
    return [flags for flags in found if flags and keeps_rules(params_of(setting), flags)]


def halved_rank(setting: Setting, support: Support) -> list[Values]:
    return [{"train.lora.rank": setting.train.lora.rank // 2}] if setting.train.adapted else []


@pytest.fixture
def new_switch() -> Iterator[Switch]:
    """A switch and a rule that only this test knows."""
    switch = Switch(
        name="rank",
        parameters=("train.lora.rank",),
        lighter=halved_rank,
        shown=halved_rank,
        words=lambda setting: {"rank": f"adapters of rank {setting.train.lora.rank}"},
        effect=OTHER_WEIGHTS,
        ease=7,
        time=lambda setting, more: 1.0 if setting.train.lora.rank > 2 else 1.25,
    )
    rule = Rule("train.lora.rank", lambda p: p.train.lora.rank % 2 == 1, "must be even; got {train.lora.rank}; add 1")
    SWITCHES.append(switch)
    TRAIN_RULES.append(rule)
    yield switch
    SWITCHES.remove(switch)
    TRAIN_RULES.remove(rule)


def test_a_new_switch_is_swept_priced_advised_documented_and_refused_by_its_rule(new_switch):
    """A switch that needs changes in a dozen files."""
    run = workload(method="lora", loss_chunk=None)
    assert ("train.lora.rank=2",) in [flags for flags, _ in single_changes(run.setting, GPU)]
    offered = Space(run, Costs(run)).of_effect(OTHER_WEIGHTS)
    smaller = next(candidate for candidate in offered if candidate.flags == ("train.lora.rank=2",))
    assert smaller.slowdown == pytest.approx(1.25, rel=0.01)
    assert smaller.run.setting == run.setting.with_train(lora=run.setting.train.lora.model_copy(update={"rank": 2}))
    assert "| rank | `train.lora.rank` | trains different weights |" in switch_table()
    assert "adapters of rank 2" in set_words(smaller.run)
    with pytest.raises(UserError, match=r"^train\.lora\.rank: must be even; got 7; add 1$"):
        with_flags(PARAMS, ["train.lora.rank=7"])
    odd = workload(method="lora", rank=2)
    assert not any(one.level("rank") for one in Space(odd, Costs(odd)).of_effect(OTHER_WEIGHTS))


def test_the_documentation_has_the_table_of_switches():
    """A switch that a user cannot find. Copy the table from `switch_table()` after a change."""
    assert switch_table() in (ROOT / "docs/memory-switches.md").read_text(encoding="utf-8")


def test_each_parameter_belongs_to_one_switch_and_is_in_the_schema():
    """A misspelt key, or one switch that overwrites the parameter of another."""
    keys = [key for switch in SWITCHES for key in switch.parameters]
    assert len(keys) == len(set(keys))
    for key in keys:
        attrgetter(key)(PARAMS)


WHAT_IS_TRAINED = {
    *("train.method", "train.precision", "train.optimizer", "train.max_grad_norm", "train.loss_chunk"),
    *("train.router", "train.quant.type", "train.quant.double"),
    *("train.grad_ckpt", "train.sharding", "train.shard_group_gpus"),
}
"""Parameters with no value that is `off`, or that `fit` and the report always show; those of LoRA belong to it."""


def test_each_switch_is_among_those_that_describe_a_run():
    """A switch that is on, and neither `fit` nor the report says so."""
    parameters = {name for switch in SWITCHES for name in switch.parameters if not name.startswith("train.lora.")}
    assert parameters - WHAT_IS_TRAINED == {*SWITCHED_OFF}


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ({}, ["grad_ckpt=true grad_ckpt_policy=selective", "grad_ckpt=true", "grad_ckpt=true offload_activations=cpu"]),
        ({"method": "int8_lora"}, ["grad_ckpt=true", "grad_ckpt=true offload_activations=cpu"]),
        ({"grad_ckpt": True}, ["offload_activations=cpu"]),
        ({"grad_ckpt": True, "offload_activations": "disk"}, []),
    ],
)
def test_activations_are_recomputed_before_they_are_offloaded(setting: dict[str, Any], expected: list[str]):
    """Copies over the link where recomputing is enough, or a value that has no effect."""
    found = lighter("activations", setting_of(**setting))
    assert [" ".join(flag.removeprefix("train.") for flag in flags) for flags in found] == expected


def test_adapters_of_experts_are_made_smaller_then_left_out():
    """Advice that keeps what fills the memory, or a method that the rules refuse with adapters of experts."""
    adapted = setting_of(method="lora", lora_experts="all", lora_expert_rank=4)
    assert lighter("experts", adapted) == [("train.lora.expert_rank=2",), ("train.lora.experts=none",)]
    assert lighter("experts", setting_of(method="lora")) == lighter("experts", setting_of(method="full")) == []
    assert different(adapted, with_method("full"))["train.lora.experts"] == "none"


@pytest.mark.parametrize(
    ("mode", "method", "expected"),
    [("zero3", "full", [2, 4, 8]), ("zero3", "qlora", [2, 4, 8]), ("zero1", "full", [8]), ("ddp", "int8_lora", [])],
)
def test_tensor_parallelism_of_some_gpus_or_all(mode: Any, method: str, expected: list[int]):
    """Of eight GPUs; a setting with other numbers of rows and parts than its GPUs, or a mode without GPUs to share."""
    setting = setting_of(method=method, sharding=mode, gpus=8)
    alone = {8: ("train.sharding=none",)}
    found = [(f"train.tensor_parallel={size}", *alone.get(size, ())) for size in expected]
    assert lighter("tensor_parallel", setting) == found
    for size in expected:
        changed = setting_with(setting, {"train.tensor_parallel": size})
        assert changed.layout == ParallelLayout(data=8 // size, tensor=size)


def test_the_optimizer_is_offloaded_only_where_its_state_is_large_and_the_host_can_update():
    full = setting_of(method="full", precision="bf16", master_weights=True)
    assert lighter("offload", full) == [("train.offload=optimizer",), ("train.offload=parameters",)]
    small_host = Support(cuda=True, native_bf16=True, host_ram_known=True)
    on_disk = "train.offload_to=disk"
    assert lighter("offload", full, small_host)[1::2] == [
        ("train.offload=optimizer", on_disk),
        ("train.offload=parameters", on_disk),
    ]
    moved = setting_of(method="full", precision="bf16", master_weights=True, offload="optimizer")
    assert lighter("offload", moved, small_host)[0] == (on_disk,)
    assert lighter("offload", setting_of(method="full", optimizer="paged_adamw_8bit")) == []
    for method in ("lora", "qlora"):
        assert lighter("offload", setting_of(method=method), small_host) == [("train.offload=parameters",)]
    assert lighter("offload", setting_of(method="int8_lora")) == []
    assert lighter("offload", full, Support(cuda=False, native_bf16=True)) == []


@pytest.mark.parametrize(
    ("changes", "values", "expected"),
    [
        ({"method": "lora", "lora_dora": True}, with_method("qlora"), ["method=qlora", "lora.dora=false"]),
        (
            {"method": "qlora", "quant_type": "fp4", "quant_double": False},
            with_method("lora"),
            ["method=lora", "quant.type=nf4", "quant.double=true"],
        ),
        (
            {"method": "qlora", "lora_dropout": 0.1, "lora_rslora": True},
            with_method("full"),
            ["method=full", "lora.dropout=0.0", "lora.rslora=false"],
        ),
        (
            {"method": "full", "precision": "bf16", "master_weights": True},
            with_precision("fp32"),
            ["precision=fp32", "master_weights=false"],
        ),
        (
            {"method": "full", "optimizer_in_backward": True, "max_grad_norm": None},
            with_precision("fp16"),
            ["precision=fp16", "optimizer_in_backward=false"],
        ),
    ],
    ids=str,
)
def test_a_variant_turns_off_what_it_excludes(changes: dict[str, Any], values: Values, expected: list[str]):
    """An override that params.yaml refuses, or a trace of another setting than the override leads to."""
    found = different(setting_of(**changes), values)
    assert list(flags_of(found)) == [f"train.{line}" for line in expected]
    assert different(setting_with(setting_of(**changes), found), values) == {}


def test_single_changes_of_a_recomputing_run_are_complete():
    """grad_ckpt=false with a policy, which params.yaml refuses."""
    recomputing = setting_of(grad_ckpt=True, grad_ckpt_policy="selective")
    flags = [flags for flags, _ in single_changes(recomputing, GPU)]
    assert flags[:2] == [("train.grad_ckpt=false", "train.grad_ckpt_policy=full"), ("train.grad_ckpt_policy=full",)]
