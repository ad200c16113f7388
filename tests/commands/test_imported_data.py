"""From another tool's configuration to tokens: what `import` writes is what the stages read."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lean_finetune.commands.import_config import import_config
from lean_finetune.config.load import load_params
from stages.pin import main as pin
from stages.tokenize import main as tokenize
from tests.conftest import ROOT
from tests.data.common import decoder, read_tokens, spans_of
from tests.small_vision import vision_model
from tests.workspace import invoke, lay_out

TINY = ROOT / "lean_finetune/tiny"
FAULTS = ROOT.parent / "shared/faults/rows"
Trained = list[list[str]]
"""The text of each trained span, by row."""
ASK, ANSWER = {"role": "user", "content": "Two plus two?"}, {"role": "assistant", "content": "Four."}
FIVE = {**ANSWER, "content": "Five."}
HUMAN, GPT = {"from": "human", "value": "Two plus two?"}, {"from": "gpt", "value": "Four."}
CALL = {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'}
RESULT = {"from": "observation", "value": "4"}
ADD = json.dumps([{"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}])
ROLES = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
SHAREGPT: dict[str, Any] = {"formatting": "sharegpt", "columns": {"messages": "conversations"}}
OF_MESSAGES = {"formatting": "sharegpt", "columns": {"messages": "messages"}, "tags": ROLES}
ALPACA = {"instruction": "Add.", "input": "2 2", "output": "Four."}
END = "<|im_end|>"

FORMS: dict[str, tuple[str, dict[str, Any], list[Any] | str, Trained]] = {
    # The stage, the entry of dataset_info.json, its rows, and the trained text.
    "alpaca_en_demo": ("sft", {}, [ALPACA], [["Four." + END]]),
    "alpaca with columns": (
        "sft",
        {"columns": {"prompt": "q", "response": "a", "system": "s", "history": "h"}},
        [
            {"q": "Two?", "a": "Four.", "s": "Be brief.", "h": [["One?", "Two."]]},
            {"q": "One?", "a": "Two.", "s": "", "h": [], "system": "Unread.", "tools": "Unread."},
        ],
        [["Two." + END, "Four." + END], ["Two." + END]],
    ),
    "glaive_toolcall_en_demo": (
        "sft",
        {**SHAREGPT, "columns": {"messages": "conversations", "tools": "tools"}},
        [{"conversations": [HUMAN, CALL, RESULT, GPT], "tools": ADD}],
        [['<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>' + END, "Four." + END]],
    ),
    "openai": (
        "sft",
        {"formatting": "openai", "columns": {"messages": "messages"}},
        [{"messages": [ASK, ANSWER]}],
        [["Four." + END]],
    ),
    "a sharegpt set whose columns are the usual ones": (
        "sft",
        {"formatting": "sharegpt"},
        [{"conversations": [HUMAN, GPT], "system": "Unread."}],
        [["Four." + END]],
    ),
    "dpo_en_demo": (
        "dpo",
        {
            **SHAREGPT,
            "ranking": True,
            "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"},
        },
        [{"conversations": [HUMAN], "chosen": GPT, "rejected": {"from": "gpt", "value": "Five."}}],
        [["Four." + END], ["Five." + END]],
    ),
    "alpaca pairs": (
        "rm",
        {
            "ranking": True,
            "columns": {"prompt": "instruction", "query": "input", "chosen": "chosen", "rejected": "rejected"},
        },
        [{"instruction": "Add.", "input": "2 2", "chosen": "Four.", "rejected": "Five."}],
        [["Four." + END], ["Five." + END]],
    ),
    "kto_en_demo": (
        "kto",
        {**OF_MESSAGES, "columns": {"messages": "messages", "kto_tag": "label"}},
        [{"messages": [ASK, ANSWER], "label": True}, {"messages": [ASK, FIVE], "label": False}],
        [["Four." + END], ["Five." + END], ["Five." + END], ["Four." + END]],  # Also with the other prompt.
    ),
    "c4_demo": ("pt", {"columns": {"prompt": "text"}}, [{"text": "Plain text."}], [["Plain text." + END]]),
    "wiki_demo": ("pt", {"columns": {"prompt": "text"}}, "Plain text.\n", [["Plain text." + END]]),
}


def import_and_tokenize(config: str, **values: Any) -> Path:
    """Import a configuration in this directory, and run the stages up to the tokens; their directory."""
    lay_out(Path(), run__tokenizer_engine="tokenizers", run__data_workers=1, **values)
    Path("run.yaml").write_text(config)
    for command, *arguments in ((import_config, "run.yaml"), (pin, "data"), (pin, "model"), (tokenize,)):
        result = invoke(command, *arguments)
        assert result.exit_code == 0, f"{arguments}: {result.stderr}"
    return Path("data/tokens")


def llama_factory(stage: str, model: Path | str = "tiny", **keys: str) -> str:
    """A configuration of LLaMA-Factory for the data set `rows`, with all rows trained."""
    given = {"template": "qwen3", "finetuning_type": "lora", "cutoff_len": "256", "dataset": "rows"}
    lines = {
        "model_name_or_path": str(model),
        "stage": stage,
        "dataset_dir": "data",
        "val_size": "0.0",
        **given,
        **keys,
    }
    return "".join(f"{key}: {value}\n" for key, value in lines.items())


def describe(entry: dict[str, Any], rows: list[Any] | str, name: str = "rows") -> None:
    """Write rows, and their entry into data/dataset_info.json."""
    file = Path("data", f"{name}.{'txt' if isinstance(rows, str) else 'json'}")
    file.parent.mkdir(exist_ok=True)
    file.write_text(rows if isinstance(rows, str) else json.dumps(rows))
    info = Path("data/dataset_info.json")
    entries = json.loads(info.read_text()) if info.exists() else {}
    info.write_text(json.dumps({**entries, name: {"file_name": file.name, **entry}}))


def trained_texts(tokens: Path, model: Path = TINY) -> Trained:
    """The trained text of each row, in order."""
    decode = decoder(model)
    rows = [row for side in ("train", "heldout") for row in read_tokens(tokens / side)]
    return [[decode(row["input_ids"][start:end]) for start, end in spans_of(row)] for row in rows]


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


QUICK = ("alpaca_en_demo", "glaive_toolcall_en_demo", "dpo_en_demo", "kto_en_demo", "wiki_demo")


@pytest.mark.parametrize("form", [pytest.param(one, marks=[] if one in QUICK else pytest.mark.slow) for one in FORMS])
def test_every_form_of_llama_factorys_demo_sets_becomes_tokens(form: str):
    """`import` wrote a data.ignore_columns that tokenize refused: none of them could be trained."""
    stage, entry, rows, expected = FORMS[form]
    describe(entry, rows)
    assert trained_texts(import_and_tokenize(llama_factory(stage))) == expected


def test_columns_that_no_entry_names_are_not_read():
    """A system prompt trained that the tool does not read, also where only a later row has it."""
    describe({}, [ALPACA, {**ALPACA, "output": "4.", "system": "Unread."}])
    tokens = import_and_tokenize(llama_factory("sft"))
    assert load_params().data.ignore_columns == ["functions", "history", "system", "tools"]
    decode = decoder(TINY)
    assert not any("Unread" in decode(row["input_ids"]) for row in read_tokens(tokens / "train"))


def test_a_column_that_another_set_needs_is_read_and_said():
    """data.ignore_columns is one for all sources."""
    describe({"columns": {"prompt": "instruction", "response": "output", "system": "system"}}, [ALPACA], "first")
    describe({"formatting": "sharegpt"}, [{"conversations": [HUMAN, GPT]}], "second")
    Path("run.yaml").write_text(llama_factory("sft", dataset="first,second"))
    shown = " ".join(invoke(import_config, "run.yaml").stdout.split())
    assert "second: its column system is read here if it has one, since first needs it" in shown
    assert "system" not in (load_params().data.ignore_columns or [])


def test_rows_of_mllm_demo_become_tokens_with_their_images():
    """Images that stand as text in the rows, for the form of LLaMA-Factory's demo set."""
    model = vision_model(Path("model").resolve())
    question = {"role": "user", "content": "<image>What is it?"}
    describe(
        {**OF_MESSAGES, "columns": {"messages": "messages", "images": "images"}},
        [{"messages": [question, ANSWER, {**ASK, "content": "And?<image>"}, ANSWER], "images": ["media/a.png"] * 2}],
    )
    Path("data/media").mkdir()
    Image.new("RGB", (112, 84), "red").save("data/media/a.png")
    tokens = import_and_tokenize(llama_factory("sft", model, template="qwen2_vl", flash_attn="auto"))
    assert trained_texts(tokens, model) == [["Four." + END, "Four." + END]]
    images = decoder(model)(read_tokens(tokens / "train")[0]["input_ids"]).count("<|image_pad|>")
    assert images == 2 * 12


def test_llama_factory_version_1_reads_its_description_of_data():
    """Its layout of a configuration, with several data sets in one file."""
    describe({}, [{**ALPACA, "input": str(number)} for number in range(20)])
    described = "identity: {path: data/rows.json, source: local, converter: alpaca}\n"
    Path("data/v1.yaml").write_text(described + described.replace("identity", "more"))
    config = "model: tiny\nmodel_class: llm\ntrain_dataset: data/v1.yaml\nmicro_batch_size: 1\ncutoff_len: 256\n"
    assert trained_texts(import_and_tokenize(config)) == [["Four." + END]] * 40


DEMO: dict[str, tuple[str, dict[str, Any]]] = {
    "alpaca_en_demo": ("sft", {}),
    "glaive_toolcall_en_demo": ("sft", FORMS["glaive_toolcall_en_demo"][1]),
    "dpo_en_demo": ("dpo", FORMS["dpo_en_demo"][1]),
    "kto_en_demo": ("kto", FORMS["kto_en_demo"][1]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DEMO)
def test_llama_factorys_own_demo_sets_become_tokens(name: str, public_data: Path):
    """The first rows of the published files."""
    stage, entry = DEMO[name]
    describe(entry, json.loads((public_data / f"{name}.json").read_text(encoding="utf-8"))[:20])
    tokens = import_and_tokenize(llama_factory(stage, cutoff_len="16384"))
    meta = json.loads((tokens / "meta.json").read_text())
    assert meta["train_rows"] == (40 if stage == "dpo" else 20) and all(trained_texts(tokens))


def fault(name: str) -> Path:
    """A copy of an input that once failed, in this directory."""
    if not FAULTS.is_dir():
        pytest.skip(f"no inputs that failed at {FAULTS}")
    source = FAULTS / name
    return Path(shutil.copytree(source, name) if source.is_dir() else shutil.copy(source, name))


def test_inputs_of_llama_factory_that_failed_become_tokens(monkeypatch: pytest.MonkeyPatch):
    """04: data.ignore_columns named columns that no row has."""
    monkeypatch.chdir(fault("04_llama_factory"))
    config = Path("sft.yaml").read_text().replace("Qwen/Qwen3-0.6B", "tiny") + "val_size: 0.0\n"
    assert trained_texts(import_and_tokenize(config)) == [["Hello." + END]]


def test_inputs_of_a_script_with_an_array_are_imported():
    """05: the flags in the array were lost, and the model `tiny` was written."""
    assert invoke(import_config, str(fault("05_script_with_array.sh"))).exit_code == 0
    written = load_params()
    assert (written.model.name, written.train.method, written.data.max_length) == ("Qwen/Qwen3-8B", "full", 8192)
