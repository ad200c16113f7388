"""`fit` runs without PyTorch's compiler, and the compiler is there for code that needs it."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers
from transformers.utils.import_utils import define_import_structure

from lean_finetune.commands import without_compiler
from lean_finetune.commands.without_compiler import importing_without_compiler, modules_of_models
from tests.conftest import ROOT
from tests.processes import run_bounded


def test_names_of_models_are_those_that_transformers_finds():
    """A model that `fit` cannot import."""
    package = Path(transformers.__file__).parent / "models" / "__init__.py"
    assert modules_of_models() == define_import_structure(str(package))


def test_nothing_changes_where_pytorch_is_imported():
    """A training process whose functions are not compiled, or whose garbage stays."""
    compiles = torch.compile
    with importing_without_compiler():
        pass
    assert torch.compile is compiles


def test_the_compiler_loads_when_more_than_its_marks_is_read(tmp_path, monkeypatch):
    """Code of a model that calls the compiler, and finds nothing."""
    package = tmp_path / "made_up_compiler"
    package.mkdir()
    (package / "__init__.py").write_text("from .config import depth\n\ndef disable(): ...\n\nlimits = depth, 8\n")
    (package / "config.py").write_text("depth = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(without_compiler, "COMPILER", package.name)
    spec = find_spec(package.name)
    assert spec is not None
    module = without_compiler._Unloaded(spec)
    monkeypatch.setitem(sys.modules, package.name, module)

    def marked() -> None: ...

    assert module.disable(marked) is marked and module.disable(recursive=False)(marked) is marked
    assert not hasattr(module, "__wrapped__") and module.config.depth == 3
    assert "limits" not in vars(module)
    assert module.limits == (3, 8)
    assert module.disable.__module__ == package.name and not hasattr(module, "graph_break")


FIT = """
import json, sys
from lean_finetune.cli import main
try:
    main(["fit", "--model", sys.argv[1], "--gpu", "T4", "--json", "--length", "64"])
except SystemExit as end:
    import torch
    loaded = [name for name in sys.modules if name in ("torch._inductor.compile_fx", "torch._dynamo.symbolic_convert")]
    torch._dynamo.optimize  # Loads it.
    print(json.dumps([end.code, loaded, torch._dynamo.symbolic_convert is not None]), file=sys.stderr)
"""


@pytest.mark.slow
def test_fit_loads_no_compiler(small_llama):
    """A verdict that takes twice as long."""
    done = run_bounded([sys.executable, "-c", FIT, str(small_llama)], check=True, cwd=ROOT)
    assert json.loads(done.stdout)["verdict"] == "fits"
    assert json.loads(done.stderr.splitlines()[-1]) == [0, [], True]


def test_fit_predicts_the_8_bit_optimizer_of_a_cpu(small_llama, tmp_path):
    """Its update is compiled on a CPU, and loaded the compiler half-way: an ImportError instead of a verdict."""
    options = ["--model", str(small_llama), "--gpu", "auto", "--length", "64", "--set", "train.optimizer=adamw_8bit"]
    done = run_bounded([sys.executable, "-m", "lean_finetune.cli", "fit", *options, "--verdict"], cwd=tmp_path)
    assert done.stdout.startswith("verdict ") and not done.stderr
