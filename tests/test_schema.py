"""params.yaml: every wrong value is refused in one line with its dotted key, the rule, the value and the remedy."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dvc.exceptions import InvalidArgumentError
from dvc.utils.hydra import apply_overrides
from ruamel.yaml import YAML

from lean_finetune.config.declared_params import Declared, declared_part
from lean_finetune.config.load import load_params, parse_params, with_flags
from lean_finetune.core.errors import UserError
from tests.conftest import ROOT

PARAMS = load_params(ROOT / "params.yaml")
IN_BACKWARD = "train.optimizer_in_backward=true"


def refusal(flags: str) -> str:
    """The error of the shipped parameters with these overrides, separated by semicolons."""
    with pytest.raises(UserError) as failure:
        with_flags(PARAMS, flags.split("; "))
    assert "\n" not in str(failure.value)
    return str(failure.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("train.grad_chpt=true", r"train.grad_chpt: unknown parameter; did you mean train.grad_ckpt\?"),
        ("train.lora.rnk=3", r"train.lora.rnk: unknown parameter; did you mean train.lora.rank\?"),
        ("bucket.int=3", "bucket.int: unknown parameter; known: mode, max_tokens, max_patches, pad_multiple"),
        ("train.lr='1e-5'", "train.lr: must be a valid number or 'auto'; got \"1e-5\""),
        ("train.lr=.nan", "train.lr: "),
        ("train.grad_ckpt=1", "train.grad_ckpt: .*boolean; got 1"),
        ("train.method=dora", "train.method: .* 'full', 'lora', 'qlora' or 'int8_lora'; got \"dora\""),
        ("train.max_grad_norm=x", 'train.max_grad_norm: .*number; got "x"'),
        ("train.lora.targets=[]", "train.lora.targets: .*at least 1"),
        ("train.lora.targets=[1]", "train.lora.targets.0: .*string; got 1"),
        *(
            (
                f"train.lora.trainable_tokens=[7, {value}]",
                f"train.lora.trainable_tokens.1: must be the text of a token, or its id "
                f"from 0 to 2147483647; got {value};",
            )
            for value in (-1, 1.5, "true", '""', 2**31)
        ),
        ("train.lora=3", "train.lora: must be a section with its own keys; got 3"),
        ("data.max_rows=0", "data.max_rows: .*greater than or equal to 1; got 0"),
        ("data.image_max_pixels=0", "data.image_max_pixels: .*greater than or equal to 1; got 0"),
        # As many tokens would not fit in this machine's memory.
        ("data.image_min_pixels=1000000000000", "data.image_min_pixels: .*equal to 89478485; got 1000000000000"),
        ("hardware.num_gpus=65537", "hardware.num_gpus: .*less than or equal to 65536; got 65537"),
        ("hardware.host_ram_gib=1e300", r"hardware.host_ram_gib: .*less than or equal to 1048576; got 1e\+300"),
        ("run.rank_timeout_seconds=1e30", r"run.rank_timeout_seconds: .*less than or equal to 31536000; got 1e\+30"),
        ("data.template_date=today", 'data.template_date: must be a date as YYYY-MM-DD; got "today"'),
        ("data.template_date=20240726", "data.template_date: must be a date as YYYY-MM-DD; got 20240726"),
        ("data.source=[]", "data.source: list should have at least 1 item"),
        ("data.source=''", "data.source: string should have at least 1 character"),
        ("data.source=3", "data.source: must be a valid string; got 3"),
        ("data.source=[a.jsonl]", r"data.source.0: must be a section with its own keys; got \"a.jsonl\""),
        ("data.source=[{source: a}, {source: b, wieght: 1}]", "data.source.1.wieght: unknown par.* did"),
        ("data.source=[{source: a, xyz: 1}]", "data.source.0.xyz: unknown .* known: source, "),
        ("data.source=[{weight: 1.0}]", "data.source.0.source: parameter is missing"),
        ("data.source=[{source: a, weight: 0.0}]", "data.source.0.weight: .*greater than 0; got 0"),
        ("data.source=[{source: 3}]", "data.source.0.source: must be a valid string; got 3"),
        ("data.source=[{source: a, format: chat}]", "data.source.0.format: must be 'auto', "),
        ("data.heldout_source=3", "data.heldout_source: must be a valid string; got 3"),
        ("data.heldout_source=[{source: a, weigth: 2}]", r".*did you mean data.heldout_source.0.weight\?"),
    ],
)
def test_a_value_of_the_wrong_type_or_an_unknown_key_is_refused(flags: str, message: str):
    assert re.match(message, refusal(flags))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("data.revision=main", r"data.revision: needs a Hub source \(hf://org/name\); got 'main' "),
        ("data.config=small", r"data.config: needs a Hub source \(hf://org/name\); got 'small' "),
        ("data.source=[{source: a, revision: v1}]", "data.source.0.revision: needs a Hub source"),
        ("data.heldout_source=a.jsonl", "data.heldout_fraction: must be 0 with data.heldout_source.*got 0.05"),
        (
            "data.heldout_source=a.jsonl; data.heldout_fraction=0; data.heldout_seed=3",
            "data.heldout_fraction: 0 leaves no rows for data.heldout_seed=3",
        ),
        (
            "data.heldout_source=[{source: a.jsonl, weight: 2.0}]; data.heldout_fraction=0",
            "data.heldout_source.0.weight: held-out rows are not trained; got 2.0",
        ),
        (
            "data.ignore_columns=[text]; data.columns={messages: text}",
            "data.ignore_columns: 'text' is also named in data.columns",
        ),
        ("bucket.max_tokens=100", "bucket.max_tokens: .*data.max_length=512 .*got 100; raise"),
        ("bucket.constant_shape=true", "bucket.constant_shape: .* bucket.mode=packed; got true .*bucketed; set"),
        ("evaluate.max_tokens=100", "evaluate.max_tokens: .*got 100; raise"),
        ("evaluate.merged=true", "evaluate.merged: needs the merged model; .*set train.merge to true"),
        (
            "run.oom_recovery=none",
            "run.oom_recovery: is no parameter any more: .* bucket.max_tokens; remove it, or run `lean-finetune init",
        ),
        ("train.master_weights=true", "train.master_weights: has an effect only with .* set it to false"),
        ("train.master_weights=true; train.method=full", "train.master_weights: .*; got true with full and fp32"),
        (
            "train.offload=optimizer; train.optimizer=paged_adamw_8bit",
            "train.optimizer: a paged optimizer .*; use adamw_8bit, or train.offload=none",
        ),
        (
            "train.offload_to=disk",
            "train.offload_to: has an effect only with train.offload=optimizer or parameters; got",
        ),
        (
            "train.offload=optimizer; train.offload_to=disk; train.optimizer=adafactor",
            "train.offload_to: disk .* but adafactor needs sums over a tensor .*; use cpu, or ",
        ),
        (
            "train.sequence_tiles=4; train.compress_activations=int8",
            "train.sequence_tiles: .*; got 4; leave it blank, or recompute all layers$",
        ),
        (
            "train.sequence_tiles=513; bucket.mode=bucketed",
            "train.sequence_tiles: must be at most the tokens of the longest sequence, 512; got 513; lower it",
        ),
        ("train.offload=parameters; train.method=int8_lora", "train.offload: parameters cannot .*; use none or optimi"),
        (f"{IN_BACKWARD}; hardware.num_gpus=2", "train.optimizer_in_backward: .*num_gpus=2; set .*=false, or"),
        (IN_BACKWARD, "train.optimizer_in_backward: .*=qlora; .* use train.method=full"),
        (f"{IN_BACKWARD}; train.method=full", "train.optimizer_in_backward: .*max_grad_norm=1.0; leave .* blank"),
        (
            f"{IN_BACKWARD}; train.method=full; train.max_grad_norm=null; train.precision=fp16",
            "train.optimizer_in_backward: .*train.precision=fp16; use bf16 or fp32",
        ),
        ("train.quant.type=fp4; train.method=lora", "train.quant.type: .* fp4 with .*=lora; set it to nf4, or"),
        ("train.quant.double=false; train.method=full", "train.quant.double: .*; set it to true, or use .*=qlora"),
        ("train.lora.dropout=0.1; train.method=full", "train.lora.dropout: .* got 0.1 .*; set it to 0.0, or"),
        ("train.lora.rslora=true; train.method=full", "train.lora.rslora: .* set it to false, or use"),
        ("train.lora.init=pissa", "train.lora.init: pissa changes the frozen weights.*train.method=qlora; use"),
        ("train.lora.init=loftq; train.method=lora", "train.lora.init: loftq .*=lora; use train.method=qlora"),
        ("train.lora.dora=true; train.method=int8_lora", "train.lora.dora: .*; got int8_lora, default; set it"),
        ("train.lora.init=pissa; train.lora.dora=true; train.method=lora", "train.lora.dora: .*got lora, pissa"),
        ("train.lora.targets=[all-linear, q_proj]", "train.lora.targets: all-linear must be the only entry"),
        ("train.grad_ckpt_policy=selective", "train.grad_ckpt_policy: has an effect only with train.grad_ckpt=true"),
        ("train.grad_ckpt_layers=3", "train.grad_ckpt_layers: has an effect only with train.grad_ckpt_policy=first_n"),
        ("train.grad_ckpt=true; train.grad_ckpt_policy=first_n", "train.grad_ckpt_layers: .*needs a number of layers"),
        (
            "train.grad_ckpt=true; train.grad_ckpt_policy=first_n; train.grad_ckpt_layers=3; train.pipeline_stages=2; "
            "hardware.num_gpus=2",
            "train.grad_ckpt_policy: first_n .*pipeline_stages=2; use full or every_n",
        ),
        (
            "train.grad_ckpt_policy=selective; train.grad_ckpt=true; train.method=int8_lora",
            "train.grad_ckpt_policy: selective .*=int8_lora; use full or every_n",
        ),
        ("train.merge=true; train.method=full", "train.merge: has an effect only with train.method=lora or qlora or "),
        ("hardware.num_gpus=2", "train.sharding: several GPUs need a way .*num_gpus=2; set it to ddp .* or zero3"),
        ("train.sharding=ddp", "train.sharding: has an effect only with hardware.num_gpus above 1; got ddp with 1"),
        (
            "hardware.num_gpus=4; train.sharding=zero3; train.shard_group_gpus=2",
            "train.shard_group_gpus: has an effect only with train.sharding=hsdp; got 2 with train.sharding=zero3; set",
        ),
        (
            "hardware.num_gpus=4; train.sharding=hsdp; train.shard_group_gpus=3",
            "train.shard_group_gpus: must be a divisor of hardware.num_gpus=4, above 1 and below it; got 3; change",
        ),
        (
            "hardware.num_gpus=4; train.sharding=hsdp; train.shard_group_gpus=4",
            "train.shard_group_gpus: .* got 4; change it, or use train.sharding=zero3",
        ),
        (
            "hardware.num_gpus=4; train.tensor_parallel=3",
            "train.tensor_parallel: must be a divisor of hardware.num_gpus=4; got 3; change one of them, or set",
        ),
        (
            "hardware.num_gpus=4; train.sharding=zero1; train.tensor_parallel=2",
            "train.tensor_parallel: works with train.sharding none, ddp, zero2 .*, not with zero1; got 2; use zero3",
        ),
        (
            "hardware.num_gpus=2; train.tensor_parallel=2; train.sharding=zero3",
            "train.tensor_parallel: of all GPUs leaves none to share weights by train.sharding=zero3; got 2; set",
        ),
        (
            "hardware.num_gpus=2; train.tensor_parallel=2; train.method=int8_lora",
            "train.tensor_parallel: cannot divide 8-bit weights.* got 2; use train.method=qlora or lora, or set",
        ),
        (
            "hardware.num_gpus=2; train.tensor_parallel=2; train.loss_chunk=null",
            "train.tensor_parallel: divides the logits too.* got 2; set train.loss_chunk=512, or set",
        ),
        (
            "hardware.num_gpus=4; train.sharding=ddp; train.context_parallel=3",
            "train.context_parallel: must be a divisor of hardware.num_gpus=4; got 3",
        ),
        (
            "hardware.num_gpus=2; train.sharding=ddp; train.context_parallel=2; train.method=full; "
            "train.router_aux_loss=0.1",
            "train.context_parallel: excludes train.router_aux_loss.* got 2 with 0.1; set train.router_aux_loss=0",
        ),
        (
            "hardware.num_gpus=2; train.sharding=ddp; train.context_parallel=2; bucket.mode=packed; "
            "bucket.constant_shape=true; bucket.max_tokens=4097",
            "bucket.max_tokens: must be a multiple of train.context_parallel=2 .* got 4097; change it",
        ),
        (
            "hardware.num_gpus=4; train.pipeline_stages=2; train.sharding=zero3",
            "train.pipeline_stages: works with one GPU for each stage.* got 2 with hardware.num_gpus=4",
        ),
        (
            "hardware.num_gpus=3; train.pipeline_stages=2",
            "train.pipeline_stages: works with one GPU for each stage.* got 2 with hardware.num_gpus=3",
        ),
        (
            "hardware.num_gpus=2; train.pipeline_stages=2; train.sharding=zero3",
            "train.sharding: the stages of a pipeline share no weights; got zero3 with train.pipeline_stages=2",
        ),
        (
            "hardware.num_gpus=2; train.pipeline_stages=2; train.method=int8_lora",
            "train.pipeline_stages: cannot send 8-bit weights.* got 2 with train.method=int8_lora",
        ),
        (
            "hardware.num_gpus=2; train.pipeline_stages=2; train.method=lora; train.lora.init=pissa",
            "train.pipeline_stages: works with adapters that start without.* got 2 with train.lora.init=pissa",
        ),
        ("hardware.num_gpus=2; train.sharding=hsdp", "train.sharding: hsdp needs at least two .*num_gpus=2; use zero3"),
        ("hardware.num_gpus=3; train.sharding=hsdp", "train.sharding: hsdp needs at least two .*num_gpus=3; use zero3"),
        (
            "hardware.num_gpus=2; train.sharding=zero2; train.method=int8_lora",
            "train.sharding: cannot split 8-bit weights.* got zero2 with train.method=int8_lora; use ddp",
        ),
        (
            "train.offload=parameters; hardware.num_gpus=2; train.sharding=zero2",
            "train.offload: .*got parameters with train.sharding=zero2; set train.sharding=zero3",
        ),
    ],
)
def test_parameters_that_exclude_each_other_are_refused(flags: str, message: str):
    """A parameter that has no effect beside another must never be ignored."""
    assert re.match(message, refusal(flags))


@pytest.mark.parametrize("sharding", ["ddp", "zero1", "zero2", "zero3", "hsdp"])
def test_every_sharding_mode_is_accepted_for_several_gpus(sharding: str):
    assert with_flags(PARAMS, ["hardware.num_gpus=4", f"train.sharding={sharding}"]).train.sharding == sharding


def test_hsdp_takes_groups_that_divide_the_gpus():
    flags = ["hardware.num_gpus=4", "train.sharding=hsdp", "train.shard_group_gpus=2"]
    assert with_flags(PARAMS, flags).train.shard_group_gpus == 2


def test_a_revision_of_the_section_needs_one_hub_source():
    """Hub sources of a list inherit data.revision; local ones do not need it."""
    with_flags(PARAMS, ["data.revision=v1", "data.source=[{source: a.jsonl}, {source: hf://org/name}]"])
    assert refusal("data.revision=v1; data.source=[{source: a.jsonl}]").startswith("data.revision: needs a Hub source")


def test_without_held_out_rows_every_parameter_that_needs_them_is_named_in_one_message():
    """Otherwise each run would name only the next one."""
    message = refusal("data.heldout_fraction=0")
    assert message.startswith("data.heldout_fraction: 0 and no data.heldout_source leaves no rows for")
    overrides = message.partition("; also set -S ")[2].split(" -S ")
    assert with_flags(PARAMS, ["data.heldout_fraction=0", *overrides]).train.heldout_every_steps is None


def test_a_missing_key_is_refused_and_a_misspelt_one_is_named_first():
    """There are no defaults in code, and `grad_chpt` in place of `grad_ckpt` is a typo, not a missing key."""
    values = PARAMS.model_dump()
    del values["train"]["grad_ckpt"]
    with pytest.raises(UserError, match="train.grad_ckpt: parameter is missing"):
        parse_params(values)
    values["train"]["grad_chpt"] = True
    with pytest.raises(UserError, match=r"did you mean train.grad_ckpt\?"):
        parse_params(values)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"seed: [1\n", r"params\.yaml:\d+: not YAML"),
        (b"seed: \xff\xfe\n", r"params\.yaml: must be a YAML file that can be read"),
        (b"seed: " + b"9" * 5000 + b"\n", r"params\.yaml:1: not YAML; Exceeds the limit"),
        (b"- 1\n", "must be a mapping of sections; got list"),
        (b"", "must be a mapping of sections; got NoneType"),
        (None, "file is missing; run in a project's directory, or make one with `lean-finetune init`"),
    ],
)
def test_an_unreadable_file_is_refused(tmp_path: Path, content: bytes | None, message: str):
    if content is not None:
        (tmp_path / "params.yaml").write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_params(tmp_path / "params.yaml")


def test_a_directory_in_place_of_the_file_is_refused(tmp_path: Path):
    """A traceback."""
    with pytest.raises(UserError, match="must be a YAML file that can be read .*directory"):
        load_params(tmp_path)


def test_under_dvc_only_declared_keys_can_be_read():
    """After an undeclared read, DVC would reuse a stale result."""
    reads: set[str] = set()
    view: Any = Declared(PARAMS, {"train": {"lr": 1, "lora": {"rank": 1}}}, "train", "", reads)
    assert view.train.lr == PARAMS.train.lr and view.train.lora.rank == PARAMS.train.lora.rank
    assert reads == {"train.lr", "train.lora.rank"} and view.run.progress == PARAMS.run.progress
    for read in (lambda: view.seed, lambda: view.train.method, lambda: view.train.lora.alpha):
        with pytest.raises(UserError, match="dvc.yaml does not list it under params"):
            read()


def test_a_value_derived_from_keys_reads_them():
    """A property or a method of a section that reads past the guard."""
    reads: set[str] = set()
    sizes = dict.fromkeys(("context_parallel", "tensor_parallel", "pipeline_stages"), 1)
    view: Any = Declared(PARAMS, {"train": sizes, "hardware": {"num_gpus": 1}}, "bucket", "", reads)
    assert view.layout == view.train.layout(1) == PARAMS.layout
    assert reads == {*(f"train.{name}" for name in sizes), "hardware.num_gpus"}
    with pytest.raises(UserError, match=r"train\.method: stage bucket reads it but dvc.yaml does not list it"):
        assert view.train.adapted
    with pytest.raises(AttributeError):
        assert view.train.model_copy


def test_a_section_that_a_stage_passes_on_has_its_declared_keys_alone():
    """As above, for code that gets the section and not all parameters."""
    reads: set[str] = set()
    view: Any = Declared(PARAMS, {"train": {"method": 1, "lora": {"rank": 1}}}, "train", "", reads)
    train = declared_part(view.train).model_copy(update={"lr": 0.5})
    assert reads == {"train.method", "train.lora.rank"} and hash(train) == hash(train.model_copy())
    assert (train.method, train.lora.rank, train.lr) == (PARAMS.train.method, PARAMS.train.lora.rank, 0.5)
    for read in (lambda: train.epochs, lambda: train.lora.alpha):
        with pytest.raises(UserError, match=r"(train\.epochs|lora\.alpha): the stage reads it but dvc.yaml does not"):
            read()
    assert declared_part(PARAMS.train) is PARAMS.train


def test_setting_every_key_deletes_no_comment(tmp_path: Path):
    """`dvc exp run -S` replaces a list together with the comment that follows it."""
    path = tmp_path / "params.yaml"
    path.write_text((ROOT / "params.yaml").read_text())
    comments = re.findall("#.*", path.read_text())
    lists = {"data.source": "[{source: a.jsonl},{source: b.jsonl}]", "train.lora.targets": "[q_proj,v_proj]"}
    for word in ("one", "other"):
        apply_overrides(path, [f"{key}={lists.get(key, word)}" for key in leaves(YAML(typ="safe").load(path))])
        assert re.findall("#.*", path.read_text()) == comments


@pytest.mark.parametrize(
    "path",
    [
        "my rows.jsonl",
        "rows#1.jsonl",
        "my rows #1.jsonl",
        "a, b.jsonl",
        "a=b.jsonl",
        "a&b",
        "~/a",
        "a(1)[2]",
        "größe.jsonl",
    ],
)
def test_quotes_inside_the_shells_carry_any_path(path: str, tmp_path: Path):
    """docs/data.md: `-S "data.source='my rows #1.jsonl'"`, and the same for `fit --set`."""
    file = tmp_path / "params.yaml"
    file.write_text((ROOT / "params.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    apply_overrides(file, [f"data.source='{path}'"])
    assert load_params(file).data.source == path
    assert with_flags(PARAMS, [f"data.source='{path}'"]).data.source == path
    if path != "my rows.jsonl":  # DVC takes a space without quotes.
        with pytest.raises(InvalidArgumentError):
            apply_overrides(file, [f"data.source={path}"])
    apply_overrides(file, [f"data.source=[{{source: '{path}', weight: 2}}, {{source: b.jsonl}}]"])
    assert [source.source for _, source in load_params(file).data.named_sources()] == [path, "b.jsonl"]


def leaves(section: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """The dotted keys of all values."""
    for key, value in section.items():
        yield from leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}"]
