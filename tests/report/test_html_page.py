"""report.html in a browser: complete without network, readable on a phone, escaped; its command gives the run."""

import json
import shlex
from pathlib import Path

import pytest
from dvc.utils.hydra import apply_overrides
from ruamel.yaml import YAML

from cuda_memory.page.charts import TEXT, Bar, Line, bar_chart, line_chart
from lean_finetune.report import pages
from lean_finetune.report.charts import CATEGORY_COLORS
from stages.report import main
from tests.report.browser import look, needs_chromium
from tests.report.conftest import GENERATION, GPU, PAIR, curves, seal, write_inputs, write_pairs
from tests.workspace import invoke, lay_out


def written(place: Path) -> str:
    """The page."""
    done = invoke(main)
    assert done.exit_code == 0, done.output
    return (place / "data/report/report.html").read_text()


@needs_chromium
def test_a_browser_asks_for_nothing_else_and_shows_all_on_a_phone(place, tmp_path):
    """A font or script from elsewhere: a page that is broken offline. A wide chart: scrolling in two directions."""
    write_inputs(place, [{**GENERATION, "tuned": "x" * 3000}], estimate={**GPU, "capacity_gib": 0.13, "fits": False})
    page, seen = written(place), "[page.innerWidth, page.getComputedStyle(page.document.body).backgroundColor, "
    seen += "page.document.documentElement.scrollWidth, $$('svg .capacity').length, "
    seen += "...$$('svg.bars, svg.plot').map(svg => svg.clientWidth)]"
    backgrounds = set()
    for width, dark in ((400, False), (1400, True)):
        inner_width, background, scroll_width, capacities, *charts = look(
            page, seen, tmp_path / "profile", width=width, dark=dark
        )
        assert inner_width == width >= scroll_width and capacities == 5
        assert len(charts) == 5 and min(charts) > 250
        backgrounds.add(background)
    assert len(backgrounds) == 2


@needs_chromium
def test_a_browser_shows_pairs_within_the_page(place, tmp_path):
    """A long prompt makes the page, not the table, scroll sideways; text of a pair is markup."""
    write_pairs(place, [{**PAIR, "chosen": "y" * 900}, {**PAIR, "became_right": False}])
    seen = "[page.document.documentElement.scrollWidth, $$('svg.plot').length, $$('b').length, "
    seen += "...$$('table.texts td').map(cell => cell.textContent)]"
    scroll_width, plots, bold, *cells = look(written(place), seen, tmp_path / "profile", width=400)
    assert scroll_width <= 400 and plots == 5 and bold == 0
    assert len(cells) == 12 and cells[2] == "<b>None</b>" and cells[3:6] == ["0 → 0.75", "0 → -0.5", "0 → 1.25"]
    assert len(cells[1]) < 310 and cells[0] == "<|im_start|>user\nBest | city?<|im_end|>"


def test_the_page_has_the_results(place):
    text = written(place)
    for shown in (
        "<strong>Fits</strong>",
        "0.1172 GiB, measured 0.1221 GiB",
        "Capacity of cpu (too large for this scale): 15.5 GiB",
        "2.5000 → 1.2500",
        'class="strong">this run</text>',
        "saves 37.89 MiB",
        "dvc exp run \\\n  -S seed=17",
        "<td>34cd</td>",
        "✗ wrong",
    ):
        assert shown in text, shown
    assert text.index("grad_ckpt=true") < text.index("this run</text>"), "what saves most comes first"


def test_trained_text_is_marked_and_all_text_is_escaped(place):
    """An answer or a row with HTML changes the page, or runs in the browser of whoever opens it."""
    write_inputs(place, [{**GENERATION, "base": "<script>alert(1)</script>", "family": "<i>"}])
    text = written(place)
    assert "Ask: &lt;b&gt;2+2&lt;/b&gt;<mark> It is&amp;</mark>" in text
    assert "<script" not in text and "<i>" not in text and "&lt;script&gt;alert(1)" in text


def test_pages_of_odd_runs_can_be_written(place):
    """No held-out rows, one step, nothing measured: the last stage fails after hours of training."""
    names = (f"{model}_{name}" for model in ("base", "tuned") for name in ("loss", "perplexity", "exact_match_percent"))
    counts = {"evaluated_rows": 0, "generated_rows": 0, "compared_rows": 0, "by_length": {}, "by_family": {}}
    nothing: dict = {"peak_bytes_measured": None, "measured_by_phase": {}, "peak_measured_how": None}
    write_inputs(place, [], evaluate={**dict.fromkeys(names), **counts}, train=nothing)
    header, first, *_ = (place / "data/train/curves.csv").read_text().splitlines(keepends=True)
    (place / "data/train/curves.csv").write_text(header + first.replace(str(curves()[0]["allocated_bytes"]), ""))
    seal(place)
    page, text = written(place), (place / "data/report/report.md").read_text()
    assert "not measured on cpu" in page and "None" not in page and "nan" not in page
    assert text.count("no rows are held out (data.heldout_fraction is 0)") == 3
    figures = json.loads((place / "data/report/figures.json").read_text())
    assert figures["heldout_loss_change"] is None and figures["exact_match_change_points"] is None


def test_the_command_sets_all_parameters(place, tmp_path):
    """A value that the grammar of -S reads as something else: another run than the one reported."""
    odd = {"data__source": "my rows, 'new'=1.jsonl", "train__lora__targets": ["q_proj", "v_proj"]}
    lay_out(place, **odd)
    command = written(place).partition('<pre class="command">')[2].partition("</pre>")[0]
    flags = shlex.split(command.replace("&#39;", "'").replace("&#34;", '"').replace("\\\n", ""))[4::2]
    again = tmp_path / "again/params.yaml"
    again.parent.mkdir()
    read = YAML(typ="safe")
    expected = {key: value for key, value in read.load((place / "params.yaml").read_text()).items() if key != "run"}
    read.dump({section: {} if isinstance(value, dict) else None for section, value in expected.items()}, again)
    apply_overrides(again, [f"++{flag}" for flag in flags])
    assert read.load(again.read_text()) == expected


@pytest.mark.parametrize("value", ["a b", {"a": [1, None]}, [True, "x,y"], 1e-05, "it's"])
def test_values_in_the_grammar_of_overrides(value, tmp_path):
    path = tmp_path / "params.yaml"
    path.write_text("key: null\n")
    apply_overrides(path, [f"++key={pages.override(value)}"])
    assert YAML(typ="safe").load(path.read_text())["key"] == value


def test_charts_draw_to_scale():
    bars = [Bar(label="a", text="", segments=[("x", "red", 1.0), ("y", "blue", 3.0)], thin=("m", "black", 2.0))]
    svg = bar_chart(bars, title="t", capacity=5.0)
    assert 'x="20.00%" y="19" width="60.00%"' in svg and 'x="0.00%" y="33" width="40.00%"' in svg
    long = Line(name="l", color="red", points=[(float(k), 7.0 if k == 777 else 0.0) for k in range(100_000)])
    svg = line_chart([long], title="t", x_label="x")
    assert len(svg) < 10_000 and svg.count("125") >= 1, "a maximum of a long curve is not dropped"


def test_each_colour_has_one_meaning():
    assert len(set(CATEGORY_COLORS.values())) == len(CATEGORY_COLORS) and TEXT not in CATEGORY_COLORS.values()
