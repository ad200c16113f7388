"""A fixture that runs the stages pin_data and tokenize in a temporary directory."""

from pathlib import Path

import pytest

from stages.pin import main as pin
from stages.tokenize import main as tokenize
from tests.workspace import invoke, lay_out

MODEL_LOCKS = ("locks/model.json", "locks/tokenizer.json")


@pytest.fixture(scope="session")
def model_locks(tmp_path_factory) -> dict[str, bytes]:
    """The locks of the tiny model, pinned once for all tests."""
    directory = lay_out(tmp_path_factory.mktemp("model"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        assert invoke(pin, "model").exit_code == 0
    return {name: (directory / name).read_bytes() for name in MODEL_LOCKS}


@pytest.fixture
def run(tmp_path, monkeypatch, model_locks):
    """A function that pins a source, tokenizes it, and returns the first failed result, or the last."""
    monkeypatch.chdir(tmp_path)

    def pin_and_tokenize(source, *arguments, **values):
        # `auto` would compare the engines for longer than these tests take.
        values = {"run__tokenizer_engine": "tokenizers", "run__data_workers": 1} | values
        given = source if isinstance(source, list) else str(source)
        lay_out(tmp_path, **{"data__source": given, "data__heldout_fraction": 0.2} | values)
        Path("locks").mkdir(exist_ok=True)
        if "model__name" in values:
            results = [invoke(pin, what) for what in ("data", "model")]
        else:
            for name, content in model_locks.items():
                Path(name).write_bytes(content)
            results = [invoke(pin, "data")]
        return next((one for one in results if one.exit_code), None) or invoke(tokenize, *arguments)

    return pin_and_tokenize
