"""Chat templates of users: their date, their memory limit, and refusals of what they omit."""

import json
import re
import resource
import signal
import sys
from pathlib import Path

import pytest

from lean_finetune.core.atomic_files import read_json
from lean_finetune.core.errors import RowFault, UserError
from lean_finetune.data.chat import compiled_template
from lean_finetune.data.chat.chat_template import ChatTemplate, load_template, read_bundled
from lean_finetune.data.format.format_base import Conversation
from lean_finetune.data.shards import tokenize_block
from tests.data.common import DATE, chat_row, decoder, read_tokens
from tests.data.families import ASK, TURNS, chat, trained
from tests.workspace import error, write_rows

LOOP = TURNS + ASK
ROWS = [chat_row(f"Say {n}", f"Well, {n}") for n in range(40)]


@pytest.fixture
def run_template(run):
    """A function that tokenizes rows with a template."""

    def write_and_run(source, rows=ROWS, **values):
        Path("mine.jinja").write_text(source, encoding="utf-8")
        return run(write_rows(Path("rows.jsonl"), rows), **{"data__chat_template": "mine.jinja"} | values)

    return write_and_run


def first_text(directory: Path) -> str:
    return decoder(directory)(read_tokens(Path("data/tokens/train"))[0]["input_ids"])


def test_a_template_that_writes_todays_date_writes_that_of_data_template_date(run_template, tiny_dir):
    """As gpt-oss' and Mistral's do, which no other date can be given; tomorrow the tokens are the same."""
    dated = "{{ 'Current date: ' + strftime_now('%Y-%m-%d') + '\n' }}" + LOOP
    assert run_template(dated).exit_code == 0
    assert first_text(tiny_dir).startswith(f"Current date: {DATE}\n<|im_start|>user")
    assert run_template(dated, data__template_date="2031-01-02").exit_code == 0
    assert first_text(tiny_dir).startswith("Current date: 2031-01-02\n")


def test_a_byte_order_mark_before_a_template_is_not_rendered(run_template, tiny_dir):
    assert run_template("\ufeff" + LOOP).exit_code == 0
    assert first_text(tiny_dir).startswith("<|im_start|>user")
    assert Path("data/tokens/chat_template.jinja").read_text(encoding="utf-8") == LOOP


TOO_LARGE = {
    "a product": "{{ 'a' * 30000000000 }}" + LOOP,
    "a power": "{{ 10 ** (10 ** 10) }}" + LOOP,
    "a filter": "{{ 'a' | center(30000000000) }}" + LOOP,
    "doubling": "{% set s = namespace(x='a') %}{% for _ in range(60) %}{% set s.x = s.x ~ s.x %}{% endfor %}" + LOOP,
}


@pytest.mark.parametrize("source", TOO_LARGE.values(), ids=TOO_LARGE)
def test_a_template_that_fills_the_memory_is_refused_before_it_does(tiny_dir, source):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match="^data.chat_template: the template needs too much memory for a conversation"):
        load_template(source, tiny_dir, {}, "assistant", DATE)
    grown_bytes = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert grown_bytes < 1 << 30
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY or grown_bytes == 0


TOO_LONG = {
    "nested loops": "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3,
    "a search": "{% set n = range(99999)|list %}{% for i in n %}{% for j in n %}{{ 'q' in n }}{% endfor %}{% endfor %}",
    "a filter": "{{ range(9)|slice(10 ** 12)|max }}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
}


@pytest.mark.parametrize("source", TOO_LONG.values(), ids=TOO_LONG)
def test_a_template_that_runs_without_end_is_refused(tiny_dir, source, monkeypatch):
    """Also where it hides what it computes behind a condition that the compiler cannot know."""
    monkeypatch.setattr(compiled_template, "CONVERSATION_SECONDS", 0.1)
    for text in (source, "{% if messages %}" + source + "{% endif %}"):
        with pytest.raises(
            UserError, match="^data.chat_template: the template (runs too long on a conversation|is brok)"
        ):
            load_template(text + LOOP, tiny_dir, {}, "assistant", DATE)
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


class _Slow:
    """An object whose destructor runs until a signal ends it."""

    def __del__(self):
        while True:
            pass


def test_a_limit_met_in_a_destructor_is_raised_after_it_and_nothing_is_printed(capsys, monkeypatch):
    """Python drops exceptions of destructors, and prints them."""
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)
    with pytest.raises(compiled_template.TooMuchWork), compiled_template.work_limits(seconds=0.1):
        del_me = _Slow()
        del del_me
        while True:
            pass
    assert capsys.readouterr().err == ""
    assert sys.unraisablehook is sys.__unraisablehook__


def test_a_template_is_refused_if_it_computes_large_integers(tiny_dir):
    """One product of integers with millions of digits cannot be interrupted."""
    squares = "{% set s = namespace(x=3) %}{% for _ in range(60) %}{% set s.x = s.x * s.x %}{% endfor %}"
    for source in (squares, "{{ 10 ** 99999 }}", "{{ (2 ** 60000) * (2 ** 60000) }}"):
        with pytest.raises(UserError, match="needs too much memory for"):
            load_template(source + LOOP, tiny_dir, {}, "assistant", DATE)
    assert load_template("{{ 10 ** 1000 * 7 % 5 }}" + LOOP, tiny_dir, {}, "assistant", DATE)


BROKEN = {
    "random": ("{{ messages|random }}", "is broken (line 1: No filter named 'random'"),
    "a number of thousands of digits": ("{{ " + "9" * 5000 + " }}", "is broken (Exceeds the limit"),
    "brackets": ("{{ " + "(" * 100_000 + " }}", "is broken ("),
    "size": ("{# " + "x" * (1 << 20) + " #}", "has 1048"),
    "a mark of ours": ("{{ '\\ufdd2999999\\ufdd3' }}", "writes lone surrogates, or characters U+FDD0 to U+FDD3"),
    "a mark of ours as text": ("\ufdd0", "writes lone surrogates, or characters U+FDD0 to U+FDD3"),
    "a lone surrogate": ("{{ '\\ud800' }}", "writes lone surrogates, or characters"),
}


@pytest.mark.parametrize("source, fault", BROKEN.values(), ids=BROKEN)
def test_a_template_that_cannot_be_used_is_refused_in_one_line(tiny_dir, source, fault):
    with pytest.raises(UserError) as refusal:
        load_template(source + LOOP, tiny_dir, {}, "assistant", DATE)
    message = str(refusal.value)
    assert (
        message.startswith(f"data.chat_template: the template {fault}") and "\n" not in message and len(message) < 800
    )


COMPUTED = ("'%c%d%c' % (64978, 999999, 64979)", "'%c' % 55296", "'%c' % 64976")


@pytest.mark.parametrize("expression", COMPUTED)
def test_a_template_that_computes_our_marks_or_surrogates_is_a_fault_of_the_row(run_template, expression):
    """The encoder looks placeholders up by their number: it ended in an IndexError."""
    source = "{% if 'odd' in messages[0].content %}{{ " + expression + " }}{% endif %}" + LOOP
    message = error(run_template(source, [*ROWS, chat_row("An odd one", "Yes")]))
    assert message.startswith("rows.jsonl:41: the chat template writes lone surrogates, or characters U+FDD0")


ENDLESS = "{% macro f(x) %}{{ f(x) }}{% endmacro %}"


def test_a_template_that_never_ends_is_refused_in_one_line(run_template):
    message = error(run_template(ENDLESS + "{{ f(1) }}" + LOOP))
    assert message.startswith("data.chat_template: the template recurses without end on a conversation of two me")
    message = error(run_template("{% if messages %}" * 200 + LOOP + "{% endif %}" * 200))
    assert message.startswith("data.chat_template: the template nests more than 100 blocks")


def test_a_template_that_is_too_large_for_one_row_names_that_row(run_template, monkeypatch):
    monkeypatch.setattr(tokenize_block, "ROW_SECONDS", 0.2)
    odd = "{% if 'odd' in messages[0].content %}%s{% endif %}" + LOOP
    rows = [*ROWS, chat_row("An odd one", "Yes")]
    for fault, message in (
        ("{{ 'a' * 30000000000 }}", "the chat template needs too much memory for it; correct the template, or remove"),
        (ENDLESS + "{{ f(1) }}", "the chat template recurses without end on it; correct the template, or remove"),
        ("{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3, "the chat template runs too long on it; correct the"),
    ):
        assert error(run_template(odd.replace("%s", fault), rows)).startswith(f"rows.jsonl:41: {message}")


MARKED = LOOP.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}")
ASSISTANT_MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and CONDITION %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n"
    "{% endfor %}"
)
SYSTEM_MARKED = LOOP.replace(
    "{{ m.content }}",
    "{% if m.role == 'user' %}{{ m.content }}{% else %}{% generation %}{{ m.content }}{% endgeneration %}{% endif %}",
)
WRONG = {
    "marks around every role": (MARKED, "has generation marks around the text of user messages, which would be tr"),
    "marks around the system": (SYSTEM_MARKED, "has generation marks around the text of system messages, which would"),
    "no prompts": (
        "{% for m in messages if m.role == 'assistant' %}{{ m.content }}<|im_end|>{% endfor %}",
        "does not show the text of user messages, so it would be lost; let it show each message, or name another",
    ),
    "marks around the last answer": (ASSISTANT_MARKED.replace("CONDITION", "loop.last"), "has generation marks, b"),
    "marks inside marks": (
        MARKED.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}"),
        "cannot be used: the chat template puts a generation block inside another",
    ),
}


@pytest.mark.parametrize("source, fault", WRONG.values(), ids=WRONG)
def test_a_template_that_omits_or_trains_the_wrong_text_is_refused(tiny_dir, source, fault):
    with pytest.raises(UserError, match=f"^data.chat_template: the template {re.escape(fault)}"):
        load_template(source, tiny_dir, {}, "assistant", DATE)


def test_marks_that_leave_out_a_turn_of_one_row_are_that_rows_fault(tiny_dir):
    source = ASSISTANT_MARKED.replace("CONDITION", "(loop.last or messages[0].content != 'Q')")
    template = load_template(source, tiny_dir, {}, "assistant", DATE)
    assert answers(template, chat("P", "A", "R", "B")) == ["A<|im_end|>", "B<|im_end|>"]
    with pytest.raises(RowFault, match="marks 1 of the row's 2 assistant turns"):
        template.render(chat("Q", "A", "R", "B"))


def test_marks_around_the_last_answer_serve_where_that_alone_is_trained(tiny_dir):
    source = ASSISTANT_MARKED.replace("CONDITION", "loop.last") + ASK
    template = load_template(source, tiny_dir, {}, "last_assistant", DATE)
    assert answers(template, chat("Q", "A", "R", "B")) == ["B<|im_end|>"]
    assert load_template(MARKED, tiny_dir, {}, "all", DATE).method == "all"


# As Qwen3's and gpt-oss' do: reasoning is shown of the last message alone.
REASONING = LOOP.replace(
    "{{ m.content }}", "{% if m.FIELD and loop.last %}<think>{{ m.FIELD | trim }}</think>{% endif %}{{ m.content }}"
)


def answers(template: ChatTemplate, conversation: Conversation) -> list[str]:
    return trained(template.render(conversation))


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_trained_where_the_template_shows_it(tiny_dir, field):
    template = load_template(REASONING.replace("FIELD", field), tiny_dir, {}, "assistant", DATE)
    assert answers(template, chat("Q", "A", **{field: " Hm.\n"})) == ["<think>Hm.</think>A<|im_end|>"]
    assert answers(template, chat("Q", "", **{field: "Hm."})) == ["<think>Hm.</think><|im_end|>"]
    assert answers(template, chat("Q", "A", **{field: ""})) == ["A<|im_end|>"]


@pytest.mark.parametrize(
    "source, field, remedy",
    [
        *((LOOP, field, "write it into 'content', or") for field in ("reasoning", "thinking", "channel", "refusal")),
        (REASONING.replace("FIELD", "thinking"), "reasoning_content", "rename it 'thinking', which it shows, or"),
    ],
)
def test_a_key_that_the_template_does_not_show_is_a_fault_of_the_row(tiny_dir, source, field, remedy):
    template = load_template(source, tiny_dir, {}, "assistant", DATE)
    for answer in ("A", ""):
        with pytest.raises(RowFault, match=f"does not show '{field}', which the row has; .*, {remedy}"):
            template.render(chat("Q", answer, **{field: "analysis"}))
    assert answers(template, chat("Q", "A", **{field: " "})) == ["A<|im_end|>"]


def test_reasoning_of_earlier_answers_is_counted_and_of_the_last_refused(run_template):
    """As with Qwen3: earlier answers are trained without reasoning, with a note for the user."""
    reasoning = REASONING.replace("FIELD", "thinking")
    rows = [*ROWS, {"messages": chat("Q", "A", "R", "B", thinking="Hm.").messages}]
    result = run_template(reasoning, rows)
    assert "note: 1 of 41 rows (2.4 %) have earlier answers whose reasoning the chat template omits" in result.stderr
    assert "(first at rows.jsonl:41), so they are trained without it; data.train_on=last_assistant" in result.stderr
    assert "reasoning" not in run_template(reasoning, rows, data__train_on="last_assistant").stderr
    # DeepSeek R1's distilled models' way.
    drops = LOOP.replace("m.content", "m.content.split('</think>')[-1]")
    rows = [*ROWS, chat_row("Q", "<think>Hm.</think>A")]
    assert error(run_template(drops, rows)).startswith(
        "rows.jsonl:41: the chat template does not show the reasoning of the last"
    )


def test_an_answer_of_which_nothing_is_shown_counts_as_empty(run_template):
    """The trained text decides, not the keys of the row."""
    silent = [
        {"messages": chat("Q", "", "R", "B", thinking="Hm.").messages},  # reasoning alone, and not in the last answer
        {"messages": chat("Q", " ", id="a1").messages},
    ]
    assert run_template(REASONING.replace("FIELD", "thinking"), [*ROWS, *silent]).exit_code == 0
    figures = read_json(Path("data/tokens/figures.json"))
    assert (figures["empty_answer_rows"], figures["bad_rows"]) == (2, 0)
    assert figures["train_rows"] + figures["heldout_rows"] == 40
    listed = [json.loads(line) for line in Path("data/tokens/rejects.jsonl").read_text().splitlines()]
    assert [one["reason"] for one in listed] == ["turn 2 is empty: the chat template shows nothing of it"] * 2


def test_the_template_that_was_trained_with_is_there_for_the_tuned_model(run_template):
    """The tokenizer's template is pinned with the tokenizer."""
    published = Path("data/tokens/chat_template.jinja")
    for choice, expected in (("mine.jinja", LOOP), ("chatml", read_bundled("chatml")), ("tokenizer", None)):
        assert run_template(LOOP, data__chat_template=choice).exit_code == 0
        assert (published.read_text() if published.exists() else None) == expected
