"""examples/finetune_t4.ipynb, run from an empty directory on the CPU with the shipped tiny model."""

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.processes import run_bounded

NOTEBOOK = ROOT / "examples/finetune_t4.ipynb"


def cells(notebook: Path) -> list[dict[str, Any]]:
    """The cells with code."""
    content = json.loads(notebook.read_text(encoding="utf-8"))
    return [cell for cell in content["cells"] if cell["cell_type"] == "code"]


def output_of(notebook: Path, source: str) -> str:
    """What the cell whose source contains a text printed and showed, without terminal colours."""
    (cell,) = (cell for cell in cells(notebook) if source in "".join(cell["source"]))
    texts = ["".join(out.get("text", out.get("data", {}).get("text/html", ""))) for out in cell["outputs"]]
    return re.sub(r"\x1b\[[0-9;]*m", "", "".join(texts))


def test_the_committed_notebook_has_no_outputs_and_one_cell_of_parameters():
    """Outputs of somebody's machine, which a reader takes for those of the card."""
    code = cells(NOTEBOOK)
    assert [cell["outputs"] for cell in code] == [[]] * len(code)
    assert {cell["execution_count"] for cell in code} == {None}
    assert [cell["metadata"].get("tags") for cell in code].count(["parameters"]) == 1


@pytest.mark.slow
def test_the_notebook_trains_answers_and_compares(tmp_path: Path):
    """A command of the notebook that fails: a line with `!` that does is silent."""
    pytest.importorskip("ipykernel")
    done = tmp_path / NOTEBOOK.name
    shutil.copy(NOTEBOOK, done)
    (tmp_path / "gitconfig").touch()
    environment = {
        **os.environ,
        "MODEL": "tiny",
        "GPU": "auto",
        "EPOCHS": "1",
        "PACKAGE": "lean-finetune",  # Installed already: pip checks that all it needs is there.
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "GIT_CONFIG_GLOBAL": str(tmp_path / "gitconfig"),
        "IPYTHONDIR": str(tmp_path / "ipython"),
    }
    run_bounded(["jupyter-execute", "--inplace", done], cwd=tmp_path, env=environment, check=True)
    everything = "".join(output_of(done, "".join(cell["source"])) for cell in cells(done))
    assert not re.search(r"^(error|ERROR|fatal|Traceback)", everything, re.MULTILINE), everything
    assert "48 rows" in output_of(done, "FACTS")
    assert "params.yaml: written" in output_of(done, "lean-finetune plan")
    assert (tmp_path / "ferry/data/tuned/adapter_model.safetensors").is_file()
    assert "srcdoc" in output_of(done, "srcdoc")
    assert output_of(done, "lean-finetune generate").count("→") == 3
    table = output_of(done, "dvc exp show")
    assert "recompute" in table and "grad_ckpt" in table
