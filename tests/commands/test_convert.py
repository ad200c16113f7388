"""Configurations of other tools: the same run here, with a word on each key; and our names for theirs in errors."""

import json
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from lean_finetune.commands.convert.read_config import read_config_of_tool
from lean_finetune.commands.fit import COMMON_PARAMS, fit
from lean_finetune.commands.import_config import import_config
from lean_finetune.config.load import load_params
from lean_finetune.config.other_tools import shared, tables
from lean_finetune.config.overrides import with_flags
from lean_finetune.core.errors import UserError
from tests.commands.tool_configs import AXOLOTL, LLAMA_FACTORY, TORCHTUNE, TRL
from tests.conftest import ROOT
from tests.workspace import error, invoke

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "LLaMA-Factory": (
        LLAMA_FACTORY,
        {
            "model.name": "org/model",
            "data.source": "hf://org/rows",
            "data.max_length": 1000,
            "bucket.max_tokens": 2000,
            "train.tokens_per_step": 16000,
            "train.method": "qlora",
            "train.precision": "bf16",
            "train.grad_ckpt": True,
            "train.lora.rank": 16,
            "train.lora.alpha": 32,
            "train.lora.targets": ["q_proj", "v_proj"],
            "train.lr": 1e-4,
            "train.epochs": 3,
            "train.warmup_fraction": 0.1,
        },
    ),
    "Axolotl": (
        AXOLOTL,
        {
            "train.method": "int8_lora",
            "train.precision": "auto",
            "train.optimizer": "adamw_8bit",
            "train.lora.targets": ["all-linear"],
            "bucket.mode": "packed",
            "bucket.max_tokens": 8192,
            "train.tokens_per_step": 32768,
            "data.heldout_fraction": 0.0,
            "evaluate.generate_rows": 0,
            "train.lr": 2e-4,
        },
    ),
    "TRL": (
        TRL,
        {
            "train.method": "full",
            "train.precision": "bf16",
            "train.master_weights": False,
            "train.attention": "flash_attention_2",
            "train.optimizer": "paged_adamw_32bit",
            "train.grad_ckpt": False,
            "train.max_grad_norm": 0.2,
            "bucket.max_tokens": 8192,
        },
    ),
    "torchtune": (
        TORCHTUNE,
        {
            "model.name": "/models/llama",
            "train.method": "full",
            "train.precision": "bf16",
            "train.optimizer": "paged_adamw_8bit",
            "train.optimizer_in_backward": True,
            "train.max_grad_norm": None,
            "train.offload_activations": "cpu",
            "train.grad_ckpt": True,
            "bucket.mode": "packed",
            "bucket.max_tokens": 1024,
            "train.tokens_per_step": 1024,
        },
    ),
}


@pytest.mark.parametrize("tool", CASES)
def test_a_configuration_becomes_the_same_run_and_every_key_is_accounted_for(tool: str, tmp_path: Path):
    """A memory switch that is lost, or a key that is dropped without a word."""
    text, expected = CASES[tool]
    (tmp_path / "run.yaml").write_text(text)
    converted = read_config_of_tool(tmp_path / "run.yaml", gpus=1)
    assert converted.tool == tool
    params = with_flags(load_params(COMMON_PARAMS), converted.flags()).model_dump()
    for dotted, value in expected.items():
        found = params
        for part in dotted.split("."):
            found = found[part]
        assert found == value, dotted
    shown = " ".join(converted.lines())
    keys = [line.split(":")[0].strip(" -") for line in text.splitlines() if line and not line.endswith(":")]
    assert [key for key in keys if key not in shown and key not in ("path", "type")] == []


MIXTURE = "dataset_mixture:\n  datasets:\n  - id: org/rows\n    config: en\n  test_split_size: 0.1"
QUANTIZED = TORCHTUNE.replace("llama3_1_8b", "lora_llama3_1_8b\n  quantize_base: true")


@pytest.mark.parametrize(
    ("text", "ours", "value"),
    [
        (AXOLOTL + "lora_target_parameters: [mlp.experts.down_proj]\n", "train.lora.experts", "all"),
        (AXOLOTL.replace("checkpointing: true", "checkpointing: offload"), "train.grad_ckpt", True),
        (AXOLOTL.replace("packing: true", "packing: yes"), "bucket.mode", "packed"),
        (AXOLOTL.replace("packing: true", "packing: off"), "bucket.mode", "bucketed"),
        (
            AXOLOTL.replace("type: alpaca", "name: en\n    split: test"),
            "data.source",
            [{"source": "hf://org/rows", "config": "en", "split": "test"}],
        ),
        (TRL.replace("dataset_name: org/rows", MIXTURE), "data.source", [{"source": "hf://org/rows", "config": "en"}]),
        (TRL.replace("dataset_name: org/rows", MIXTURE), "data.heldout_fraction", 0.1),
        (TORCHTUNE + "fsdp: {cpu_offload: true}\n", "train.offload", "optimizer"),
        (QUANTIZED, "train.method", "qlora"),
    ],
)
def test_keys_of_published_examples_become_parameters(text: str, ours: str, value: Any, tmp_path: Path):
    """A key that the projects' own examples have, reported as one without effect."""
    (tmp_path / "run.yaml").write_text(text)
    converted = read_config_of_tool(tmp_path / "run.yaml", gpus=1)
    assert converted.values[ours] == value and converted.unknown == []


def test_what_is_otherwise_here_is_said(tmp_path: Path):
    """A linear schedule, steps of warm-up or an unknown key that silently become something else."""
    (tmp_path / "a.yaml").write_text(AXOLOTL)
    converted = read_config_of_tool(tmp_path / "a.yaml", gpus=1)
    assert any(text.startswith("lr_scheduler=linear is not known here") for text in converted.differs)
    assert any(text.startswith("warmup_steps of 10: here train.warmup_fraction") for text in converted.differs)
    assert any(text.startswith("deepspeed_configs/zero1.json shares a run") for text in converted.differs)
    assert read_config_of_tool(tmp_path / "a.yaml", gpus=4).values["train.sharding"] == "zero1"
    (tmp_path / "l.yaml").write_text(LLAMA_FACTORY)
    assert read_config_of_tool(tmp_path / "l.yaml", gpus=1).unknown == ["some_new_key"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (LLAMA_FACTORY.replace("stage: sft", "stage: dpo"), "stage: only sft and pt are done here; got dpo"),
        (LLAMA_FACTORY.replace("finetuning_type: lora", "finetuning_type: oft"), "finetuning_type: only lora and full"),
        ("model: org/model\nmodel_class: llm\nmicro_batch_size: 1\n", "model_class: configurations of its new version"),
        ("model_name_or_path: a/b\ntemplate: qwen3\nexport_dir: out\n", "export_dir: nothing is trained"),
        (AXOLOTL + "num_labels: 2\n", "num_labels: classification is not done here"),
        (AXOLOTL + "lora_modules_to_save: [lm_head]\n", "lora_modules_to_save: training whole modules"),
        (AXOLOTL.replace("adapter: lora", ""), "weights in 8 bits cannot be trained themselves"),
        ("a: 1\n", "must be a configuration of Axolotl, LLaMA-Factory, torchtune, TRL; got keys a"),
        ("- 1\n", "must be a mapping of keys"),
        ("", "must be a mapping of keys; got an empty file"),
        ("a: [\n", "run.yaml:2: not YAML; "),
        ("a: 1\na: 2\n", "run.yaml:2: not YAML; found duplicate key"),
        (LLAMA_FACTORY + "weight_decay: two\n", "weight_decay: must be a number; got 'two'; correct it"),
        (LLAMA_FACTORY + "max_steps: [1]\n", "max_steps: must be a number; got [1]; correct it"),
        (TRL + "lora_alpha: 1.5\n", "lora_alpha: must be a whole number; got 1.5; correct it"),
        (LLAMA_FACTORY + "fp16: yes\n", "fp16: must be one precision; got bf16 and fp16; remove one"),
        (AXOLOTL + "lora_target_modules: 7\n", "lora_target_modules: must be names of layers; got 7; correct it"),
    ],
)
def test_another_kind_of_run_is_refused_in_one_line(text: str, expected: str, tmp_path: Path):
    """An answer for supervised fine-tuning to a question about another algorithm, or a traceback."""
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(UserError) as caught:
        read_config_of_tool(tmp_path / "run.yaml", gpus=1)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path}/run.yaml:") and expected in message and "\n" not in message


def test_fit_answers_for_a_configuration_and_names_its_keys_last(small_llama: Path, tmp_path: Path):
    """A verdict below a page of keys, or options that a configuration overrides."""
    (tmp_path / "run.yaml").write_text(LLAMA_FACTORY)
    options = [
        "--from",
        str(tmp_path / "run.yaml"),
        "--model",
        str(small_llama),
        "--gpu",
        "RTX-4090",
        "--length",
        "128",
    ]
    lines = invoke(fit, *options).stdout.replace(str(small_llama), "DIR").replace(str(tmp_path), "DIR").splitlines()
    assert lines[0].startswith("verdict              fits: ")
    assert max(len(line) for line in lines) <= 100
    start = lines.index("from a configuration of LLaMA-Factory")
    assert any(line.startswith("  used               quantization_bit → train.method") for line in lines[start:])
    content = json.loads(invoke(fit, *options, "--json").stdout)
    assert content["params"]["data"]["max_length"] == 128 and content["params"]["train"]["method"] == "qlora"
    assert content["from"]["unknown"] == ["some_new_key"]


def test_import_writes_a_params_yaml_and_keeps_its_comments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Toy values left in the run, comments lost, or a file that `dvc exp run -S` cannot rewrite."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(LLAMA_FACTORY)
    result = invoke(import_config, "run.yaml", "--out", "new.yaml")
    assert result.exit_code == 0 and load_params(tmp_path / "new.yaml").train.lr == 1e-4
    shipped = (ROOT / "params.yaml").read_text(encoding="utf-8")
    (tmp_path / "params.yaml").write_text(shipped)
    invoke(import_config, "run.yaml")
    written = (tmp_path / "params.yaml").read_text(encoding="utf-8")
    params = load_params(tmp_path / "params.yaml")
    assert (params.model.name, params.train.lr, params.train.precision) == ("org/model", 1e-4, "bf16")
    assert params.run == load_params(ROOT / "params.yaml").run
    comments = [line for line in shipped.splitlines() if line.strip().startswith("#")]
    assert [line for line in comments if line not in written.splitlines()] == []
    assert error(invoke(import_config, "absent.yaml")).startswith("absent.yaml: file does not exist")
    assert (tmp_path / "params.yaml").read_text(encoding="utf-8") == written


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("learning_rate=1e-4", "learning_rate: unknown parameter; its name here is train.lr"),
        ("save_steps=5", "save_steps: unknown parameter; it has no counterpart here: outputs are in data/"),
        ("train.cutoff_len=1", "train.cutoff_len: unknown parameter; its name here is data.max_length"),
        ("train.lora_r=8", "train.lora_r: unknown parameter; its name here is train.lora.rank"),
        ("per_device_train_batch_size=8", "unknown parameter; its name here is bucket.max_tokens (tokens of a micro"),
        ("gradient_accumulation_steps=8", "its name here is train.tokens_per_step (tokens of an optimizer step"),
        ("load_in_4bit=true", "its name here is train.method (qlora, int8_lora)"),
    ],
)
def test_names_of_other_tools_are_answered_with_ours(flag: str, expected: str):
    """A list of all parameters where one name would do."""
    with pytest.raises(UserError) as caught:
        with_flags(load_params(COMMON_PARAMS), [flag])
    assert expected in str(caught.value)


def test_the_tables_name_parameters_that_exist():
    """A parameter that was renamed: the command would refuse what it wrote itself."""
    known = YAML(typ="safe").load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    rules = [rule for table in tables() for rule in table["keys"].values()]
    named = {rule if isinstance(rule, str) else rule.get("to") for rule in rules} - {None}
    for dotted in named:
        value = known
        for part in dotted.split("."):
            assert part in value, dotted
            value = value[part]
    facts = {rule["fact"] for rule in rules if isinstance(rule, dict) and "fact" in rule}
    assert facts <= set(shared()["facts"]) | {"padded", "stage", "dataset_dir"}
    for table in tables():
        listed = [key for keys in table["ignored"].values() for key in keys]
        assert len(listed) == len(set(listed)) and not set(listed) & set(table["keys"]), table["tool"]
