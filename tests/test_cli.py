"""The parameters that `lean-finetune` has outside of a project."""

from ruamel.yaml import YAML

from lean_finetune.config.load import COMMON_PARAMS, load_params
from tests.conftest import ROOT


def test_fit_params_yaml_has_every_key_of_params_yaml():
    """Without a new parameter, the command would refuse its own file."""
    common = YAML(typ="safe").load(COMMON_PARAMS.read_text())
    own = YAML(typ="safe").load((ROOT / "params.yaml").read_text())
    assert [(key, list(value) if isinstance(value, dict) else None) for key, value in common.items()] == [
        (key, list(value) if isinstance(value, dict) else None) for key, value in own.items()
    ]
    assert load_params(COMMON_PARAMS).train.method == "qlora"
