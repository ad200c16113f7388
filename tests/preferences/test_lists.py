"""Each kind of rows is in all lists of islands that need it. One that is missing would be noticed at a stage's end."""

import lean_finetune.islands.columns  # noqa: F401 - registers the formats of rows
from lean_finetune.config.other_tools import of_objectives, tables
from lean_finetune.data.format.format_base import RATINGS, formats_of
from lean_finetune.islands.heldout import HELDOUT
from lean_finetune.islands.objectives.registry import KINDS, LOSS_PARAMETERS, OBJECTIVES
from lean_finetune.memory.tool_step.pair_losses import PAIR_LOSSES


def test_every_kind_of_rows_has_formats_ratings_and_held_out_answers():
    assert HELDOUT.keys() == KINDS.keys()
    assert {kind.name for kind in KINDS.values() if kind.labels} == RATINGS.keys()
    assert all(formats_of(kind) for kind in KINDS.values())


def test_every_parameter_and_name_of_an_objective_is_one_that_objectives_declare():
    """A usual value without a key in the schema is an AttributeError when a run starts."""
    assert {name for one in OBJECTIVES.values() for name in one.defaults} == LOSS_PARAMETERS.keys()
    assert of_objectives().keys() == {name for name, one in OBJECTIVES.items() if one.compares}


def test_losses_of_other_tools_are_described():
    """A name that no trace knows is a KeyError in `fit --from`."""
    found = [one for table in tables() for one in table["objectives"].values() if "loss" in one]
    assert {one["loss"] for one in found} == {*PAIR_LOSSES}
