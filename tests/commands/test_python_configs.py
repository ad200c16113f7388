"""`fit --from` and `import` of Python scripts and notebooks: they are read, and never run."""

import json
from pathlib import Path

import pytest

from lean_finetune.commands.convert.conversions import Converted
from lean_finetune.commands.convert.read_config import read_config_of_tool
from lean_finetune.core.errors import UserError

UNSLOTH = """
from unsloth import FastLanguageModel, is_bfloat16_supported
import torch
max_seq_length = 4096
dtype = None
model, tokenizer = FastLanguageModel.from_pretrained(
    model_name="org/model", max_seq_length=max_seq_length, dtype=dtype, load_in_4bit=True,
)
model = FastLanguageModel.get_peft_model(
    model, r=32, target_modules=["q_proj", "v_proj"], lora_alpha=64, lora_dropout=0, bias="none",
    use_gradient_checkpointing="unsloth", random_state=3407, use_rslora=False, loftq_config=None,
)
def formatting(rows):
    max_seq_length = 1
    return rows
from trl import SFTTrainer, SFTConfig
trainer = SFTTrainer(
    model=model, tokenizer=tokenizer, train_dataset=dataset, formatting_func=formatting,
    args=SFTConfig(
        per_device_train_batch_size=2, gradient_accumulation_steps=16 // 4, warmup_ratio=0.1, num_train_epochs=1,
        learning_rate=2e-4, fp16=not is_bfloat16_supported(), bf16=is_bfloat16_supported(), optim="adamw_8bit",
        lr_scheduler_type="cosine", seed=3407, output_dir="outputs", report_to="none", packing=True,
    ),
)
trainer.train()
"""
TRL = """
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
FP8 = False
if FP8:
    name = "org/fp8"
else:
    name = "org/model"
    quantised = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
model = AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.bfloat16, quantization_config=quantised)
peft_config = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.1, target_modules="all-linear", task_type="CAUSAL_LM")
options = dict(per_device_train_batch_size=1, learning_rate=1e-4)
args = SFTConfig(output_dir="out", max_length=512, gradient_checkpointing=True, **options)
trainer = SFTTrainer(model, args=args, train_dataset=rows, peft_config=peft_config)
"""


def read(tmp_path: Path, text: str, name: str = "train.py") -> Converted:
    path = tmp_path / name
    path.write_text(text)
    return read_config_of_tool(path, 1, with_data=False)


def notebook(*cells: str) -> str:
    parts = [{"cell_type": "code", "source": cell.splitlines(keepends=True)} for cell in cells]
    return json.dumps({"cells": [{"cell_type": "markdown", "source": ["SFTTrainer("]}, *parts]})


def test_an_unsloth_notebook_is_read(tmp_path: Path):
    """It was refused: must be a mapping of keys; got str."""
    code = notebook("!pip install unsloth \\\n  trl\n%load_ext x\n", "%%bash\nfor i in 1; do echo; done", UNSLOTH)
    found = read(tmp_path, code, "train.ipynb")
    values = found.values
    assert (found.tool, values["model.name"], values["train.method"]) == ("Unsloth", "org/model", "qlora")
    assert (values["train.lora.rank"], values["train.lora.alpha"]) == (32, 64)
    assert values["train.lora.targets"] == ["q_proj", "v_proj"] and values["train.precision"] == "auto"
    assert (values["data.max_length"], values["bucket.mode"]) == (4096, "packed")
    assert (values["bucket.max_tokens"], values["train.tokens_per_step"]) == (2 * 4096, 8 * 4096)
    assert (values["train.lr"], values["train.schedule"], values["train.grad_ckpt"]) == (2e-4, "cosine", True)
    assert found.unknown == []


def test_a_script_of_trl_is_read_like_its_file(tmp_path: Path):
    found = read(tmp_path, TRL)
    values = found.values
    assert (found.tool, values["model.name"], values["train.method"]) == ("TRL", "org/model", "qlora")
    assert values["train.quant.type"] == "nf4" and values["train.quant.double"] is True
    assert (values["train.lora.rank"], values["train.lora.dropout"]) == (8, 0.1)
    assert (values["data.max_length"], values["bucket.max_tokens"], values["train.lr"]) == (512, 512, 1e-4)
    assert found.keys["torch_dtype"] == "bfloat16"


def test_no_limit_on_rows_is_not_the_tools_default(tmp_path: Path):
    """1024 tokens of TRL's default, for rows that are not cut."""
    found = read(tmp_path, TRL.replace("max_length=512", "max_length=None"))
    assert found.values["data.max_length"] == 4096
    assert any(text.startswith("no limit on the length of rows") for text in found.differs)


def test_a_preference_trainer_decides_the_objective(tmp_path: Path):
    text = TRL.replace("SFTConfig(", "DPOConfig(beta=0.2, ").replace("SFTTrainer(", "DPOTrainer(")
    found = read(tmp_path, text)
    assert (found.values["train.objective"], found.values["train.preference.beta"]) == ("dpo", 0.2)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("FP8 = False", "FP8 = input()", "quantised is set in a condition"),
        ("learning_rate=1e-4", "learning_rate=rate()", ":12: learning_rate: must be a value; rate(…) is known only"),
        ("**options", "**read()", ":13: SFTConfig: must have its arguments by name"),
        (
            "peft_config=peft_config",
            "peft_config=make()",
            ":14: SFTTrainer: must get LoraConfig(…) with its values; got make",
        ),
        ("SFTTrainer(model, ", "SFTTrainer(load(), ", "must get a model that is named here"),
        ("SFTTrainer(", "GRPOTrainer(", "trainer: this kind of training is not done here; got GRPO"),
        ("trainer = ", "SFTTrainer(model); trainer = ", "must make one trainer of TRL or Unsloth"),
        (
            "args = SFTConfig(",
            "def f(): pass\nargs = f() or SFTConfig(",
            "must get a configuration whose values are here",
        ),
        (
            "args=args",
            "args=make(args)",
            "must get a configuration whose values are here, such as SFTConfig(…); got make",
        ),
        ("trainer = ", "args.max_length = limit()\ntrainer = ", ":14: max_length: must be a value"),
        (
            "trainer = ",
            "options.update(x)\nargs = SFTConfig(**options)\ntrainer = ",
            "SFTConfig: must have its arguments",
        ),
        ("trainer = ", "if FP8 == x: args.max_length = 8\ntrainer = ", "args.max_length is set in a condition"),
        (
            "trainer = ",
            "model.add_adapter(peft_config)\ntrainer = ",
            "its model must stay as it was made; got add_adapter",
        ),
        ("trainer = ", "for p in model.parameters(): p.requires_grad = False\ntrainer = ", "got requires_grad"),
        ("r=8, ", 'r=8, rank_pattern={"q_proj": 64}, ', "LoraConfig must be without rank_pattern"),
        (
            "trainer = ",
            "model = PeftModel.from_pretrained(model, 'x')\ntrainer = ",
            "must get a model that is named here",
        ),
        ("SFTTrainer(", "Trainer(", "must make one trainer of TRL or Unsloth, such as SFTTrainer(…); got 0"),
        ("FP8 = False", "FP8 = ", ":4: must be Python"),
        ("FP8 = False", "FP8 = " + "(" * 500 + ")" * 500, "must be Python"),
        ("FP8 = False", "FP8 = " + "-" * 20_000 + "1", "must be Python"),
    ],
)
def test_what_only_running_can_give_is_refused_with_its_line(tmp_path: Path, old: str, new: str, expected: str):
    """Another run than the script's, or a traceback."""
    assert old in TRL
    text = TRL.replace(old, new)
    if old == "SFTTrainer(model, ":
        text = text.replace("AutoModelForCausalLM.from_pretrained", "fetch")
    with pytest.raises(UserError) as refused:
        read(tmp_path, text)
    assert expected in str(refused.value)


def test_a_script_is_never_run(tmp_path: Path):
    mark = tmp_path / "ran"
    run = f"open({str(mark)!r}, 'w')\n__import__('os').system('touch {mark}')\n"
    read(tmp_path, run + TRL)
    assert not mark.exists()


@pytest.mark.parametrize("text", ["[]", "{}", '{"cells": 1}', '{"cells": [{"cell_type": "code"}]}', "not json"])
def test_a_file_that_is_no_notebook_is_refused(tmp_path: Path, text: str):
    with pytest.raises(UserError, match="must be a notebook of Jupyter"):
        read(tmp_path, text, "train.ipynb")


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("trainer = ", "args.max_length = 8192\ntrainer = ", {"data.max_length": 8192}),
        ("trainer = ", "setattr(args, 'max_length', 8192)\ntrainer = ", {"data.max_length": 8192}),
        ("args = ", "options['learning_rate'] = 1e-3\nargs = ", {"train.lr": 1e-3}),
        ("r=8", "r=(rank := 64)", {"train.lora.rank": 64}),
        ("max_length=512", "max_length=length", {"data.max_length": 1024}),
        (", lora_dropout=0.1", "", {"train.lora.dropout": 0.0}),
        ("lora_alpha=16, ", "", {"train.lora.alpha": 8}),
        ("SFTConfig(", "TrainingArguments(", {"train.grad_ckpt": True, "train.lr": 1e-4}),
        ("gradient_checkpointing=True, ", "", {"train.grad_ckpt": True}),
        ("quantization_config=quantised)", ")\nkwargs = dict(quantization_config=quantised)", {"train.method": "lora"}),
    ],
)
def test_values_of_a_script_are_those_that_python_would_have(
    tmp_path: Path, old: str, new: str, changed: dict[str, object]
):
    """A value that is set later, an older one of the same name, or another class's default."""
    assert old in TRL
    text = "length = 512\nlength *= 2\n" + TRL.replace(old, new)
    values = read(tmp_path, text).values
    assert {key: values[key] for key in changed} == changed


def test_arguments_of_training_have_their_own_defaults(tmp_path: Path):
    """TRL copies them into its configuration: no checkpointing, and no bf16."""
    text = TRL.replace("SFTConfig(", "TrainingArguments(").replace("gradient_checkpointing=True, ", "")
    values = read(tmp_path, text.replace("learning_rate=1e-4", "seed=1")).values
    assert (values["train.lr"], values["train.grad_ckpt"]) == (5e-5, False)


def test_the_trainers_own_model_and_quantisation_count(tmp_path: Path):
    """The last one that a script loads, or none."""
    text = TRL.replace("trainer = ", "judge = AutoModelForCausalLM.from_pretrained('org/judge')\ntrainer = ")
    assert read(tmp_path, text).values["model.name"] == "org/model"
    text = TRL.replace("torch_dtype=torch.bfloat16, quantization_config=quantised", "")
    text = text.replace("peft_config=peft_config)", "peft_config=peft_config, quantization_config=quantised)")
    assert read(tmp_path, text).values["train.method"] == "qlora"


def test_a_loop_or_an_argument_hides_an_older_value(tmp_path: Path):
    for text in ("for rows in (8, 16):\n    pass", "from config import rows", "def f(rows):\n    pass\nrows = f(2)"):
        script = TRL.replace("FP8 = False", f"rows = 1\n{text}\nFP8 = False").replace("size=1", "size=rows")
        with pytest.raises(UserError, match="per_device_train_batch_size: must be a value"):
            read(tmp_path, script)


def test_cells_of_a_notebook_are_read_as_ipython_runs_them(tmp_path: Path):
    """A timed cell that was left out, and a cell for inference that ended the reading."""
    adapted = UNSLOTH.index("model = FastLanguageModel.get_peft_model")
    rest = "%%time\n" + UNSLOTH[adapted:]
    cells = (UNSLOTH[:adapted], "\n%%writefile x.py\nx = (", "out = !nvidia-smi\nmodel?", "generate(a b)", rest)
    found = read(tmp_path, notebook(*cells), "train.ipynb")
    assert (found.values["train.method"], found.values["train.lora.rank"]) == ("qlora", 32)
    broken = notebook(*cells[:-1], rest.replace("learning_rate=2e-4", "learning_rate=rate()"))
    with pytest.raises(UserError, match=r"train.ipynb:cell 6, line \d+: learning_rate: must be a value"):
        read(tmp_path, broken, "train.ipynb")


def test_positions_and_dotted_names_of_unsloth_are_read(tmp_path: Path):
    text = UNSLOTH.replace("FastLanguageModel.", "unsloth.FastLanguageModel.")
    text = text.replace(
        'model_name="org/model", max_seq_length=max_seq_length, dtype=dtype, load_in_4bit=True',
        '"m", 8192, None, False',
    )
    values = read(tmp_path, text.replace("model, r=32", "model, 128")).values
    assert (values["model.name"], values["data.max_length"], values["train.method"]) == ("m", 8192, "lora")
    assert (values["train.lora.rank"], values["data.train_on"]) == (128, "all")


def test_a_value_that_grows_without_end_is_refused(tmp_path: Path):
    """Forty dictionaries that each hold the one before twice."""
    grown = "d = dict(a=1)\n" + "d = dict(a=d, b=d)\n" * 40
    with pytest.raises(UserError, match="must have at most 5000 values"):
        read(tmp_path, grown + TRL.replace("max_length=512", "max_length=512, foo=d"))
