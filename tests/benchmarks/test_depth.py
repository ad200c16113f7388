"""Deep models predicted from a few layers, against PyTorch's own count with all of them."""

import pytest

from benchmarks.models.depth import compared, depth_cases
from tests.memory.conftest import traced_anew

__all__ = ["traced_anew"]  # A fixture.


@pytest.mark.slow
@pytest.mark.parametrize("name", depth_cases())
def test_a_deep_model_is_predicted_as_it_is_counted(name):
    """A peak that grows otherwise than the traced layers say."""
    row = compared(name)
    assert row["worst_phase_percent"] < 0.1, row
    assert "12 layers" in name or row["layers_traced"].startswith("models of "), row
