"""params.yaml: what is wrong is told by its dotted key, in one line, with what to do."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dvc.utils.hydra import apply_overrides
from ruamel.yaml import YAML

from lean_finetune.config.load import load_params, parse_params
from lean_finetune.config.schema import round_up
from lean_finetune.core.errors import UserError
from tests.conftest import ROOT


@pytest.fixture
def values() -> dict[str, Any]:
    """The shipped params.yaml as plain values."""
    return values_of(ROOT / "params.yaml")


def values_of(path: Path) -> dict[str, Any]:
    return YAML(typ="safe").load(path.read_text())


def put(values: dict[str, Any], dotted: str, value: Any) -> dict[str, Any]:
    *sections, key = dotted.split(".")
    section = values
    for name in sections:
        section = section[name]
    section[key] = value
    return values


def test_the_shipped_file_is_valid_and_frozen():
    params = load_params(ROOT / "params.yaml")
    with pytest.raises(ValueError, match="frozen"):
        params.train.lr = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("dotted", "value", "message"),
    [
        ("train.grad_chpt", True, r"train\.grad_chpt: unknown parameter; did you mean train\.grad_ckpt\?"),
        ("train.lora.rnk", 3, r"train\.lora\.rnk: unknown parameter; did you mean train\.lora\.rank\?"),
        ("bucket.int", 3, r"bucket\.int: unknown parameter; known: mode, max_tokens, pad_multiple"),
        ("train.lr", "1e-5", r'train\.lr: input should be a valid number; got "1e-5"'),
        ("train.grad_ckpt", 1, r"train\.grad_ckpt: .*boolean; got 1"),
        ("train.method", "dora", r"train\.method: .* 'full', 'lora', 'qlora' or 'int8_lora'; got \"dora\""),
        ("train.master_weights", True, r"train\.master_weights: has an effect only with .* set it to false"),
        ("train.lora.init", "pissa", r"train\.lora\.init: pissa changes the frozen weights.*train\.method=qlora; use"),
        ("evaluate.merged", True, r"evaluate\.merged: needs the merged model; .*set train\.merge to true"),
        ("data.max_rows", 0, r"data\.max_rows: .*greater than or equal to 1; got 0"),
        ("train.max_grad_norm", "x", r'train\.max_grad_norm: .*number; got "x"'),
        ("train.lr", float("nan"), r"train\.lr: "),
        ("train.lora.targets", [], r"train\.lora\.targets: .*at least 1"),
        ("train.lora.targets", [1], r"train\.lora\.targets\.0: .*string; got 1"),
        ("train.lora", 3, r"train\.lora: must be a section with its own keys; got 3"),
        ("train.lora.targets", ["all-linear", "q_proj"], r"train\.lora\.targets: all-linear must be the only entry"),
        ("bucket.max_tokens", 100, r"bucket\.max_tokens: .*data\.max_length=512 .*got 100; raise"),
        ("bucket.constant_shape", True, r"bucket\.constant_shape: .* bucket\.mode=packed; got true .*bucketed; set"),
        ("evaluate.max_tokens", 100, r"evaluate\.max_tokens: .*got 100; raise"),
        (
            "data.revision",
            "main",
            r"data\.revision: needs a Hub source \(hf://org/name\); got 'main' ",
        ),
        ("data.config", "small", r"data\.config: needs a Hub source \(hf://org/name\); got 'small' "),
        ("data.template_date", "today", r"data\.template_date: must be a date as YYYY-MM-DD; got \"today\""),
        ("data.template_date", 20240726, r"data\.template_date: must be a date as YYYY-MM-DD; got 20240726"),
        ("data.source", [], r"data\.source: list should have at least 1 item"),
        ("data.source", "", r"data\.source: string should have at least 1 character"),
        ("data.source", 3, r"data\.source: input should be a valid string; got 3"),
        ("data.source", ["a.jsonl"], r"data\.source\.0: must be a section with its own keys; got \"a\.jsonl\""),
        (
            "data.source",
            [{"source": "a"}, {"source": "b", "wieght": 1}],
            r"data\.source\.1\.wieght: unknown par.* did",
        ),
        (
            "data.source",
            [{"source": "a", "xyz": 1}],
            r"data\.source\.0\.xyz: unknown .* known: source, ",
        ),
        ("data.source", [{"weight": 1.0}], r"data\.source\.0\.source: parameter is missing"),
        ("data.source", [{"source": "a", "weight": 0.0}], r"data\.source\.0\.weight: .*greater than 0; got 0"),
        ("data.source", [{"source": 3}], r"data\.source\.0\.source: input should be a valid string; got 3"),
        ("data.source", [{"source": "a", "format": "chat"}], r"data\.source\.0\.format: input should be 'auto', "),
        ("data.source", [{"source": "a", "revision": "v1"}], r"data\.source\.0\.revision: needs a Hub source"),
    ],
)
def test_a_wrong_value_is_told_in_one_line(values: dict[str, Any], dotted: str, value: Any, message: str):
    with pytest.raises(UserError, match=message) as told:
        parse_params(put(values, dotted, value))
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora.init": "loftq", "method": "lora"}, r"train\.lora\.init: loftq .*=lora; use train\.method=qlora"),
        ({"lora.dora": True, "method": "int8_lora"}, r"train\.lora\.dora: .*; got int8_lora, default; set it to false"),
        ({"lora.init": "pissa", "lora.dora": True, "method": "lora"}, r"train\.lora\.dora: .*got lora, pissa"),
        ({"grad_ckpt_policy": "selective"}, r"train\.grad_ckpt_policy: has an effect only with train\.grad_ckpt=true"),
        (
            {"grad_ckpt_policy": "selective", "grad_ckpt": True, "method": "int8_lora"},
            r"train\.grad_ckpt_policy: selective .*=int8_lora; use full or every_n",
        ),
        ({"quant.type": "fp4", "method": "lora"}, r"train\.quant\.type: .* fp4 with .*=lora; set it to nf4, or"),
        ({"quant.double": False, "method": "full"}, r"train\.quant\.double: .*; set it to true, or use .*=qlora"),
        ({"lora.dropout": 0.1, "method": "full"}, r"train\.lora\.dropout: .* got 0\.1 .*; set it to 0\.0, or"),
        ({"lora.rslora": True, "method": "full"}, r"train\.lora\.rslora: .* set it to false, or use"),
        ({"merge": True, "method": "full"}, r"train\.merge: has an effect only with adapters"),
        ({"master_weights": True, "method": "full"}, r"train\.master_weights: .*; got true with full and fp32"),
        (
            {"master_weights": True, "method": "full", "precision": "bf16", "optimizer": "adamw_foreach"},
            r"train\.optimizer: adamw_foreach .*use adamw",
        ),
        (
            {"offload": "optimizer", "optimizer": "adamw_foreach"},
            r"train\.offload=optimizer updates them one by one; .* use adamw$",
        ),
        (
            {"offload": "optimizer", "optimizer": "paged_adamw_8bit"},
            r"train\.optimizer: a paged optimizer .*; use adamw_8bit, or train\.offload=none",
        ),
        ({"offload": "optimizer", "optimizer": "paged_adamw_32bit"}, r"; use adamw, or train\.offload=none"),
        (
            {"offload": "parameters"},
            r"^train\.offload: .*got parameters with train\.sharding=none; .*, or use optimizer$",
        ),
        (
            {"offload": "parameters", "gpus": 2, "sharding": "zero2"},
            r"^train\.offload: .*got parameters with train\.sharding=zero2; set train\.sharding=zero3",
        ),
        (
            {"optimizer_in_backward": True, "gpus": 2},
            r"^train\.optimizer_in_backward: .*num_gpus=2; set train.optimizer_in_backward=false, or",
        ),
        ({"optimizer_in_backward": True}, r"train\.optimizer_in_backward: .*=qlora; .* use train\.method=full"),
        (
            {"optimizer_in_backward": True, "method": "full"},
            r"train\.optimizer_in_backward: .*train\.max_grad_norm=1\.0; leave train\.max_grad_norm blank",
        ),
        (
            {"optimizer_in_backward": True, "method": "full", "max_grad_norm": None, "precision": "fp16"},
            r"train\.optimizer_in_backward: .*train\.precision=fp16; use bf16 or fp32",
        ),
    ],
)
def test_switches_that_exclude_each_other_are_told_in_one_line(values: dict[str, Any], changes: dict, message: str):
    """A switch that has no effect beside another must not be taken in silence."""
    for key, value in changes.items():
        put(values, "hardware.num_gpus" if key == "gpus" else f"train.{key}", value)
    with pytest.raises(UserError, match=message) as told:
        parse_params(values)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"hardware.num_gpus": 2},
            r"run\.oom_recovery: .* other GPUs wait .*got split with hardware\.num_gpus=2; set it",
        ),
        (
            {"train.method": "full", "train.optimizer_in_backward": True, "train.max_grad_norm": None},
            r"run\.oom_recovery: .*train\.optimizer_in_backward=true has already",
        ),
    ],
)
def test_recovery_where_a_step_cannot_begin_again_is_refused(values: dict[str, Any], changes: dict, message: str):
    """A promise that cannot be kept when memory ends, hours later."""
    for dotted, value in {**changes, "run.oom_recovery": "split"}.items():
        put(values, dotted, value)
    with pytest.raises(UserError, match=message):
        parse_params(values)


def test_a_revision_of_the_section_needs_one_hub_source(values: dict[str, Any]):
    """Entries without a revision take the section's; those that have none to take are left alone."""
    put(values, "data.revision", "v1")
    put(values, "data.source", [{"source": "a.jsonl"}, {"source": "hf://org/name"}])
    parse_params(values)
    put(values, "data.source", [{"source": "a.jsonl"}])
    with pytest.raises(UserError, match=r"data\.revision: needs a Hub source"):
        parse_params(values)


def test_no_held_out_rows_and_what_needs_them_is_refused_at_once(values: dict[str, Any]):
    """All keys in one line, ready to be set: else each run would name the next."""
    put(values, "data.heldout_fraction", 0)
    with pytest.raises(
        UserError, match=r"^data\.heldout_fraction: 0 and no data\.heldout_source leaves no rows for"
    ) as fault:
        parse_params(values)
    for pair in str(fault.value).partition("; also set -S ")[2].split(" -S "):
        dotted, _, value = pair.partition("=")
        put(values, dotted, json.loads(value))
    assert parse_params(values).train.heldout_every_steps is None


@pytest.mark.parametrize(
    "changes, message",
    [
        ({}, r"data\.heldout_fraction: must be 0 with data\.heldout_source.*got 0\.05"),
        (
            {"data.heldout_fraction": 0, "data.heldout_seed": 3},
            r"data\.heldout_fraction: 0 leaves no rows for data\.heldout_seed=3",
        ),
        (
            {"data.heldout_fraction": 0, "data.heldout_source": [{"source": "a.jsonl", "weight": 2.0}]},
            r"data\.heldout_source\.0\.weight: held-out rows are not trained; got 2\.0",
        ),
        ({"data.heldout_source": [{"source": "a", "weigth": 2}]}, r"did you mean data\.heldout_source\.0\.weight\?"),
        ({"data.heldout_source": 3}, r"data\.heldout_source: input should be a valid string; got 3"),
    ],
)
def test_a_held_out_source_is_taken_in_place_of_a_share(values: dict[str, Any], changes: dict, message: str):
    for dotted, value in {"data.heldout_source": "a.jsonl", **changes}.items():
        put(values, dotted, value)
    with pytest.raises(UserError, match=message):
        parse_params(values)


def test_a_misspelt_key_is_told_before_the_one_it_leaves_missing(values: dict[str, Any]):
    """The hint is for renames as well: `grad_chpt` in place of `grad_ckpt` is a typo, not a missing key."""
    values["train"]["grad_chpt"] = values["train"].pop("grad_ckpt")
    with pytest.raises(UserError, match=r"did you mean train\.grad_ckpt\?"):
        parse_params(values)


def test_a_missing_key_is_told(values: dict[str, Any]):
    """There are no defaults in code."""
    del values["train"]["lr"]
    with pytest.raises(UserError, match=r"train\.lr: parameter is missing"):
        parse_params(values)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"seed: [1\n", r"params\.yaml:\d+: not YAML"),
        (b"seed: \xff\xfe\n", r"params\.yaml: unreadable YAML \(UnicodeDecodeError"),
        (b"seed: " + b"9" * 5000 + b"\n", r"params\.yaml: unreadable YAML \(ValueError"),
        (b"- 1\n", r"must be a mapping of sections, got list"),
        (b"", r"must be a mapping of sections, got NoneType"),
    ],
)
def test_an_unreadable_file_is_told(tmp_path: Path, content: bytes, message: str):
    (tmp_path / "params.yaml").write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_params(tmp_path / "params.yaml")


def test_a_missing_file_is_told(tmp_path: Path):
    with pytest.raises(UserError, match="file is missing; run from the repository's root"):
        load_params(tmp_path / "params.yaml")


def test_under_dvc_only_declared_keys_can_be_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """An undeclared read would leave a stale cache, in silence."""
    from lean_finetune.config.declared_params import Declared

    params = load_params(ROOT / "params.yaml")
    reads: set[str] = set()
    view: Any = Declared(params, {"train": {"lr": 1, "lora": {"rank": 1}}}, "train", "", reads)
    assert view.train.lr == params.train.lr and view.train.lora.rank == params.train.lora.rank
    assert reads == {"train.lr", "train.lora.rank"} and view.run.progress == params.run.progress
    for read in (lambda: view.seed, lambda: view.train.method, lambda: view.train.lora.alpha):
        with pytest.raises(UserError, match="dvc.yaml does not list it under params"):
            read()


def test_round_up():
    assert [round_up(n, 8) for n in (1, 8, 9)] == [8, 8, 16]
    assert os.environ.get("DVC_STAGE") is None, "these tests read params.yaml as a user without DVC does"


def test_setting_every_key_deletes_no_comment(tmp_path):
    """By what `dvc exp run -S` itself calls, twice: it replaces a list together with the comment that follows it."""
    path = tmp_path / "params.yaml"
    path.write_text((ROOT / "params.yaml").read_text())
    comments = re.findall("#.*", path.read_text())
    lists = {"data.source": "[{source: a.jsonl},{source: b.jsonl}]", "train.lora.targets": "[q_proj,v_proj]"}
    for word in ("one", "other"):
        apply_overrides(path, [f"{key}={lists.get(key, word)}" for key in leaves(values_of(path))])
        assert re.findall("#.*", path.read_text()) == comments


def leaves(section: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """The dotted keys of all values."""
    for key, value in section.items():
        yield from leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}"]
