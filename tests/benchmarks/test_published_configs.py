"""Configurations of other tools with measured memory: each is predicted as `fit --from` predicts the same file."""

from dataclasses import replace

import pytest

from benchmarks.published_configs import published_configs
from lean_finetune.core.errors import UserError

ROWS = {row.id: row for row in published_configs()}


def test_a_configuration_is_predicted_near_its_measured_memory():
    """The 3B of torchtune with chunked loss, checkpointing and the update in backward: 23.1 GiB."""
    row = ROWS["tt3b-bwd"]
    assert row.predict().peak.bytes == pytest.approx(row.measured_bytes, rel=0.01)


def test_a_configuration_that_is_not_known_says_why():
    """It must not become a prediction of another step."""
    row = ROWS["tt3b-bwd"]
    unknown = {**row.settings, "loss": {"_component_": "my.Loss"}}
    with pytest.raises(UserError, match=r"my\.Loss|not described|not known"):
        replace(row, settings=unknown).predict()
