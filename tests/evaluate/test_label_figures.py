"""Figures of held-out labelled answers, against plain arithmetic."""

import numpy as np
import pytest

from lean_finetune.islands.objectives.registry import OBJECTIVES
from lean_finetune.objectives.objective import AnswerObjective
from lean_finetune.objectives.row_kind import REFERENCE
from lean_finetune.preferences.label_figures import HeldoutLabels, label_metrics
from lean_finetune.preferences.pair_figures import RESULTS
from tests.token_files import Row, heldout

LABELS = np.array([True, False, True, True, False])


def labels_of(tmp_path, better: int = 3, worse: int = 2) -> HeldoutLabels:
    """Rows 0, 2, 4, …, each with its mismatch behind it; of both labels the first ones."""
    rows: list[Row] = [([9] * (6 + n), [3, 6 + n], None) for n in range(2 * len(LABELS))]
    opened = heldout(tmp_path, rows)
    opened.give(REFERENCE, np.linspace(-30, -10, len(rows)).astype(np.float32))
    kto = OBJECTIVES["kto"]
    assert isinstance(kto, AnswerObjective)
    desirable, undesirable = 2 * np.flatnonzero(LABELS)[:better], 2 * np.flatnonzero(~LABELS)[:worse]
    return HeldoutLabels(
        rows=opened, better=desirable, worse=undesirable, objective=kto, values={**kto.defaults, "beta": 0.2}
    )


@pytest.mark.parametrize("divergence", [0.75, -4.0])
def test_figures_are_those_of_kto(tmp_path, divergence):
    """A mismatch taken for an answer, labels that change places, or a divergence below 0."""
    labels = labels_of(tmp_path)
    reference = labels.rows.column(REFERENCE)
    assert reference is not None
    logps = reference + np.array([2.0, divergence, -1.0, divergence, 0.5, divergence, 3.0, divergence, 1.5, divergence])
    losses = {
        name: (-values[labels.better], -values[labels.others])
        for name, values in (("base", reference), ("tuned", logps))
    }
    found = label_metrics(labels, losses)
    changes, threshold = (logps - reference)[::2], max(divergence, 0.0)
    right = np.where(LABELS, changes > threshold, changes < threshold)
    expected = {
        "reward_accuracy": right.mean(),
        "reward_chosen": 0.2 * changes[LABELS].mean(),
        "reward_rejected": 0.2 * changes[~LABELS].mean(),
        "reward_margin": 0.2 * (changes[LABELS].mean() - changes[~LABELS].mean()),
        "logp_chosen": logps[::2][LABELS].mean(),
        "logp_rejected": logps[::2][~LABELS].mean(),
    }
    assert {name: found[f"tuned_{name}"] for name in expected} == pytest.approx(expected, abs=1e-5)
    assert (found["base_reward_accuracy"], found["base_reward_margin"], found["base_reward_chosen"]) == (0.5, 0.0, 0.0)
    assert (found["evaluated_desirable"], found["evaluated_undesirable"]) == (3, 2)
    tokens = labels.rows.supervised[::2]
    assert found["chosen_tokens"] == pytest.approx(tokens[LABELS].mean(), abs=1e-5)
    assert set(RESULTS) <= set(found) and 0 < found["tuned_reward_accuracy"] < 1


def test_figures_of_a_label_that_does_not_occur_are_null(tmp_path):
    labels = labels_of(tmp_path, worse=0)
    losses = np.full(3, 20.0), np.full(3, 20.0)
    found = label_metrics(labels, {"base": losses, "tuned": losses})
    assert found["tuned_reward_rejected"] is found["tuned_reward_margin"] is found["rejected_tokens"] is None
    assert found["tuned_reward_chosen"] is not None
    nothing = label_metrics(labels_of(tmp_path, better=0, worse=0), {"base": losses, "tuned": losses})
    assert {nothing[name] for name in RESULTS} == {None}
