"""Prompts of pairs that no column has: they end where an answer begins, or the row is refused with what to write."""

from typing import Any

import pytest

from lean_finetune.core.errors import RowFault
from lean_finetune.data.format.format_base import Conversation, PlainText, SourceFormat, detect_format
from lean_finetune.data.format.row_formats import parse_row
from lean_finetune.islands.objectives.registry import KINDS
from lean_finetune.preferences.pair_formats import Pair

QUESTION = {"role": "user", "content": "Sky?"}
BLUE, RED = ({"role": "assistant", "content": text} for text in ("Blue.", "Red."))
HH = "\n\nHuman: Which colour?\n\nAssistant:"


def parsed(row: dict[str, Any], **columns: str) -> Pair:
    name, _ = detect_format(row, columns, KINDS["pair"])
    pair = parse_row(row, SourceFormat(format=name, columns=columns, kind=KINDS["pair"]))
    assert isinstance(pair, Pair)
    return pair


def texts(*answers: str, prompt: str = "") -> dict[str, str]:
    chosen, rejected = (f"{prompt}{answer}" for answer in answers)
    return {"chosen": chosen, "rejected": rejected}


DIVIDED: dict[str, tuple[str, str, str]] = {
    "hh-rlhf": (HH, " I think blue.", " I think red."),
    "hh-rlhf of several turns": (f"{HH} Blue.\n\nHuman: Why?\n\nAssistant:", " Because.", " But why?"),
    "one answer begins the other": (HH, " Blue", " Blue, I think."),
    "an answer with a list of questions": (HH, " Ask:\nQ: Why?", " Ask:\nQ: How?"),
    "chatml": ("<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n", "Blue<|im_end|>", "Black<|im_end|>"),
    "llama 2": ("<s>[INST] Q [/INST]", " Blue", " Black"),
    "llama 3": (
        "<|start_header_id|>user<|end_header_id|>\n\nQ<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "Blue",
        "Black",
    ),
    "alpaca": ("### Instruction:\nQ\n\n### Response:\n", "Blue", "Black"),
    "guanaco": ("### Human: Q### Assistant:", " I think blue", " I think red"),
    "vicuna": ("A chat between two. USER: Q ASSISTANT:", " I think blue", " I think red"),
    "small letters": ("user: Q\nassistant:", " I think blue", " I think red"),
    "lines of Windows": (HH.replace("\n", "\r\n"), " I think blue", " I think red"),
    "bold names": ("**User:** Q\n**Assistant:**", " Blue", " Black"),
    "question and answer": ("Question: Sky?\nAnswer:", " Blue", " Black"),
    "trl": ("The sky is", " blue.", " green."),
    "numbers": ("2 + 2 =", " 42", " 43"),
    "lines": ("Name a colour\n", "Blue", "Black"),
    "chinese": ("天空？答：", "蓝", "红"),
    "one text begins the other": ("The sky", " is", " is blue"),
}


@pytest.mark.parametrize("prompt, chosen, rejected", DIVIDED.values(), ids=DIVIDED)
def test_a_prompt_in_both_texts_ends_where_the_answer_or_a_word_begins(prompt: str, chosen: str, rejected: str):
    pair = parsed(texts(chosen, rejected, prompt=prompt))
    assert pair.chosen == PlainText(prompt=prompt, completion=chosen)
    assert pair.rejected == PlainText(prompt=prompt, completion=rejected)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "letters": (texts("Blue, most days.", "Blank."), "begin differently, and there is no 'prompt'"),
    "digits": (texts("42", "43"), "begin differently"),
    "spaces": (texts("\n\nBlue", "\n\nRed"), "begin differently"),
    "other questions": (
        texts("\n\nHuman: a\n\nAssistant: A", "\n\nHuman: b\n\nAssistant: B"),
        "do not begin with the same user's turn",
    ),
    "no question": (texts(" Blue", " Red", prompt="\n\nAssistant:"), "do not begin with the same user's turn"),
    "question alone": (texts("Blue", "Red", prompt="\n\nHuman: Sky? "), "the same user's turn and the start of an an"),
    "earlier answers": (
        texts(" Yes.\n\nHuman: Why?\n\nAssistant: A", " No.\n\nHuman: Why?\n\nAssistant: A", prompt=HH),
        "part before their last answers: 'chosen' goes on with \"Human:\"",
    ),
    "later questions": (
        texts("y?\n\nAssistant: A", "o?\n\nAssistant: A", prompt=f"{HH} Yes.\n\nHuman: Wh"),
        "part before their last answers",
    ),
    "prompt twice": (
        {"prompt": "Which colour?", **texts(" Blue", " Red", prompt=HH)},
        "'chosen' and 'rejected' both begin with a user's turn, which would be trained",
    ),
    "text of the prompt twice": (
        {"prompt": "Which colour has the sky?", **texts(" Blue", " Red", prompt="Which colour has the sky?")},
        "both begin with the text of 'prompt'",
    ),
    "question of another name": (
        {"question": "Which colour is the sky?", **texts("Blue, most days.", "Blank.")},
        "the row has no prompt, and 'question' is not read; if 'question' is the prompt, set data.columns="
        "{instruction: question} (a chat turn) or {prompt: question} (plain text); name what is none in "
        "data.ignore_columns",
    ),
    "common words": ({"question": "Sky?", **texts("I think blue", "I think red")}, "and 'question' is not read; if"),
    "question among others": (
        {"source": "web", "id": "7", "the_query": "Sky?", "n": 3, **texts("I say blue", "I say red")},
        "and 'the_query' and 'source' are not read; if 'the_query' is the prompt",
    ),
    "question and system": (
        {"system": "S", "question": "Sky?", **texts("I say blue", "I say red")},
        "set data.columns={instruction: question}; name",
    ),
    "turns of another name": (
        {"dialog": [QUESTION], **texts("Blue", "Red")},
        "if 'dialog' is the prompt, set data.columns={prompt: dialog}; name",
    ),
    "answers alone": ({"chosen": [BLUE], "rejected": [RED]}, "no user's turn is in front of 'chosen' and 'rejected'"),
    "answers and a question": (
        {"question": "Sky?", "chosen": [BLUE], "rejected": [RED]},
        "if 'question' is the prompt, set data.columns={instruction: question}; name",
    ),
    "answers after a system turn": (
        {"chosen": [{"role": "system", "content": "S"}, BLUE], "rejected": [{"role": "system", "content": "S"}, RED]},
        "no user's turn is in front of",
    ),
    "greeting": ({"chosen": [BLUE, BLUE], "rejected": [BLUE, RED]}, "no user's turn is in front of"),
    "blank instruction": ({"instruction": " ", **texts("Blue", "Red")}, "no user's turn is in front of"),
    "empty messages": ({"messages": [], "chosen": BLUE, "rejected": RED}, "no user's turn is in front of"),
    "empty prompt": ({"prompt": [], "chosen": [BLUE], "rejected": [RED]}, "no user's turn is in front of"),
    "no question of ms-swift": ({"messages": [BLUE], "rejected_response": "Red."}, "no user's turn is in front of"),
}


@pytest.mark.parametrize("row, fault", REFUSED.values(), ids=REFUSED)
def test_what_is_no_prompt_is_refused(row: dict[str, Any], fault: str):
    """`Bl` + `ue, most days.`: common letters of two answers became the prompt."""
    with pytest.raises(RowFault) as refusal:
        parsed(row)
    assert fault in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "row, columns",
    [
        ({"question": "Sky?", "chosen": "Blue.", "rejected": "Red."}, {"instruction": "question"}),
        ({"question": "Sky?", "chosen": [BLUE], "rejected": [RED]}, {"instruction": "question"}),
        ({"dialog": [QUESTION], "chosen": "Blue.", "rejected": "Red."}, {"prompt": "dialog"}),
        ({"dialog": [QUESTION], "chosen": [BLUE], "rejected": [RED]}, {"prompt": "dialog"}),
    ],
)
def test_the_lines_of_the_refusals_read_the_question(row: dict[str, Any], columns: dict[str, str]):
    with pytest.raises(RowFault) as refusal:
        parsed(row)
    [(key, column)] = columns.items()
    assert f"data.columns={{{key}: {column}}}" in str(refusal.value)
    pair = parsed(row, **columns)
    assert isinstance(pair.chosen, Conversation) and pair.chosen.messages == [QUESTION, BLUE]


@pytest.mark.parametrize(
    "key, value", [("system", "Be brief."), ("tools", [{"name": "f"}]), ("functions", [{"name": "f"}])]
)
def test_system_and_tools_beside_text_pairs_are_in_the_prompt_or_refused(key: str, value: Any):
    """They were counted as read, and dropped."""
    row = {"prompt": "Sky?", "chosen": "Blue.", "rejected": "Red.", key: value}
    with pytest.raises(RowFault) as refusal:
        parsed(row)
    assert f"{key!r} cannot be used with plain texts" in str(refusal.value)
    assert "data.columns={instruction: prompt}" in str(refusal.value)
    pair = parsed(row, instruction="prompt")
    for one in (pair.chosen, pair.rejected):
        assert isinstance(one, Conversation)
        assert one.tools if key != "system" else one.messages[0] == {"role": "system", "content": value}
    with pytest.raises(RowFault, match=f"{key!r} cannot be used with plain texts"):
        parsed({**texts(" Blue.", " Red.", prompt=HH), key: value})


def test_rejected_answers_of_ms_swift_are_texts_or_lists_of_turns():
    """Both follow the last turn that is not the assistant's, as in ms-swift."""
    call = {"role": "tool_call", "content": '{"name": "look", "arguments": {}}'}
    seen = {"role": "tool", "content": "blue"}
    start = [QUESTION, call, seen]
    for rejected in ("Red.", [RED]):
        pair = parsed({"messages": [*start, BLUE], "rejected_response": rejected})
        assert isinstance(pair.chosen, Conversation) and isinstance(pair.rejected, Conversation)
        assert pair.chosen.messages[3:] == [BLUE] and pair.rejected.messages[3:] == [RED]
        assert pair.chosen.trained_turns() == pair.rejected.trained_turns() == [3]
    pair = parsed({"messages": [QUESTION, call], "rejected_response": [call, seen, RED]})
    assert isinstance(pair.rejected, Conversation) and pair.rejected.trained_turns() == [1, 3]
    for wrong, fault in (
        ([QUESTION, RED], "begins with a turn of user"),
        (["Red."], "must be an object with"),
        ([], "no as"),
    ):
        with pytest.raises(RowFault, match=fault):
            parsed({"messages": [QUESTION, BLUE], "rejected_response": wrong})
