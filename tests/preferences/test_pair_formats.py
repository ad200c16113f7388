"""Rows of preference pairs: the forms of other tools, and what is refused."""

import json
from typing import Any

import pytest

from lean_finetune.core.errors import RowFault
from lean_finetune.data.format.format_base import Conversation, PlainText, SourceFormat, detect_format
from lean_finetune.data.format.row_formats import parse_row
from lean_finetune.islands.objectives.registry import KINDS
from lean_finetune.preferences.pair_formats import Pair

QUESTION = {"role": "user", "content": "2+2?"}
CALL = '{"name": "f", "arguments": {}}'
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("4", "5"))


def parsed(row: dict[str, Any]) -> Pair:
    """The pair of a row whose format is detected."""
    name, _ = detect_format(row, {}, KINDS["pair"])
    pair = parse_row(row, SourceFormat(format=name, columns={}))
    assert isinstance(pair, Pair)
    return pair


FORMS: dict[str, dict[str, Any]] = {
    "preference with a prompt": {"prompt": [QUESTION], "chosen": [GOOD], "rejected": [BAD]},
    "preference without a prompt": {"chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]},
    "preference whose prompt is a text": {"prompt": "2+2?", "chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]},
    "ultrafeedback": {
        "prompt": "2+2?",
        "messages": [QUESTION, GOOD],
        "chosen": [QUESTION, GOOD],
        "rejected": [QUESTION, BAD],
    },
    "alpaca": {"instruction": "2+2?", "chosen": "4", "rejected": "5"},
    "sharegpt": {
        "conversations": [{"from": "human", "value": "2+2?"}],
        "chosen": {"from": "gpt", "value": "4"},
        "rejected": {"from": "gpt", "value": "5"},
    },
    "axolotl": {"messages": [QUESTION], "chosen": GOOD, "rejected": BAD},
    "ms-swift": {"messages": [QUESTION, GOOD], "rejected_response": "5"},
}


@pytest.mark.parametrize("row", FORMS.values(), ids=FORMS)
def test_every_form_gives_the_same_pair(row):
    for example, answer in zip((parsed(row).chosen, parsed(row).rejected), (GOOD, BAD), strict=True):
        assert isinstance(example, Conversation)
        assert example.messages == [QUESTION, answer] and example.trained_turns() == [1]


def test_earlier_answers_belong_to_the_prompt():
    start = [QUESTION, BAD, {"role": "user", "content": "Sure?"}]
    pair = parsed({"chosen": [*start, GOOD], "rejected": [*start, BAD], "system": "Be right."})
    assert isinstance(pair.chosen, Conversation)
    assert [message["role"] for message in pair.chosen.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert pair.chosen.trained_turns() == [4] and pair.prompt_key() == pair.rejected.prompt_key()


@pytest.mark.parametrize("start", [{"role": "assistant", "content": "Wait."}, {"role": "tool_call", "content": CALL}])
def test_answers_that_begin_alike_and_end_in_other_calls_are_compared_as_a_whole(start):
    """The common beginning was a turn of its own in the prompt, and the calls another one."""
    calls = [{"role": "tool_call", "content": CALL.replace("f", name)} for name in "gh"]
    pair = parsed({"chosen": [QUESTION, start, calls[0]], "rejected": [QUESTION, start, calls[1]]})
    for one in (pair.chosen, pair.rejected):
        assert isinstance(one, Conversation)
        assert len(one.messages) == 2 and one.trained_turns() == [1]


def test_plain_texts_need_no_template():
    pair = parsed({"prompt": "2+2=", "chosen": "4", "rejected": "5"})
    assert pair.chosen == PlainText(prompt="2+2=", completion="4")
    implicit = parsed({"chosen": "Q: 2+2? A: 4", "rejected": "Q: 2+2? A: 5"})
    assert implicit.rejected == PlainText(prompt="Q: 2+2? A:", completion=" 5")


OTHER = {"role": "user", "content": "3+3?"}


@pytest.mark.parametrize(
    "row, fault",
    [
        ({"chosen": [QUESTION, GOOD], "rejected": [OTHER, BAD]}, "the prompts of 'chosen' and 'rejected' differ"),
        ({"prompt": "3+3?", "chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]}, "is no turn that 'chosen'"),
        ({"prompt": "2+2=", "chosen": "4", "rejected": "4"}, "are the same answer"),
        ({"prompt": [QUESTION], "chosen": [GOOD], "rejected": "5"}, "must both be text, or both messages"),
        ({"messages": [QUESTION], "rejected_response": "5"}, "must end with the assistant's chosen answer"),
        ({"prompt": [QUESTION], "chosen": [OTHER], "rejected": [BAD]}, "'chosen' has no assistant turn"),
        ({"prompt": [QUESTION], "chosen": [QUESTION, GOOD], "rejected": [BAD]}, "'chosen' begins with a turn of user"),
        ({"messages": [QUESTION, GOOD], "chosen": GOOD, "rejected": BAD}, "'messages' ends with an assistant turn"),
        ({"chosen": "4", "rejected": "5"}, "begin differently, and there is no 'prompt'"),
    ],
)
def test_what_is_no_pair_is_refused(row, fault):
    with pytest.raises(RowFault, match=fault):
        parsed(row)


def test_last_turns_are_compared_after_equal_turns():
    """data.train_on=last_assistant: log-probabilities of answers to different questions."""
    more = {"role": "user", "content": "Sure?"}
    parsed({"prompt": [QUESTION], "chosen": [GOOD, more, GOOD], "rejected": [GOOD, more, BAD, more]}).check_last_turns()
    parsed({"prompt": "2+2=", "chosen": "4", "rejected": "5"}).check_last_turns()
    for chosen, rejected in (([GOOD, more, GOOD], [BAD, more, BAD]), ([GOOD, more, GOOD], [BAD])):
        pair = parsed({"prompt": [QUESTION], "chosen": chosen, "rejected": rejected})
        with pytest.raises(RowFault, match="compares the last answers of 'chosen' and 'rejected', and"):
            pair.check_last_turns()


def test_supervised_fine_tuning_says_what_trains_pairs():
    with pytest.raises(RowFault, match="set train.objective=dpo"):
        detect_format({"prompt": "a", "chosen": "b", "rejected": "c"}, {})


def test_empty_answers_are_known():
    assert parsed({"prompt": [QUESTION], "chosen": [GOOD], "rejected": [{**BAD, "content": " "}]}).has_empty_answer()


def test_public_rows_are_read(public_data):
    rows = json.loads((public_data / "dpo_en_demo.json").read_text())
    assert len([parsed(row) for row in rows]) == 300
