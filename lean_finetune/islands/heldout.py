"""The held-out answers of kinds of rows that objectives compare: one class each, in a package of its own."""

from collections.abc import Mapping

from lean_finetune.objectives.row_kind import RowKind
from lean_finetune.preferences.label_figures import HeldoutLabels
from lean_finetune.preferences.objectives.kto import LABELLED
from lean_finetune.preferences.objectives.pair_objectives import PAIR
from lean_finetune.preferences.pair_figures import HeldoutPairs
from lean_finetune.rows.held_out_answers import HeldoutAnswers

HELDOUT: Mapping[str, type[HeldoutAnswers]] = {
    RowKind.ANSWER.name: HeldoutAnswers,
    PAIR.name: HeldoutPairs,
    LABELLED.name: HeldoutLabels,
}
"""By name of the kind of rows."""
