"""Each kind of rows is in all lists of islands that need it. One that is missing would be noticed at a stage's end."""

import lean_finetune.islands.columns  # noqa: F401 - registers the formats of rows
from lean_finetune.config.other_tools import of_objectives
from lean_finetune.data.format.format_base import RATINGS, formats_of
from lean_finetune.islands.heldout import HELDOUT
from lean_finetune.islands.objectives.registry import KINDS, LOSS_PARAMETERS, OBJECTIVES


def test_every_kind_of_rows_has_formats_ratings_and_held_out_answers():
    assert HELDOUT.keys() == KINDS.keys()
    assert {kind.name for kind in KINDS.values() if kind.labels} == RATINGS.keys()
    assert all(formats_of(kind) for kind in KINDS.values())


def test_every_parameter_and_name_of_an_objective_is_one_that_objectives_declare():
    """A usual value without a key in the schema is an AttributeError when a run starts."""
    assert {name for one in OBJECTIVES.values() for name in one.defaults} == LOSS_PARAMETERS.keys()
    assert of_objectives().keys() == {name for name, one in OBJECTIVES.items() if one.compares}
