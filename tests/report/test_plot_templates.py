"""The Vega templates of `dvc plots`: they draw what is in the files and skip what was not measured."""

import csv
import io
import json
import re
import shutil

import pytest
from dvc_render.html import render_html
from dvc_render.vega import VegaRenderer
from ruamel.yaml import YAML

from cuda_memory.page.charts import SERIES_COLORS
from cuda_memory.units import GIB, reading_unit
from lean_finetune.report.charts import CATEGORY_COLORS
from lean_finetune.report.pages import plots_with_data, write_template
from tests.conftest import ROOT
from tests.report.browser import look, needs_chromium

TEMPLATES = sorted(path.stem for path in (ROOT / ".dvc/plots").glob("*.json"))

CURVES = "step,loss,heldout_loss\n0,3.0,\n1,2.5,2.75\n"


def renderer(name: str, text: str, **properties) -> VegaRenderer:
    """A template with a CSV's records, as `dvc plots show` draws it."""
    datapoints = [{**record, "rev": "workspace"} for record in csv.DictReader(io.StringIO(text))]
    return VegaRenderer(
        datapoints, name, template=name, template_dir=str(ROOT / ".dvc/plots"), title=name, **properties
    )


def filled(name: str, text: str, **properties) -> dict:
    """A filled template."""
    return renderer(name, text, **properties).get_filled_template()


@pytest.mark.parametrize("name", TEMPLATES)
def test_no_anchor_is_left_unfilled(name):
    """An anchor that DVC does not know stays in the page as text, and the plot is empty."""
    assert "<DVC_METRIC" not in json.dumps(filled(name, CURVES, x="step", y="loss"))


def test_every_template_is_used_and_every_named_one_exists():
    plots = YAML(typ="safe").load((ROOT / "dvc.yaml").read_text())["plots"]
    used = {spec["template"] for plot in plots for spec in plot.values() if "template" in spec}
    assert set(TEMPLATES) <= used


def test_only_plots_with_data_are_drawn(tmp_path):
    """An empty plot of reserved memory after a run on a CPU, or of rewards without pairs."""
    shutil.copy(ROOT / "dvc.yaml", tmp_path)
    names = [name for plot in YAML(typ="safe").load((ROOT / "dvc.yaml").read_text())["plots"] for name in plot]
    assert list(plots_with_data(tmp_path)) == []
    for file in ("train/curves.csv", "report/memory.csv", "estimate/timeline.csv", "estimate/switches.csv"):
        (tmp_path / "data" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / file).touch()
    assert list(plots_with_data(tmp_path)) == [
        name for name in names if name not in ("accuracy", "margin", "reserved", "lengths")
    ]


@pytest.mark.parametrize("name", ["loss", "memory", "watched"])
def test_empty_cells_are_filtered_out(name):
    """Vega draws an empty cell as zero: held-out loss would fall to zero between its measurements."""
    spec = filled(name, CURVES, x="step", y="heldout_loss")
    assert "datum['heldout_loss'] !== ''" in json.dumps(spec)


@pytest.mark.parametrize("column", ["loss", "reward_accuracy", "reward_margin"])
def test_held_out_figures_are_a_line_of_their_own(column):
    """Joined to the figures of training, the line would zigzag between both."""
    curves = f"step,{column},heldout_{column}\n0,3.0,\n1,2.5,2.75\n"
    training, heldout = filled("loss", curves, x="step", y=f"heldout_{column}")["layer"]
    assert training["transform"] == [{"filter": "!test(/^heldout_/, datum.field)"}]
    assert heldout["transform"] == [{"filter": "test(/^heldout_/, datum.field)"}] and heldout["mark"]["strokeWidth"] > 1


def test_memory_starts_at_zero():
    """On an axis that does not start at zero, an error of 0.1 % looks large."""
    spec = filled("memory", "step,measured_gib,predicted_gib\n0,1.0,1.1\n", x="step", y="measured_gib")
    assert spec["layer"][0]["encoding"]["y"]["scale"]["zero"] is True
    assert spec["layer"][1]["encoding"]["y"]["field"] == "predicted"


def test_the_prediction_is_a_line_of_its_own():
    """DVC stacks several y columns into one: joined to the measurements, the line would zigzag between both."""
    spec = filled("memory", "step,measured_gib,predicted_gib\n0,1.0,1.1\n", x="step", y="measured_gib")
    assert {"filter": "datum.field !== 'predicted_gib'"} in spec["layer"][0]["transform"]


def test_watched_memory_is_drawn_in_gib():
    """Bytes on an axis labelled GiB."""
    spec = filled("watched", "step,live_bytes\n0,1073741824\n", x="step", y="live_bytes")
    assert {"calculate": "toNumber(datum['live_bytes']) / 1073741824", "as": "gib"} in spec["transform"]


def test_units_and_stacking_are_those_of_the_report():
    """48 MiB as 0.047 GiB; weights on top of activations, where the report has them at the bottom."""
    for name, x, y in (
        ("memory", "step", "measured_gib"),
        ("reserved", "step", "reserved_gib"),
        ("watched", "step", "live_bytes"),
        ("timeline", "event", "weights"),
        ("switches", "peak_gib", "switch"),
    ):
        text = json.dumps(filled(name, f"{x},{y}\n0,1.0\n", x=x, y=y))
        assert "datum.most >= 0.1 ? 'GiB' : 'MiB'" in text and '"field": "unit"' in text, name
    assert reading_unit(round(0.11 * GIB))[1] == "GiB" and reading_unit(round(0.09 * GIB))[1] == "MiB"
    spec = filled("timeline", "event,weights\n0,1.0\n", x="event", y="weights")
    place = next(step["calculate"] for step in spec["transform"] if step.get("as") == "place")
    assert re.findall("'(\\w+)'", place) == [name for name in CATEGORY_COLORS if name != "kv_cache"]
    area = spec["spec"]["layer"][0]["encoding"]
    assert area["order"] == {"field": "place"} and area["y"]["stack"] == "zero"


def test_colours_are_those_of_the_report():
    """Activations in another colour on each page."""
    timeline = filled("timeline", "event,weights\n0,1.0\n", x="event", y="weights")
    scale = timeline["spec"]["layer"][0]["encoding"]["color"]["scale"]
    colors = dict(zip(scale["domain"], scale["range"], strict=True))
    assert colors == {name: color for name, color in CATEGORY_COLORS.items() if name != "kv_cache"}
    watched = filled("watched", "step,live_bytes\n0,1\n", x="step", y="live_bytes")
    scale = watched["spec"]["layer"][0]["encoding"]["color"]["scale"]
    assert scale["range"] == [SERIES_COLORS[name] for name in ("live", "reserved", "process")]


@needs_chromium
@pytest.mark.slow
def test_plots_are_drawn_without_network(tmp_path):
    """`dvc plots show` is a blank page where its scripts cannot be loaded."""
    pytest.importorskip("vl_convert", reason="needs the extra `plots`, which is not installed")
    write_template(tmp_path / "template.html")
    loss, memory = renderer("loss", CURVES, x="step", y="loss"), "step,measured_gib,predicted_gib\n0,1.0,1.1\n"
    plots = [loss, renderer("memory", memory, x="step", y="measured_gib")]
    page = tmp_path / "plots.html"
    render_html(plots, page, html_template=tmp_path / "template.html")
    assert look(page.read_text(), "$$('canvas, svg.marks').length", tmp_path / "profile", width=1200) == 2
