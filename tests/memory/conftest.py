"""Fixtures of tests of predictions."""

import pytest

from lean_finetune.memory.predict import kinds_of_layers, known_steps, peak


@pytest.fixture(autouse=True)
def traced_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no test find the traces of another one, or of its own code before it was changed."""
    monkeypatch.setattr(peak, "_complete", {})
    monkeypatch.setattr(peak, "_not_linear", {})
    monkeypatch.setattr(kinds_of_layers, "_differ", set())
    monkeypatch.setattr(known_steps, "_traced", type(known_steps._traced)())
