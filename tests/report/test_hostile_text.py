"""Text of strangers in both pages of the report: rows, answers, names of models, files and parameters."""

import json

import pytest
from markdown_it import MarkdownIt
from tokenizers import Tokenizer, models, pre_tokenizers

from cuda_memory.terminal import visible
from lean_finetune.core.atomic_files import write_csv, write_sealed
from lean_finetune.report.compare_experiments import table
from lean_finetune.report.pages import markdown_text
from stages.report import main
from tests.report.browser import look, needs_chromium
from tests.report.conftest import EXPLANATION, GENERATION, GROUP, metrics, seal, write_inputs, write_locks
from tests.workspace import invoke, lay_out

ATTACKS = (
    "<script>top.ran = window.ran = 1</script>",
    '<img src="https://example.org/p.png" onerror="window.ran=1">',
    "</pre></td></table><svg/onload=window.ran=1><iframe src=javascript:ran=1>",
    "![a](https://example.org/p.png)",
    "[a](javascript:ran=1)",
    "\\[a](https://example.org) <https://example.org> &lt;b&gt; `<b>`",
    "a|b\n# c\n```\n<style>*{display:none}</style>",
    "user\u202egnp.exe\u2066",
    "\x1b]0;owned\x07\x1b[2J\x00\x9b31m\r\u2028",
)
HOSTILE = " ".join(ATTACKS)


@pytest.fixture
def hostile(place):
    """The files of a run in which every text that others write is `HOSTILE`."""
    found = metrics()["evaluate"]
    families = {HOSTILE: found["by_family"]["sums"]}
    scores = {HOSTILE: {"version": 1, "base": {HOSTILE: 0.5}, "tuned": {HOSTILE: 0.5}}}
    answers = dict.fromkeys(("family", "prompt", "expected", "base", "tuned"), HOSTILE)
    write_inputs(
        place,
        [{**GENERATION, **answers}],
        evaluate={"by_family": families, "tasks": scores},
        estimate={"gpu": HOSTILE, "not_loaded": HOSTILE, "weights": HOSTILE},
        train={"device": HOSTILE, "growth": {"summary": HOSTILE}},
        tokenize={"format": HOSTILE},
    )
    write_locks(place / "locks", HOSTILE, HOSTILE, HOSTILE, HOSTILE)
    group = {**GROUP, **dict.fromkeys(("operation", "module", "phase", "dtype", "category"), HOSTILE)}
    write_sealed(place / "data/estimate/explanation.json", {**EXPLANATION, "top": [group]})
    write_sealed(place / "data/estimate/verdict.json", {"enforce": True, "refusal": HOSTILE})
    switches = [{"switch": "current", "peak_gib": 0.1}, {"switch": HOSTILE, "peak_gib": 0.2}]
    write_csv(place / "data/estimate/switches.csv", ["switch", "peak_gib"], switches)
    seal(place)
    words = Tokenizer(models.WordLevel({HOSTILE: 0, "a": 1, "b": 2, "c": 3}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(place / "data/tuned/tokenizer.json"))
    lay_out(place, data__source=HOSTILE, model__name=HOSTILE)
    done = invoke(main)
    assert done.exit_code == 0, done.output
    assert done.output == visible(done.output), "the stage prints the model's name"
    return place / "data/report"


@needs_chromium
def test_a_browser_runs_and_loads_nothing_of_it(hostile, tmp_path):
    """A row with a script runs in the browser of whoever opens the report. `look` fails on any request."""
    page = (hostile / "report.html").read_text()
    seen = "[typeof page.ran, typeof window.ran, $$('script, img, iframe, object, embed, [onload], [onerror]').length, "
    seen += "$$('style').length, $$('h2').length, page.document.body.innerText]"
    ran, ran_outside, elements, styles, headings, text = look(page, seen, tmp_path / "profile", width=1000)
    assert (ran, ran_outside, elements, styles, headings) == ("undefined", "undefined", 0, 1, 5)
    for attack in ATTACKS[:3]:
        assert text.count(attack) >= 10, "shown as it is"
    assert not set("\u202e\u2066\x1b\x9b\u2028") & set(page)


def test_markdown_shows_it_as_text(hostile):
    """Viewers of report.md load images and run HTML; a terminal obeys control characters."""
    text = (hostile / "report.md").read_text(encoding="utf-8")
    assert all(character.isprintable() or character == "\n" for character in text)
    tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(text)
    inline = [child for token in tokens for child in token.children or ()]
    assert {token.type for token in tokens}.isdisjoint({"html_block", "fence"})
    # Emphasis stays, so that a terminal shows `model.layers.*.mlp`.
    harmless = {"text", "softbreak", *(f"{name}_{end}" for name in ("strong", "em") for end in ("open", "close"))}
    assert {child.type for child in inline} <= harmless
    assert "".join(child.content for child in inline).count(ATTACKS[3]) >= 10
    assert [token.tag for token in tokens if token.type == "heading_open"].count("h1") == 1
    assert len({line.count(" | ") for line in text.splitlines() if line.startswith("| model ")}) == 1


@pytest.mark.parametrize("attack", ATTACKS)
def test_escaped_text_reads_as_the_text(attack):
    shown = MarkdownIt("commonmark", {"html": True}).enable("table").parse(f"x {markdown_text(attack)}")
    assert "".join(child.content for child in shown[1].children or ()) == f"x {visible(' '.join(attack.split()))}"


def test_letters_of_all_scripts_stay():
    text = "naïve 中文　日本 עברית\u200f العربية 👩‍💻 \ue000\n\tend"
    assert visible(text) == text
    assert visible("\ud800") == "\\ud800", "a lone surrogate cannot be written as UTF-8"


def test_a_table_of_experiments_is_one_line_a_row():
    text = table([{"Experiment": "baseline", "data.source": "a"}, {"Experiment": "x\x1b[2J", "data.source": "b\nc"}])
    assert len(text.splitlines()) == 3 and "x\\x1b[2J" in text and "b\\nc" in text


def test_the_pages_have_the_same_results(hostile):
    """Escaping must not lose a result."""
    assert json.loads((hostile / "figures.json").read_text())["heldout_loss_change"] == -1.25
