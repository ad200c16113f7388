"""Configurations of other tools: the same run here, with a word on each key; and our names for theirs in errors."""

import json
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from lean_finetune.commands.convert.read_config import read_config_of_tool
from lean_finetune.config.load import COMMON_PARAMS, load_params, with_flags
from lean_finetune.config.other_tools import shared, tables
from lean_finetune.core.errors import UserError
from tests.commands.tool_configs import (
    AXOLOTL,
    LLAMA_FACTORY,
    LLAMA_FACTORY_V1,
    SWIFT_SHELL,
    SWIFT_YAML,
    TORCHTUNE,
    TRL,
    UNSLOTH,
)
from tests.conftest import ROOT

LITGPT = """\
checkpoint_dir: org/model
precision: bf16-true
quantize: bnb.nf4-dq
lora_r: 32
lora_alpha: 16
lora_dropout: 0.1
lora_query: true
lora_key: false
lora_value: true
lora_projection: false
lora_mlp: true
lora_head: false
train:
  global_batch_size: 8
  micro_batch_size: 2
  max_seq_length: 512
  epochs: 4
  lr_warmup_steps: 10
optimizer:
  class_path: torch.optim.AdamW
seed: 1337
"""
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
    "LLaMA-Factory v1": (
        LLAMA_FACTORY_V1,
        {
            "model.name": "org/model",
            "train.method": "qlora",
            "train.precision": "bf16",
            "train.lora.rank": 16,
            "train.lora.targets": ["all-linear"],
            "data.max_length": 2000,
            "bucket.max_tokens": 4000,
            "bucket.mode": "packed",
            "train.tokens_per_step": 16000,
            "train.lr": 1e-4,
            "train.grad_ckpt": True,
        },
    ),
    "ms-swift": (
        SWIFT_YAML,
        {
            "model.name": "org/model",
            "train.method": "lora",
            "train.precision": "bf16",
            "train.lora.rank": 8,
            "train.lora.alpha": 32,
            "train.lora.dropout": 0.05,
            "data.max_length": 2048,
            "bucket.max_tokens": 4096,
            "train.tokens_per_step": 32768,
            "train.attention": "flash_attention_2",
            "train.weight_decay": 0.1,
            "train.lr": 1e-4,
        },
    ),
    "Unsloth": (
        UNSLOTH,
        {
            "model.name": "org/model",
            "train.method": "qlora",
            "train.optimizer": "adamw_8bit",
            "train.lora.rank": 32,
            "train.lora.targets": ["q_proj", "v_proj"],
            "data.max_length": 1024,
            "bucket.max_tokens": 1024,
            "train.tokens_per_step": 4096,
            "train.grad_ckpt": True,
            "train.lr": 2e-4,
        },
    ),
    "LitGPT": (
        LITGPT,
        {
            "model.name": "org/model",
            "train.method": "qlora",
            "train.precision": "pure_bf16",
            "train.quant.double": True,
            "train.lora.rank": 32,
            "train.lora.targets": ["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"],
            "data.max_length": 512,
            "bucket.max_tokens": 1024,
            "train.tokens_per_step": 4096,
            "train.epochs": 4,
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


def test_a_shell_script_of_ms_swift_is_read(tmp_path: Path):
    """`swift sft --model …` is how most of its runs are written down; its flags are the keys of its YAML."""
    script = tmp_path / "run.sh"
    script.write_text(f"\ufeff{SWIFT_SHELL.strip()}")  # Some editors write a byte order mark.
    found = read_config_of_tool(script, gpus=4).values
    assert (found["train.method"], found["train.precision"], found["train.lr"]) == ("full", "bf16", 1e-5)
    assert (found["model.name"], found["data.max_length"], found["train.sharding"]) == ("org/model", 8192, "zero3")
    assert (found["bucket.max_tokens"], found["train.tokens_per_step"], found["bucket.mode"]) == (8192, 65536, "packed")
    for text, expected in (
        (
            SWIFT_SHELL.replace("swift sft", "swift infer"),
            "must have one command `swift sft` or `swift pt` or `swift rlhf`; got 0",
        ),
        (SWIFT_SHELL + SWIFT_SHELL, "must have one command `swift sft` or `swift pt` or `swift rlhf`; got 2"),
        (
            SWIFT_SHELL.replace("org/model", "$MODEL"),
            ":5: model: must be a value; $MODEL is not set in the script; write it there",
        ),
        (SWIFT_SHELL.replace("zero3", "'zero3"), "the quotation that begins here has no end; close it"),
        ("swift sft run.yaml\n", "its command reads run.yaml; name that file"),
        (SWIFT_SHELL.replace("NPROC_PER_NODE=4", "MAX_PIXELS=1003520"), "ENV.MAX_PIXELS: images are not counted here"),
    ):
        script.write_text(text)
        with pytest.raises(UserError, match=".*") as caught:
            read_config_of_tool(script, gpus=1)
        assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("split", "entry", "note"),
    [
        ("train[:20%]", {"split": "train", "weight": 0.2}, "0.2 of the rows in each epoch, other ones in the next"),
        ("train[80%:]", {"split": "train", "weight": 0.2}, "0.2 of the rows in each epoch"),
        ("train[-10%:]", {"split": "train", "weight": 0.1}, "0.1 of the rows in each epoch"),
        ("train[:1000]", {"split": "train", "rows": 1000}, None),
        ("train[100:300]", {"split": "train", "rows": 200}, "the first 200 rows"),
        ("train[-50:]", {"split": "train", "rows": 50}, "the first 50 rows, not the last"),
        ("train[10:50%]", {"split": "train"}, "a mixture of rows and shares is not known here"),
        ("train[:200%]", {"split": "train"}, "is no share of the rows"),
        ("train[5:]", {"split": "train"}, "all rows are read"),
        ("train[:]", {"split": "train"}, None),
        ("test", {"split": "test"}, None),
    ],
)
def test_a_part_of_a_split_becomes_rows_or_a_share(split: str, entry: dict[str, Any], note: str | None, tmp_path: Path):
    """`train[:1000]` that was passed on as the name of a split, which no data set has."""
    for text in (
        AXOLOTL.replace("type: alpaca", f"split: {split}"),
        TRL.replace("dataset_name: org/rows", f"dataset_name: org/rows\ndataset_train_split: {split}"),
    ):
        (tmp_path / "run.yaml").write_text(text)
        converted = read_config_of_tool(tmp_path / "run.yaml", gpus=1)
        params = with_flags(load_params(COMMON_PARAMS), converted.flags())
        found = [
            source.model_dump(exclude_none=True, exclude_defaults=True) for _, source in params.data.named_sources()
        ]
        assert {"split": params.data.split, **found[0]} == {"source": "hf://org/rows", **entry}
        assert (
            any(note in text for text in converted.differs)
            if note
            else not any("split=" in t for t in converted.differs)
        )
    (tmp_path / "run.yaml").write_text(AXOLOTL.replace("type: alpaca", "split: train[:10%]+test"))
    sources = read_config_of_tool(tmp_path / "run.yaml", gpus=1).values["data.source"]
    assert [(each["split"], each.get("weight")) for each in sources] == [("train", 0.1), ("test", None)]


def test_keys_of_data_sets_are_listed_like_every_key(tmp_path: Path):
    """`datasets: [{path, type, shards}]` whose keys vanished without a word, also where a prediction needs no data."""
    (tmp_path / "run.yaml").write_text(
        AXOLOTL.replace("type: alpaca", "type: alpaca\n    split: train\n    shards: 2\n    of_tomorrow: 1")
    )
    converted = read_config_of_tool(tmp_path / "run.yaml", gpus=1)
    assert converted.used["datasets.path"] == "data.source" and converted.used["datasets.split"] == "data.source.split"
    assert converted.used["datasets.type"] == "data.source.format" and converted.unknown == ["datasets.of_tomorrow"]
    assert "datasets.shards=2: all rows are read" in converted.differs
    without = read_config_of_tool(tmp_path / "run.yaml", gpus=1, with_data=False)
    assert {"datasets", "datasets.path", "datasets.split"} <= set(without.ignored["a prediction needs no data"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (AXOLOTL + "early_stopping_patience: 3\n", "early_stopping_patience=3: training does not stop early here"),
        (AXOLOTL + "torch_compile: true\n", "torch_compile=True: layers are not compiled here"),
        (SWIFT_YAML + "early_stop_interval: 3\n", "early_stop_interval=3: training does not stop early here"),
        (AXOLOTL.replace("org/model", "org/Model-VL-2B"), "org/Model-VL-2B has more than text, by its name: images"),
        (AXOLOTL.replace("org/model", "org/GLM-4.6V-9B"), "org/GLM-4.6V-9B has more than text, by its name: images"),
        (
            LLAMA_FACTORY.replace("qwen3", "qwen2_vl"),
            "rows have images (qwen2_vl): one of 768 x 768 in each",
        ),
        (SWIFT_YAML.replace("org/rows", "org/llava-rows"), "org/llava-rows#500 has more than text, by its name"),
    ],
)
def test_what_is_not_done_here_is_said(text: str, expected: str, tmp_path: Path):
    """A run that would be another one here, or rows with images counted as text, without a word."""
    (tmp_path / "run.yaml").write_text(text)
    assert any(expected in line for line in read_config_of_tool(tmp_path / "run.yaml", gpus=1, with_data=False).differs)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (UNSLOTH, "auto"),
        (AXOLOTL.replace("bf16: auto", "bf16: false"), "fp16"),  # 8-bit weights: fp16 there.
        (AXOLOTL.replace("bf16: auto", "bf16: false").replace("load_in_8bit: true", ""), "fp32"),
        (AXOLOTL.replace("bf16: auto", "fp16: true\nbf16: false"), "fp16"),
        (AXOLOTL.replace("bf16: auto", ""), "auto"),
        (TRL.replace("torch_dtype: bfloat16", "bf16: false"), "fp32"),
        (TRL.replace("torch_dtype: bfloat16", "fp16: true"), "fp16"),
        (SWIFT_YAML.replace("torch_dtype: bfloat16", ""), "auto"),
        (LLAMA_FACTORY_V1 + "bf16: false\n", "fp32"),
    ],
)
def test_the_precision_is_the_tools_own(text: str, expected: str, tmp_path: Path):
    """`bf16: false` that stayed at bf16, or fp16 that met the tool's default of bf16."""
    (tmp_path / "run.yaml").write_text(text)
    values = read_config_of_tool(tmp_path / "run.yaml", gpus=1).values
    flags = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    assert with_flags(load_params(COMMON_PARAMS), flags).train.precision == expected


def test_what_is_otherwise_here_is_said(tmp_path: Path):
    """A schedule, steps of warm-up or an unknown key that silently become something else."""
    (tmp_path / "a.yaml").write_text(AXOLOTL.replace("lr_scheduler: linear", "lr_scheduler: polynomial"))
    converted = read_config_of_tool(tmp_path / "a.yaml", gpus=1)
    assert any(text.startswith("lr_scheduler=polynomial is not known here") for text in converted.differs)
    assert any(text.startswith("warmup_steps of 10: here train.warmup_fraction") for text in converted.differs)
    assert any(text.startswith("deepspeed_configs/zero1.json shares a run") for text in converted.differs)
    assert read_config_of_tool(tmp_path / "a.yaml", gpus=4).values["train.sharding"] == "zero1"
    (tmp_path / "l.yaml").write_text(LLAMA_FACTORY)
    assert read_config_of_tool(tmp_path / "l.yaml", gpus=1).unknown == ["some_new_key"]


@pytest.mark.parametrize("name", ["cosine", "linear", "constant", "constant_with_warmup"])
@pytest.mark.parametrize("text", [AXOLOTL, LLAMA_FACTORY])
def test_schedules_of_transformers_are_kept(text: str, name: str, tmp_path: Path):
    """A linear schedule, the default of transformers, that became a cosine."""
    key = "lr_scheduler" if text == AXOLOTL else "lr_scheduler_type"
    lines = [line for line in text.splitlines() if not line.startswith("lr_scheduler")]
    (tmp_path / "run.yaml").write_text("\n".join([*lines, f"{key}: {name}\n"]))
    converted = read_config_of_tool(tmp_path / "run.yaml", gpus=1)
    assert converted.values["train.schedule"] == name.removesuffix("_with_warmup")
    assert not any("lr_scheduler" in text for text in converted.differs)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (LLAMA_FACTORY.replace("finetuning_type: lora", "finetuning_type: oft"), "finetuning_type: only lora and full"),
        (LLAMA_FACTORY_V1.replace("class: llm", "class: other"), "model_class: only language models are trained here"),
        (
            LLAMA_FACTORY_V1 + "optim_config: {name: muon}\n",
            "optim_config.name: its optimizer is not done here; got muon",
        ),
        (
            "model: org/model\npeft_config: {name: lora, export_dir: out}\n",
            "peft_config.export_dir: nothing is trained",
        ),
        (AXOLOTL + "processor_type: VoxtralProcessor\n", "processor_type: audio is not trained here"),
        (LLAMA_FACTORY + "image_max_pixels: few\n", "image_max_pixels: must be a number"),
        (LLAMA_FACTORY + "image_max_pixels: 9\nfreeze_language_model: true\n", "freeze_language_model: the language"),
        (LLAMA_FACTORY.replace("sft", "dpo") + "image_max_pixels: 9\n", "rows with images are trained with objective"),
        (AXOLOTL + "processor_type: AutoProcessor\nimage_size: [1, 2, 3]\n", "image_size: must be pixels, or width"),
        (SWIFT_YAML + "freeze_vit: true\n", "freeze_vit: images are not counted here"),
        (SWIFT_YAML.replace("tuner_type: lora", "tuner_type: boft"), "tuner_type: only lora and full are done here"),
        (UNSLOTH + "  vision_all_linear: true\n", "lora.vision_all_linear: images are not counted here"),
        (SWIFT_YAML + "task_type: seq_cls\n", "task_type: only causal language models are trained here"),
        (TRL + "num_generations: 8\n", "num_generations: only supervised fine-tuning is done here"),
        (TRL + "bf16: true\nfp16: true\n", "fp16: must be one precision; got bf16 and fp16; remove one"),
        ("model_name_or_path: a/b\nper_device_train_batch_size: 1\n", "must be a training configuration of Axolotl"),
        ("model: org/model\nlearning_rate: 1e-4\nlora_rank: 8\n", "must be a training configuration of Axolotl"),
        ("base_model: org/model\ngpu: 1\n", "must be a training configuration of Axolotl"),
        ("model_name_or_path: a/b\ntemplate: qwen3\nexport_dir: out\n", "export_dir: nothing is trained"),
        (AXOLOTL + "num_labels: 2\n", "num_labels: classification is not done here"),
        (AXOLOTL.replace("adapter: lora", "adapter: qlora"), "adapter: qlora needs load_in_4bit: true, in Axolotl too"),
        (AXOLOTL.replace("adapter: lora", ""), "weights in 8 bits cannot be trained themselves"),
        (
            "a: 1\n",
            "must be a training configuration of Axolotl, LitGPT, LLaMA-Factory, LLaMA-Factory v1, ms-swift, "
            "torchtune, TRL, Unsloth; got",
        ),
        ("- 1\n", "must be a mapping of keys"),
        ("", "must be a mapping of keys; got an empty file"),
        ("a: [\n", "run.yaml:2: not YAML; "),
        ("a: 1\na: 2\n", "run.yaml:2: not YAML; found duplicate key"),
        (LLAMA_FACTORY + "weight_decay: true\n", "weight_decay: must be a number; got True; correct it"),
        (AXOLOTL.replace("packing: true", "packing: maybe"), "sample_packing: must be true or false; got 'maybe'"),
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


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("learning_rate=1e-4", "learning_rate: unknown parameter; its name here is train.lr"),
        ("save_steps=5", "save_steps: unknown parameter; it has no counterpart here: outputs are in data/"),
        (
            "train.compile=true",
            "train.compile: unknown parameter; it has no counterpart here: layers are not compiled here",
        ),
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
    assert facts <= set(shared()["facts"]) | {"padded", "dataset_dir", "template", "processor", "freeze_language"}
    # A comma in a text without quotation marks makes keys of its parts.
    known_keys = {"to", "fact", "values", "refuse", "differs", "also", "adapts", "source", "one_of_list"}
    assert [rule for rule in rules if isinstance(rule, dict) and not {*rule} <= known_keys] == []
    for table in tables():
        listed = [key for keys in table["ignored"].values() for key in keys]
        assert len(listed) == len(set(listed)) and not set(listed) & set(table["keys"]), table["tool"]
