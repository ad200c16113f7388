"""Types of rows of Axolotl's data sets, from the configuration to tokens: the same text, or a refusal."""

import json
from pathlib import Path
from typing import Any

import pytest

from lean_finetune.commands.convert.conversions import Converted
from lean_finetune.commands.convert.read_config import read_config_of_tool
from lean_finetune.commands.import_config import import_config
from lean_finetune.config.load import load_params
from lean_finetune.core.errors import UserError
from tests.commands.test_imported_data import ANSWER, ASK, END, FIVE, GPT, HUMAN, TINY, fault, import_and_tokenize
from tests.commands.tool_configs import LLAMA_FACTORY, SWIFT_SHELL, TORCHTUNE, TRL
from tests.data.common import decoder, read_tokens
from tests.workspace import error, invoke, write_rows

CONFIG = """
base_model: tiny
adapter: lora
sequence_len: 512
val_set_size: 0.0
output_dir: out
"""
BRIEF, TURN = "<|im_start|>system\nBe brief.<|im_end|>\n", "<|im_start|>user\nTwo plus two?<|im_end|>\n"
OPENED = "<|im_start|>assistant\n"
LISTED = {"chosen": [ASK, ANSWER], "rejected": [ASK, FIVE]}
PAIR = {"chosen": "Four.", "rejected": "Five."}
OTHER_MAPPING = {"role": "from", "content": "value"}
LABELS = [{"label": True, "completion": "Four."}, {"label": False, "completion": "Five."}]

TYPES: dict[str, tuple[str, dict[str, Any] | str, dict[str, Any], str, list[str]]] = {
    # The keys of the configuration, the keys of the data set or its type, a row, its prompt, and its answers.
    "chat_template": ("", "chat_template", {"messages": [ASK, ANSWER]}, TURN, ["Four."]),
    "a system column": (
        "",
        "chat_template",
        {"messages": [ASK, ANSWER], "system": "Be brief."},
        BRIEF + TURN,
        ["Four."],
    ),
    "named fields": (
        "chat_template: chatml",
        {"type": "chat_template", "field_messages": "turns", "roles": {"user": ["customer"], "assistant": ["agent"]}}
        | {"message_property_mappings": OTHER_MAPPING},
        {"turns": [{**HUMAN, "from": "customer"}, {**GPT, "from": "agent"}], "messages": "Unread."},
        TURN,
        ["Four."],
    ),
    "sharegpt": ("", "sharegpt", {"conversations": [HUMAN, GPT], "system": "Unread."}, TURN, ["Four."]),
    "alpaca": ("", "alpaca", {"instruction": "Two plus two?", "output": "Four.", "system": "No."}, TURN, ["Four."]),
    "alpaca:chat": ("", "alpaca:chat", {"instruction": "Two plus", "input": "two?", "output": "4"}, "", ["4"]),
    "alpaca_w_system": (
        "",
        "alpaca_w_system.load_open_orca",
        {"question": "Two plus two?", "response": "Four.", "system_prompt": "Be brief."},
        BRIEF + TURN,
        ["Four."],
    ),
    "a type of its own": (
        "",
        {"type": {"field_instruction": "q", "field_output": "a", "field_system": "s", "format": "{instruction}"}},
        {"q": "Two plus two?", "a": "Four.", "s": "Be brief."},
        BRIEF + TURN,
        ["Four."],
    ),
    "completion": ("", {"type": "completion", "field": "body"}, {"body": "Four.", "text": "Unread."}, "", ["Four."]),
    "chatml.intel": ("rl: dpo", "chatml.intel", {"question": "Two plus two?", **PAIR}, TURN, ["Four.", "Five."]),
    "its system prompt": (
        "rl: dpo",
        "chatml.intel",
        {"question": "Two plus two?", "system": "Be brief.", **PAIR},
        BRIEF + TURN,
        ["Four.", "Five."],
    ),
    "llama3.icr": ("rl: ipo", "llama3.icr", {"input": "Two plus two?", **PAIR}, TURN, ["Four.", "Five."]),
    "chatml.argilla": (
        "rl: dpo",
        "chatml.argilla",
        {"instruction": "Two plus two?", "chosen_response": "Four.", "rejected_response": "Five."},
        TURN,
        ["Four.", "Five."],
    ),
    "chatml.prompt_pairs": (
        "rl: dpo",
        "chatml.prompt_pairs",
        {"prompt": "Two plus two?", **PAIR},
        TURN,
        ["Four.", "Five."],
    ),
    "chatml.ultra": ("rl: dpo", "chatml.ultra", {"prompt": "Two plus two?", **LISTED}, TURN, ["Four.", "Five."]),
    "argilla_chat": ("rl: simpo", "chatml.argilla_chat", {**LISTED, "prompt": "Unread."}, TURN, ["Four.", "Five."]),
    "chat_template of pairs": (
        "rl: orpo",
        {"type": "chat_template.default", "field_messages": "history", "field_chosen": "good", "field_rejected": "bad"},
        {"history": [ASK], "good": ANSWER, "bad": FIVE},
        TURN,
        ["Four.", "Five."],
    ),
    "pairs of its own": (
        "rl: dpo",
        {"type": {"field_prompt": "q", "field_chosen": "good", "prompt_format": "Q: {prompt}"}},
        {"q": "Two plus two?", "good": "Four.", "rejected": "Five."},
        TURN,
        ["Four.", "Five."],
    ),
    "plain pairs of its own": (
        "rl: dpo",
        {"type": {"field_prompt": "q"}},
        {"q": "Two plus two?", **PAIR},
        "Two plus two?",
        ["Four.", "Five."],
    ),
    "a reward model": (
        "reward_model: true",
        "bradley_terry.chat_template",
        {"input": "Two plus two?", "system": "", **PAIR},
        TURN,
        ["Four.", "Five."],
    ),
    "labels": ("rl: kto", "chatml.intel", {"question": "Two plus two?"}, TURN, ["Four.", "Five."]),
    "labels of its own": (
        "rl: kto",
        {"type": {"field_prompt": "q"}},
        {"q": "Two plus two?"},
        "Two plus two?",
        ["Four.", "Five."],
    ),
}


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def config(keys: str, data_set: dict[str, Any] | str, *others: dict[str, Any]) -> str:
    """A configuration of Axolotl with one data set of local rows, and other ones."""
    entry = data_set if isinstance(data_set, dict) else {"type": data_set}
    return f"{CONFIG}{keys}\ndatasets: {json.dumps([{'path': 'rows.jsonl', **entry}, *others])}\n"


QUICK = ("named fields", "alpaca_w_system", "completion", "its system prompt", "chatml.ultra", "labels")
"""One for each kind of rows and way to name columns."""


@pytest.mark.parametrize("name", [pytest.param(one, marks=[] if one in QUICK else pytest.mark.slow) for one in TYPES])
def test_rows_of_a_type_have_its_prompt_and_answers(name: str):
    """`type: chatml.intel` was ignored: common letters of both answers became the prompt."""
    keys, data_set, row, prompt, answers = TYPES[name]
    labelled = "rl: kto" in keys
    write_rows(Path("rows.jsonl"), [{**row, **one} for one in LABELS] if labelled else [row])
    tokens = import_and_tokenize(config(keys, data_set))
    decode = decoder(TINY)
    found = [decode(one["input_ids"]) for one in read_tokens(tokens / "train")]
    assert len(found) == len(answers) * (2 if labelled else 1)  # KTO also has each prompt with another row's answer.
    assert "Unread" not in "".join(found)
    for text, answer in zip(found, answers, strict=False):
        if prompt:
            assert text == f"{prompt}{OPENED if prompt.startswith('<') else ''}{answer}{END}", text
        assert text.endswith(f"{answer}{END}")


@pytest.mark.parametrize(
    ("keys", "data_set", "expected"),
    [
        (
            "",
            "jeopardy",
            "rows.jsonl: type: rows of this type are not read here; got jeopardy; write them in a form of",
        ),
        ("rl: dpo", "zephyr.nectar", "type: rows of this type are not read here; got zephyr.nectar"),
        ("rl: dpo", "alpaca", "type: rows of this type are not read here; got alpaca"),
        ("", "my.own.module", "type: rows of this type are not read here; got my.own.module"),
        (
            "",
            {"type": "chat_template", "message_property_mappings": {"role": "speaker", "content": "content"}},
            "message_property_mappings.role: must be role or from here; got speaker; rename that key of the turns",
        ),
        ("", {"type": "chat_template", "message_field_training": "learn"}, "turns are marked with train: false here"),
        (
            "",
            {"type": "chat_template", "message_field_training_detail": "parts"},
            "a turn is trained as a whole or not",
        ),
        ("", {"type": "chat_template", "field_thinking": "thoughts"}, "reasoning is read from reasoning_content"),
        ("", {"type": "chat_template", "roles": ["user"]}, "roles: must be lists of names by role; got ['user']"),
        ("chat_template: jinja", "chat_template", "chat_template_jinja: must be a template or a file of one; got none"),
    ],
)
def test_what_cannot_be_trained_so_is_refused(keys: str, data_set: dict[str, Any] | str, expected: str):
    """Rows of another form than the configuration says, trained without a word."""
    write_rows(Path("rows.jsonl"), [{"messages": [ASK, ANSWER]}])
    Path("run.yaml").write_text(config(keys, data_set))
    message = error(invoke(import_config, "run.yaml"))
    assert message.startswith("run.yaml: ") and expected in message and not Path("params.yaml").exists()


def test_data_sets_with_different_templates_are_refused():
    """One template for rows of two."""
    others = {"path": "more.jsonl", "type": "chat_template", "chat_template": "llama3"}
    for name in ("rows.jsonl", "more.jsonl"):
        write_rows(Path(name), [{"messages": [ASK, ANSWER]}])
    Path("run.yaml").write_text(config("", {"type": "chat_template", "chat_template": "chatml"}, others))
    expected = "run.yaml: chat_template: must be one for all data sets here; got chatml and llama3; import the data"
    assert error(invoke(import_config, "run.yaml")).startswith(expected)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("chat_template: chatml", "chatml"),
        ("chat_template: tokenizer_default", "tokenizer"),
        ("chat_template: tokenizer_default_fallback_chatml", "tokenizer"),
        ("chat_template: llama3", "tokenizer"),
        ("chat_template_jinja: own.jinja", "own.jinja"),
        ("", "tokenizer"),
    ],
)
def test_the_chat_template_is_the_configurations(keys: str, expected: str):
    """A template that stood under `ignored`, and other text than there was trained."""
    Path("own.jinja").write_text("{{ messages }}")
    write_rows(Path("rows.jsonl"), [{"messages": [ASK, ANSWER]}])
    Path("run.yaml").write_text(config(keys, "chat_template"))
    shown = " ".join(invoke(import_config, "run.yaml").stdout.split())
    assert load_params().data.chat_template == expected
    assert ("chat_template=llama3: the tokenizer's own is used here; save another" in shown) == ("llama3" in keys)


def convert(text: str, name: str = "run.yaml", **options: Any) -> Converted:
    """What becomes of a configuration."""
    Path(name).write_text(text)
    return read_config_of_tool(Path(name), gpus=1, **options)


AXOLOTL_CHANGES = {
    "drop_system_message: true": "system messages stay here; remove them from the rows",
    "roles_to_train: [user, assistant]": "the assistant's turns alone are trained here",
    "roles_to_train: []": "the assistant's turns alone are trained here",
    "train_on_eos: all": "the end of each trained turn is trained here, and no other end",
    "train_on_eot: none": "the end of each trained turn is trained here, and no other end",
    "train_on_inputs: true": "data.train_on says what is trained, for all data sets",
    "input_transform: a.b": "code of others is never run",
}
CHANGES = {
    "tokens: ['<a>']": "no tokens are added here; save a tokenizer and a model that have them",
    "special_tokens: {eos_token: '<e>'}": "the tokenizer's own end is trained here",
    "special_tokens: {additional_special_tokens: ['<a>']}": "no tokens are added here",
    "eot_tokens: ['<e>']": "an answer ends where the chat template ends it (data.end_of_turn)",
    "tokenizer_config: org/other": "the model's own tokenizer is used here",
    "default_system_message: Be brief.": "no system message is added to rows here",
    "chat_template_kwargs: {enable_thinking: false}": "its variables are not set here",
    "plugins: [axolotl.integrations.kd.KDPlugin]": "code of others is never run",
    "shuffle_merged_datasets: false": "rows are shuffled here",
}


@pytest.mark.parametrize("key", [*AXOLOTL_CHANGES, *CHANGES])
def test_keys_that_change_what_is_trained_are_said(key: str):
    """A key under `ignored`, without which other tokens are trained."""
    write_rows(Path("rows.jsonl"), [{"messages": [ASK, ANSWER]}])
    name, _, value = key.partition(": ")
    text = config(key, "chat_template") if key in CHANGES else config("", "chat_template")
    if key in AXOLOTL_CHANGES:
        text = f"{CONFIG}datasets:\n- path: rows.jsonl\n  type: chat_template\n  {key}\n"
    converted = convert(text)
    expected = {**CHANGES, **AXOLOTL_CHANGES}[key]
    assert any(expected in line and name in line for line in converted.differs), converted.differs
    assert not any(listed.startswith(name) for keys in converted.ignored.values() for listed in keys)


@pytest.mark.parametrize("value", ["assistant", "gpt"])
def test_what_is_trained_here_too_is_as_there(value: str):
    """A difference that is none."""
    write_rows(Path("rows.jsonl"), [{"messages": [ASK, ANSWER]}])
    keys = {"roles_to_train": [value], "train_on_eos": "turn", "drop_system_message": False, "split_thinking": True}
    converted = convert(config("plugins: [axolotl.integrations.liger.LigerPlugin]", {"type": "chat_template", **keys}))
    assert {converted.used[f"datasets.{key}"] for key in keys} == {"as here"} and converted.used["plugins"] == "as here"


@pytest.mark.parametrize(
    ("text", "ours", "value", "line"),
    [
        (LLAMA_FACTORY, "data.chat_template", None, "template=qwen3: the tokenizer's own chat template is used here"),
        (LLAMA_FACTORY + "default_system: Hi\n", "model.name", "org/model", "default_system=Hi: no system message is"),
        (TRL, "data.train_on", None, "TRL trains every token of rows of messages unless assistant_only_loss is true"),
        (
            TRL + "assistant_only_loss: true\neos_token: <e>\n",
            "data.train_on",
            "assistant",
            "eos_token=<e>: the tokenizer's",
        ),
        (TRL + "dataset_text_field: body\n", "model.name", "org/model", "name the column in data.columns={text: …}"),
        (
            TORCHTUNE.replace("packed: true", "_component_: torchtune.datasets.alpaca_dataset"),
            "data.train_on",
            "all",
            "",
        ),
        (
            TORCHTUNE.replace("packed: true", "_component_: torchtune.datasets.samsum_dataset"),
            "data.train_on",
            None,
            "its rows have a form of their own",
        ),
        ("checkpoint_dir: a/b\nlora_r: 8\n", "data.train_on", "all", ""),
        (
            "checkpoint_dir: a/b\nlora_r: 8\ndata: {init_args: {mask_prompt: true, prompt_style: alpaca}}\n",
            "data.train_on",
            "assistant",
            "prompt_style=alpaca: the chat template writes the text here",
        ),
        (
            "model: a/b\ntraining: {training_type: lora}\ndata: {dataset: org/rows, format_type: chatml}\n",
            "data.format",
            "messages",
            "",
        ),
        ("model: a/b\ntraining: {training_type: lora}\n", "data.train_on", "all", ""),
        (SWIFT_SHELL, "data.over_length", "drop", ""),
        (
            SWIFT_SHELL.replace("sft \\", "pt --truncation_strategy split \\"),
            "data.over_length",
            "split",
            "use_chat_template=False: the chat template writes",
        ),
        (SWIFT_SHELL.replace("sft \\", "pt \\"), "data.train_on", "all", ""),
        (
            SWIFT_SHELL.replace("sft \\", "sft --loss_scale react \\"),
            "data.train_on",
            None,
            "loss_scale=react: a trained token has weight 1 here",
        ),
        (
            SWIFT_SHELL.replace("sft \\", "sft --model_author A B \\"),
            "model.name",
            "org/model",
            "names are not written into rows here",
        ),
        (config("excess_length_strategy: truncate", {}), "data.over_length", "truncate", ""),
        (config("dataset_exact_deduplication: true", {}), "data.drop_duplicates", True, ""),
        (config("", {}), "data.over_length", "drop", ""),
    ],
)
def test_other_tools_keys_that_change_what_is_trained(text: str, ours: str, value: Any, line: str):
    """Prompts that a tool trains and we do not, or the reverse, without a word."""
    converted = convert(text, "run.sh" if "swift " in text else "run.yaml")
    assert converted.values.get(ours) == value
    assert not line or any(line in said for said in converted.differs), converted.differs


def test_files_of_a_data_set_are_its_rows():
    """All files of a directory trained where one is named, or a data set called `json` looked for on the hub."""
    for name in ("set/a.jsonl", "set/b.jsonl"):
        write_rows(Path(name), [{"messages": [ASK, ANSWER]}])
    for entry in ({"path": "set", "data_files": "a.jsonl"}, {"path": "json", "data_files": ["set/a.jsonl"]}):
        found = convert(config("", {**entry, "type": "chat_template"})).values["data.source"]
        assert [one["source"] for one in found] == ["set/a.jsonl"]
    gone = convert(config("", {"path": "org/rows", "data_files": "a.jsonl", "type": "chat_template"}))
    assert "data.source" not in gone.values and any("org/rows has no path here" in line for line in gone.differs)
    assert "datasets.type" in gone.ignored["not found here"]


@pytest.mark.parametrize("of_data", [False, True])
def test_a_template_whose_text_stands_in_the_configuration_is_written_into_a_file(of_data: bool):
    """Half of alignment-handbook's recipes; the tokenizer's own template would train other text."""
    text = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    write_rows(Path("rows.jsonl"), [{"messages": [ASK, ANSWER]}])
    entry = {"type": "chat_template", "chat_template_jinja": text} if of_data else "chat_template"
    Path("run.yaml").write_text(config("" if of_data else f"chat_template_jinja: {json.dumps(text)}", entry))
    Path("chat_template.jinja").write_text("mine")
    message = error(invoke(import_config, "run.yaml"))
    assert message.startswith("chat_template_jinja: chat_template.jinja exists and has another text")
    assert not Path("params.yaml").exists() and Path("chat_template.jinja").read_text() == "mine"
    Path("chat_template.jinja").unlink()
    for _ in range(2):  # Also again.
        shown = " ".join(invoke(import_config, "run.yaml").stdout.split())
        assert "written chat_template.jinja: the chat template of run.yaml" in shown
        assert load_params().data.chat_template == "chat_template.jinja"
        assert Path("chat_template.jinja").read_text() == text


def test_held_out_data_sets_have_types_too():
    """`test_datasets` under `not known`, and held-out rows of another form."""
    for name in ("rows.jsonl", "held.jsonl"):
        write_rows(Path(name), [{"q": "Two?", "a": "Four."}])
    entry = {"path": "held.jsonl", "type": {"field_instruction": "q", "field_output": "a"}}
    converted = convert(config(f"test_datasets: {json.dumps([entry])}", {"type": entry["type"]}))
    columns = {"instruction": "q", "output": "a"}
    assert converted.values["data.heldout_source"] == [{"source": "held.jsonl", "format": "alpaca", "columns": columns}]
    assert converted.used["test_datasets.type"] == "data.heldout_source.format" and converted.unknown == []


def test_a_prediction_needs_no_types():
    """`fit --from` refused for rows that it does not read."""
    Path("run.yaml").write_text(config("chat_template_jinja: '{{ messages }}'", "jeopardy"))
    converted = read_config_of_tool(Path("run.yaml"), gpus=1, with_data=False)
    assert {"datasets.type", "chat_template_jinja"} <= {*converted.ignored["a prediction needs no data"]}


def test_the_configuration_of_intels_pairs_is_imported_as_that_form():
    """14: `type` was ignored."""
    path = fault("14_axolotl_intel.yaml")
    assert invoke(import_config, str(path)).exit_code == 0
    found = load_params()
    [(_, source)] = found.data.named_sources()
    assert (source.source, source.split, source.format) == ("hf://Intel/orca_dpo_pairs", "train", "alpaca_preference")
    assert source.columns == {"instruction": "question"} and found.data.chat_template == "chatml"
    write_rows(Path("rows.jsonl"), [{"system": "Be brief.", "question": "Two plus two?", **PAIR}])
    text = (
        path.read_text().replace("NousResearch/Meta-Llama-3.1-8B", "tiny").replace("Intel/orca_dpo_pairs", "rows.jsonl")
    )
    tokens = import_and_tokenize(text.replace("split: train", "name:") + "val_set_size: 0.0\n")
    decode = decoder(TINY)
    texts = [decode(row["input_ids"]) for row in read_tokens(tokens / "train")]
    assert texts == [f"{BRIEF}{TURN}{OPENED}{answer}{END}" for answer in ("Four.", "Five.")]


def test_a_configuration_that_is_no_text_of_keys_is_refused():
    with pytest.raises(UserError, match="chat_template: must be a text"):
        convert(config("chat_template: [a]", "chat_template"))
