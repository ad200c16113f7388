"""The list of families and docs/models.md: what the installed transformers has, and what the results say."""

from typing import Any

import pytest
import transformers

from benchmarks.harness import RESULTS
from benchmarks.models.families import outcome
from benchmarks.models.page import PAGE, page_text
from benchmarks.models.planned import planned, planned_cases
from benchmarks.models.published import published_models
from lean_finetune.core.atomic_files import read_json, write_json
from lean_finetune.memory.predict.state_formulas import model_shapes
from lean_finetune.model.model_config import read_config
from tests.conftest import ROOT
from tests.kit.image_models import IMAGE_MODELS, image_models
from tests.kit.tiny_config import family_names

REMEDY = "python -m benchmarks.models families"
PARTS = 16


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Rows of the list by family; skips where another transformers is installed."""
    monkeypatch.chdir(ROOT)
    results = read_json(RESULTS / "families.json")
    made_with = results["versions"]["transformers"]
    if made_with != transformers.__version__:
        pytest.skip(f"the list was made with transformers {made_with}; `{REMEDY} --again all` makes it anew")
    return {row["family"]: row for row in results["rows"]}


def test_every_family_of_transformers_is_listed(listed):
    """A family that transformers added and nobody tried."""
    assert family_names() == [*listed], f"run `{REMEDY}`"
    assert all(row["works"] or row["refused"] for row in listed.values())
    assert all(reason.count("\n") == 0 for row in listed.values() for reason in row["refused"])


@pytest.mark.parametrize("family", ["llama", pytest.param("mamba", marks=pytest.mark.slow), "bart", "blt", "jetmoe"])
def test_a_family_does_what_the_list_says(family, listed):
    """A refusal that came or went unseen."""
    assert outcome(family) == listed[family]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")  # OPT, tested in tests/distributed.
@pytest.mark.parametrize("part", range(PARTS))
def test_every_family_does_what_the_list_says(part, listed):
    """As above, for all: some minutes."""
    differing = {family: row for family in [*listed][part::PARTS] if (row := outcome(family)) != listed[family]}
    assert not differing, f"{differing}; run `{REMEDY} --again FAMILY`"


def test_the_page_shows_the_results(monkeypatch):
    """Tables edited by hand, or older than the results."""
    monkeypatch.chdir(ROOT)
    text = PAGE.read_text(encoding="utf-8")
    assert page_text(text) == text, "run `python -m benchmarks.models`"
    rows = read_json(RESULTS / "published_models.json")["rows"]
    assert {row["model"] for row in rows} == {*published_models()}
    with_image = read_json(RESULTS / "published_images.json")["rows"]
    assert [row["model"] for row in with_image] == [*image_models()]
    published = {model["model"]: model.get("published_parameters") for model in read_json(IMAGE_MODELS)}
    for row in with_image:
        if not row["model"].endswith("†"):  # Of the sizes of transformers' classes.
            assert_published(row["parameters"], published[row["model"]])
    assert len({row["family"] for row in rows if row["qlora"].get("gpu")}) >= 45
    assert [row["options"] for row in read_json(RESULTS / "planned.json")["rows"]] == [*planned_cases()]


def assert_published(parameters: int, published: int | str) -> None:
    """A wrong number in a config. Of some models only billions with a few digits are known, as text."""
    if isinstance(published, str):
        digits = len(published.partition(".")[2])
        assert f"{parameters / 1e9:.{digits}f}" == published
    else:
        assert parameters == published


@pytest.mark.slow
@pytest.mark.parametrize("options", planned_cases())
def test_plan_writes_what_the_page_says(options: str):
    """Switches that are slower than they need to be, or that a change of the predictions made wrong."""
    rows = {row["options"]: row for row in read_json(RESULTS / "planned.json")["rows"]}
    assert planned(options) == rows[options], "run `python -m benchmarks.models planned --again all`"


@pytest.mark.slow
def test_configs_of_models_with_images_have_the_published_parameters(tmp_path):
    for model in (one for one in read_json(IMAGE_MODELS) if not one["model"].endswith("†")):
        write_json(tmp_path / "config.json", model["config"])
        config = read_config(tmp_path, whole=True)
        assert_published(model_shapes(config).values, model["published_parameters"])
