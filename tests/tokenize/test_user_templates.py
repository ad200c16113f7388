"""Templates from elsewhere: the date they write, what they may take, and what they leave out, told in one line."""

import resource
from pathlib import Path

import pytest

from stages.errors import UserError
from stages.pin.__main__ import main as pin
from stages.tokenize.__main__ import main as tokenize
from stages.tokenize.chat import open_template
from tests.tokenize.common import DATE, chat_row, decoder, read_tokens
from tests.workspace import invoke, lay_out, told, write_rows

LOOP = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ROWS = [chat_row(f"Say {n}", f"Well, {n}") for n in range(40)]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A function that pins and tokenizes rows with a template of the user's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DVC_STAGE", raising=False)
    monkeypatch.delenv("DVC_ROOT", raising=False)

    def pin_and_tokenize(source, rows=ROWS, **values):
        (tmp_path / "mine.jinja").write_text(source, encoding="utf-8")
        write_rows(tmp_path / "rows.jsonl", rows)
        values = {"data__source": "rows.jsonl", "data__heldout_fraction": 0.2, "run__data_workers": 1} | values
        lay_out(tmp_path, data__chat_template="mine.jinja", run__tokenizer_engine="tokenizers", **values)
        for what in ("data", "model"):
            pinned = invoke(pin, what)
            assert pinned.exit_code == 0, pinned.output
        return invoke(tokenize)

    return pin_and_tokenize


def first_text(directory: Path) -> str:
    return decoder(directory)(read_tokens(Path("data/tokens/train"))[0]["input_ids"])


def test_a_template_that_writes_todays_date_writes_that_of_data_template_date(run, tiny_dir):
    """As gpt-oss' and Mistral's do, which no other date can be given; tomorrow the tokens are the same."""
    dated = "{{ 'Current date: ' + strftime_now('%Y-%m-%d') + '\n' }}" + LOOP
    assert run(dated).exit_code == 0
    assert first_text(tiny_dir).startswith(f"Current date: {DATE}\n<|im_start|>user")
    assert run(dated, data__template_date="2031-01-02").exit_code == 0
    assert first_text(tiny_dir).startswith("Current date: 2031-01-02\n")


TOO_LARGE = {
    "a product": "{{ 'a' * 30000000000 }}" + LOOP,
    "a list": "{{ ([1] * 9000000000) | length }}" + LOOP,
    "a power": "{{ 10 ** (10 ** 10) }}" + LOOP,
    "a filter": "{{ 'a' | center(30000000000) }}" + LOOP,
    "doubling": "{% set s = namespace(x='a') %}{% for _ in range(60) %}{% set s.x = s.x ~ s.x %}{% endfor %}" + LOOP,
}


@pytest.mark.parametrize("source", TOO_LARGE.values(), ids=TOO_LARGE)
def test_a_template_that_fills_the_memory_is_refused_before_it_does(tiny_dir, source):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match="^data.chat_template: the template needs too much memory for a conversation"):
        open_template(source, tiny_dir, {}, "assistant", DATE)
    grown_bytes = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert grown_bytes < 1 << 30
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY or grown_bytes == 0


ENDLESS = "{% macro f(x) %}{{ f(x) }}{% endmacro %}"


def test_a_template_that_never_ends_is_refused_in_one_line(run):
    message = told(run(ENDLESS + "{{ f(1) }}" + LOOP))
    assert message.startswith("data.chat_template: the template calls itself without end on a conversation of two me")
    message = told(run("{% if messages %}" * 200 + LOOP + "{% endif %}" * 200))
    assert message.startswith("data.chat_template: the template is broken (")


def test_a_template_that_is_too_large_for_one_row_names_that_row(run):
    odd = "{% if 'odd' in messages[0].content %}%s{% endif %}" + LOOP
    rows = [*ROWS, chat_row("An odd one", "Yes")]
    for fault, said in (
        ("{{ 'a' * 30000000000 }}", "the chat template needs too much memory for it; mend the template, or remove"),
        (ENDLESS + "{{ f(1) }}", "nested too deep; make the row flatter (or the chat template calls itself"),
    ):
        assert told(run(odd.replace("%s", fault), rows)).startswith(f"rows.jsonl:41: {said}")
