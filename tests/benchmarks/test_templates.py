"""The benchmark of chat templates counts what they render, and finds tokens that are trained wrongly."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from benchmarks import templates
from benchmarks.template_reading import fault_of, read_row, renderings_of
from benchmarks.template_rows import synthetic_rows
from lean_finetune.core.errors import UserError
from tests.data.families import ASK, TURNS

MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>\n{% endgeneration %}{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
)


def write(folder: Path, **sources: str) -> Path:
    for name, source in sources.items():
        (folder / f"{name}.jinja").write_text(source, encoding="utf-8")
    return folder


def failed(measured) -> list[str]:
    return [bar.name for bar in measured.bars if not bar.holds]


def test_rows_are_right_or_refused_and_marks_are_compared(tmp_path):
    plain = {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]}
    (tmp_path / "rows.json").write_text(json.dumps([plain] * 9))
    folder = write(tmp_path, chat=TURNS + ASK, chat_training=MARKED, none="{{ messages[0].content }}")
    measured = templates.measure(quick=True, directories=[folder], rows=[tmp_path / "rows.json"])
    chat, training, none, total, *reasons = measured.rows
    assert not failed(measured) and chat["right"] == training["right"] > 10 and chat["wrong"] == 0
    assert none["loads"] == "no" and none["refused"] == chat["right"] + chat["refused"] == len([*synthetic_rows()]) + 5
    assert total["refused"] == sum(row["refused"] for row in reasons) and total["loads"] == "2 of 3"


def test_marks_around_other_text_break_a_bar(tmp_path):
    folder = write(
        tmp_path,
        chat=TURNS + ASK,
        chat_training=MARKED.replace("{{ m.content }}<|im_end|>\n{% endgen", "{{ m.content }}{% endgen").replace(
            "{% endgeneration %}", "{% endgeneration %}<|im_end|>\n"
        ),
    )
    assert "rows whose spans are not those of the marked template" in failed(
        templates.measure(quick=True, directories=[folder], rows=[])
    )


REFUSED = "{{ raise_exception('no') if lipsum is defined }}"  # Defined in transformers' environment only.
DATED = "{{ strftime_now('%d %b %Y') }}"


@pytest.mark.parametrize("start, bars", [(DATED, []), (REFUSED, ["right rows whose text was not compared"])])
def test_right_rows_whose_text_is_not_compared_are_counted(start, bars, tmp_path):
    """A date is compared, though transformers writes today's."""
    measured = templates.measure(quick=True, directories=[write(tmp_path, chat=start + TURNS + ASK)], rows=[])
    right = measured.rows[0]["right"]
    assert failed(measured) == bars and right > 5 and measured.rows[0]["not compared"] == (right if bars else 0)


def test_only_refusals_of_templates_are_passed_over(monkeypatch):
    def broken(*_: object, **__: object) -> None:
        raise OSError("no such file")

    monkeypatch.setattr("transformers.utils.chat_template_utils.render_jinja_template", broken)
    with pytest.raises(OSError, match="no such file"):
        renderings_of(dict(synthetic_rows())["two turns"], TURNS, {})


def test_a_directory_without_templates_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"no \.jinja file is below"):
        templates.measure(quick=True, directories=[tmp_path], rows=[])


@pytest.fixture(scope="module")
def chatml(tmp_path_factory):
    """Two turns of ChatML as tokens: the conversation, ids, spans and tokenizer."""
    place = tmp_path_factory.mktemp("chatml")
    tokenizer, stops = templates.save_tokenizer(place, TURNS + ASK)
    conversation = dict(synthetic_rows())["two turns"]
    [made] = templates.tokenize(place, [conversation], stops)
    assert not isinstance(made, str)
    return conversation, *made, tokenizer


FAULTS = {
    "as it is": (lambda spans: spans, None),
    "a prompt is trained": (lambda spans: [1, *spans[1:]], "text of a prompt or tool is trained"),
    "an answer is not": (lambda spans: spans[2:], "zqa1 is trained 0 times"),
    "no end": (lambda spans: [spans[0], spans[1] - 1, *spans[2:]], "a trained span ends without a control token"),
}


@pytest.mark.parametrize("change, fault", FAULTS.values(), ids=FAULTS)
def test_wrong_spans_are_found(chatml, change, fault):
    conversation, ids, spans, tokenizer = chatml
    found = _fault(conversation, ids, change(spans), tokenizer)
    assert found is None if fault is None else found is not None and found.startswith(fault)


def test_a_trained_header_is_found(chatml):
    conversation, ids, spans, tokenizer = chatml
    start = tokenizer.token_to_id("<|im_start|>")
    header = max(place for place, number in enumerate(ids[: spans[0]]) if number == start)
    found = _fault(conversation, ids, [header, *spans[1:]], tokenizer)
    assert found is not None and found.startswith("a trained span starts with the header of its turn")


def test_a_control_token_in_pieces_is_found(chatml):
    conversation, ids, spans, tokenizer = chatml
    end = tokenizer.token_to_id("<|im_end|>")
    tokenizer.encode_special_tokens = True
    pieces = tokenizer.encode("<|im_end|>", add_special_tokens=False).ids
    tokenizer.encode_special_tokens = False
    place = ids.index(end)
    ids = [*ids[:place], *pieces, *ids[place + 1 :]]
    spans = [bound + len(pieces) - 1 for bound in spans]
    assert _fault(conversation, ids, spans, tokenizer) == "the ids lack a control token of the text"


def _fault(conversation, ids, spans, tokenizer: Tokenizer) -> str | None:
    row = read_row(conversation, ids, spans, tokenizer)
    renderings = renderings_of(conversation, TURNS + ASK, {"eos_token": "<|im_end|>"})
    return fault_of(row, renderings, tokenizer, "<|im_start|>", has_marks=False)
