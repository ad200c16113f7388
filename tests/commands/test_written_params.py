"""What commands write into params.yaml: no line more than changes, and nothing outside of the directory."""

import shutil
from pathlib import Path

import pytest

from lean_finetune.commands.choose.plan import plan
from lean_finetune.commands.fit import fit
from lean_finetune.commands.import_config import import_config
from lean_finetune.commands.project.params_file import change_params
from lean_finetune.config.load import load_params
from lean_finetune.core.errors import UserError
from tests.conftest import ROOT
from tests.workspace import error, invoke


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with params.yaml."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "params.yaml", tmp_path)
    return tmp_path


def test_a_change_is_in_its_lines_and_no_other(checkout: Path):
    """A rewritten file would lose the comments, or show hundreds of changed lines in git."""
    file = checkout / "params.yaml"
    before = file.read_text().splitlines()
    values = {"train": {"method": "lora", "max_grad_norm": None, "lora": {"rank": 8}}, "data": {"max_length": 512}}
    assert [*change_params(values, file, file)] == ["train.method", "train.max_grad_norm", "train.lora.rank"]
    after = file.read_text().splitlines()
    changed = [line.strip() for line, old in zip(after, before, strict=True) if line != old]
    assert sorted(changed) == ["max_grad_norm:", "method: lora", "rank: 8"]
    assert load_params(file).train.lora.rank == 8 and change_params(values, file, file) == {}


@pytest.mark.parametrize(
    ("values", "begins"),
    [
        ({"data": {"max_length": 2**14}}, "bucket.max_tokens: "),
        ({"train": {"learning_rate": 1}}, "train.learning_rate"),
    ],
)
def test_nothing_is_written_if_the_parameters_would_be_wrong(checkout: Path, values, begins: str):
    file = checkout / "params.yaml"
    before = file.read_bytes()
    with pytest.raises(UserError, match=f"^{begins}"):
        change_params(values, file, file)
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (import_config, ("run.yaml",)),
        (plan, ("--length", "64")),
        (fit, ("--length", "64", "--apply")),
    ],
)
def test_nothing_is_written_through_a_link_out_of_the_directory(checkout: Path, tmp_path_factory, command, words):
    """A command changed a params.yaml of another project."""
    outside = tmp_path_factory.mktemp("other") / "params.yaml"
    (checkout / "params.yaml").rename(outside)
    (checkout / "params.yaml").symlink_to(outside)
    (checkout / "run.yaml").write_text("model_name_or_path: org/model\nstage: sft\ntemplate: qwen\nlora_target: all\n")
    before = outside.read_text()
    line = error(invoke(command, *words))
    assert line.startswith(f"params.yaml: a link leads to {outside}, outside of this directory")
    assert outside.read_text() == before and (checkout / "params.yaml").is_symlink()
