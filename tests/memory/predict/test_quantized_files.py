"""Runs from files that are quantised already: predicted as counted, in the step and while loading."""

from pathlib import Path
from typing import Any

import pytest

from lean_finetune.memory.predict.peak import predict
from lean_finetune.memory.predict.traced_step import TracedModel
from lean_finetune.model.model_config import read_config
from tests.memory.common import CPU_TARGET, setting_of
from tests.memory.predict.test_measured import PADDED_STEPS, check
from tests.memory.predict.test_other_phases import check_load
from tests.model.quantized import NF4, save_bitsandbytes, save_fp8, save_fp8_experts, save_mxfp4

PACKED: dict[str, Any] = {"method": "qlora", "quant_double": False}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("mxfp4", {"method": "full"}),
    ("mxfp4", {"method": "qlora"}),
    ("fp8", {"method": "int8_lora"}),
    ("part of nf4", PACKED),
]
UNPACKED = ("mxfp4", "fp8", "fp8 experts")
METHODS = ("full", "lora", "qlora", "int8_lora")
SLOW = [("nf4", PACKED), *((name, {"method": method}) for name in UNPACKED for method in METHODS)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Path] = {}

    def save(name: str) -> Path:
        if name not in made:
            directory = tmp_path_factory.mktemp("quantised")
            skip = ["lm_head", "mlp.down_proj"] if name == "part of nf4" else None
            made[name] = {
                "mxfp4": lambda: save_mxfp4(directory),
                "fp8": lambda: save_fp8(directory),
                "fp8 experts": lambda: save_fp8_experts(directory),
            }.get(name, lambda: save_bitsandbytes(directory, **NF4, llm_int8_skip_modules=skip))()
        return made[name]

    return save


SLOW_CASES = [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW if case not in CASES]


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "changes"), [*CASES, *SLOW_CASES])
def test_loading_takes_what_is_predicted(name: str, changes: dict[str, Any], precision: Any, saved: Any):
    """Unpacked weights that are not predicted, or packed ones predicted as if they were packed while loading."""
    check_load(saved(name), setting_of(**changes, precision=precision))


@pytest.mark.parametrize(("name", "changes"), [*CASES, *SLOW_CASES])
def test_the_step_takes_what_is_predicted(name: str, changes: dict[str, Any], saved: Any):
    """Layers that a publisher left in 16 bits predicted as packed."""
    check(saved(name), setting_of(**changes, precision="bf16"))


def test_layers_left_in_16_bits_count(saved: Any):
    """The prediction of a file whose layers are not all packed, equal to that of one where all are."""
    setting = setting_of(**PACKED)
    configs = [read_config(saved(name)) for name in ("nf4", "part of nf4")]
    all_packed, part = (
        predict(TracedModel(config, setting, CPU_TARGET), PADDED_STEPS).peak.bytes for config in configs
    )
    assert all_packed < part
