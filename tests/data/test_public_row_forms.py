"""Row forms of public data sets that were trained wrongly, or refused without need, from their files to tokens."""

import json
import shutil
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tokenizers import Tokenizer

from lean_finetune.core.atomic_files import read_json
from tests.conftest import PUBLIC_DATA
from tests.data.common import read_tokens, spans_of
from tests.small_vision import vision_model
from tests.workspace import error

ROWS = PUBLIC_DATA.parent / "faults" / "rows"
NO_HELDOUT = {"data__heldout_fraction": 0, "train__heldout_every_steps": None, "evaluate__generate_rows": 0}
DPO = {"train__objective": "dpo"}
REWARD = {"train__objective": "reward", "train__loss_chunk": None}

# By file: parameters, and the text of each row of tokens, with the trained part in brackets and an image as IMAGE.
READ: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "lists of turns": ("01_json_text_of_messages.csv", {}, ["user: Hi / assistant: [Hello.]"]),
    "lists of pairs": (
        "01_json_text_of_pairs.csv",
        DPO,
        ["user: Hi / assistant: [Hello.]", "user: Hi / assistant: [Go.]"],
    ),
    "system and tools": (
        "02_system_and_tools_of_text_pairs.jsonl",
        DPO | {"data__columns": {"instruction": "prompt"}},
        [
            f"system: Answer in one word.TOOLS / user: Sky? / assistant: [{text}]"
            for text in ("Blue.", "The sky is blue.")
        ],
    ),
    "answers and their question": (
        "03_answers_without_prompt.jsonl",
        DPO | {"data__columns": {"instruction": "question"}},
        [f"user: Sky? / assistant: [{text}]" for text in ("Blue.", "Red.")],
    ),
    "texts and their question": (
        "03_question_not_called_prompt.jsonl",
        DPO | {"data__columns": {"instruction": "question"}},
        [
            f"system: Be kind. / user: Which colour is the sky? / assistant: [{text}]"
            for text in ("Blue, most days.", "Blank.")
        ],
    ),
    "img tag": ("06_img_tag.jsonl", {}, ["user: IMAGEWhat? / assistant: [Red.]"]),
    "index": ("08_part_with_index.jsonl", {}, ["user: What?IMAGE / assistant: [Red.]"]),
    "value": ("09_part_with_value.jsonl", {}, ["user: IMAGEWhat? / assistant: [Red.]"]),
    "margin of dpo": ("10_margin.jsonl", DPO, ["user: Hi / assistant: [Hello.]", "user: Hi / assistant: [Go.]"]),
    "numbered column": (
        "15_numbered_image.jsonl",
        {"data__columns": {"images": "image_1"}},
        ["user: IMAGE What? / assistant: [B]"],
    ),
    "rejected list": (
        "17_swift_rejected_list.jsonl",
        DPO,
        ["user: Hi / assistant: [Hello.]", "user: Hi / assistant: [Go.]"],
    ),
}

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "system of texts": (
        "02_system_and_tools_of_text_pairs.jsonl",
        DPO,
        "'system' cannot be used with plain texts, which no chat template renders; read the row as a conversation "
        "(data.columns={instruction: prompt})",
    ),
    "answers alone": (
        "03_answers_without_prompt.jsonl",
        DPO,
        "the row has no prompt, and 'question' is not read; if 'question' is the prompt, set data.columns="
        "{instruction: question}",
    ),
    "question of another name": (
        "03_question_not_called_prompt.jsonl",
        DPO,
        "the row has no prompt, and 'question' is not read; if 'question' is the prompt, set data.columns="
        "{instruction: question}",
    ),
    "grounding": ("07_grounding.jsonl", {}, "message 1 has <ref-object>, which other tools replace by"),
    "margin of reward": ("10_margin.jsonl", REWARD, "'margin' is 3.0, and the loss of train.objective=reward has no"),
    "context": ("12_context_beside_prompt.jsonl", {}, "'context' is part of the question, and is not read"),
    "numbered column": ("15_numbered_image.jsonl", {}, "'image_1' seems to hold an image, and is not read"),
}
OF_IMAGES = ("06", "07", "08", "09", "15")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A small model that takes images."""
    return vision_model(tmp_path_factory.mktemp("model") / "qwen")


@pytest.fixture
def tokenized(run, model, tmp_path, tiny_dir):
    """A function that copies a file, beside an image, and runs the stages pin_data and tokenize: (its path, result)."""
    if not ROWS.is_dir():
        pytest.skip(f"no rows of public data sets at {ROWS}")

    def run_stages(name: str, values: dict[str, Any]):
        stream = BytesIO()
        Image.new("RGB", (56, 56), "red").save(stream, "PNG")
        (tmp_path / "a.png").write_bytes(stream.getvalue())
        path = Path(shutil.copy(ROWS / name, tmp_path))
        own = {"model__name": str(model)} if name.startswith(OF_IMAGES) else {}
        return path, run(path, **own, **values, **NO_HELDOUT)

    return run_stages


def turns_of(row: dict[str, Any], words: Tokenizer) -> str:
    """A row of tokens in short, as in READ."""
    text, end = "", 0
    for start, stop in spans_of(row):
        text += words.decode(row["input_ids"][end:start], skip_special_tokens=False)
        text += f"[{words.decode(row['input_ids'][start:stop], skip_special_tokens=False).removesuffix('<|im_end|>')}]"
        end = stop
    places = "<|vision_start|>" + "<|image_pad|>" * text.count("<|image_pad|>") + "<|vision_end|>"
    text = text.replace(places, "IMAGE")
    turns = [turn.strip().removesuffix("<|im_end|>") for turn in text.split("<|im_start|>") if turn]
    parts = [turn.partition("\n") for turn in turns]
    shown = [(role, text.partition("\n")[0] + ("TOOLS" if '"name": "add"' in text else "")) for role, _, text in parts]
    return " / ".join(f"{role}: {text}" for role, text in shown)


@pytest.mark.parametrize("name", READ)
def test_a_row_is_read_as_its_tool_means_it(name: str, tokenized, model, tiny_dir):
    file, values, wanted = READ[name]
    _, result = tokenized(file, values)
    assert result.exit_code == 0, result.output
    directory = model if file.startswith(OF_IMAGES) else tiny_dir
    words = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert [turns_of(row, words) for row in read_tokens(Path("data/tokens/train"))] == wanted
    assert read_json(Path("data/tokens/figures.json"))["bad_rows"] == 0
    if file.startswith("06"):
        assert json.loads(Path("locks/data.json").read_text())["sources"][0]["images"]["files"] == 1


@pytest.mark.parametrize("name", REFUSED)
def test_a_row_that_cannot_be_read_is_refused_with_the_reason(name: str, tokenized):
    file, values, says = REFUSED[name]
    path, result = tokenized(file, values)
    assert error(result).startswith(f"{path}:1: {says}")
    assert not Path("data/tokens").exists()
