"""DeepSpeed's ZeRO as other tools use it: what its configuration says, and the bytes that follow."""

import json
from pathlib import Path
from typing import Any

import pytest

from lean_finetune.core.errors import UserError
from lean_finetune.memory.tool_step.deepspeed import Zero, read_deepspeed, zero_of
from lean_finetune.memory.tool_step.sharing import Sharing, under_fsdp1
from lean_finetune.memory.tool_step.tool_step import ToolStep
from lean_finetune.memory.tool_step.trace_tool import ToolRun, predict_tool
from tests.kit.specs import train_of
from tests.memory.common import gpu_target, llama

CONFIG = llama(num_hidden_layers=6, hidden_size=256, vocab_size=4096, dtype="bfloat16")
GPUS = 4


def zero(stage: int, **content: Any) -> Zero:
    small = {"reduce_bucket_size": 1000, "stage3_max_live_parameters": 1000}
    given = {"zero_optimization": {"stage": stage, **small, **content}}
    found = zero_of(given, GPUS, CONFIG, train_of("full", grad_ckpt=True))
    assert isinstance(found, Zero), found
    return found


def peaks(found: Zero) -> dict[str, int]:
    sharing = Sharing(kind="zero", gpus=GPUS, zero=found)
    train = train_of("full", grad_ckpt=True, optimizer="adamw")
    run = ToolRun(
        step=under_fsdp1(ToolStep(tool="Trainer", loss="liger"), train, sharing),
        config=CONFIG,
        train=train,
        target=gpu_target("A100-80GB"),
        rows=1,
        length=64,
        sharing=sharing,
    )
    return {phase: peak.bytes for phase, peak in predict_tool(run).items()}


def test_each_stage_divides_more_of_the_state():
    """State of the optimizer, then gradients, then weights: Rajbhandari et al., table 1."""
    found = {stage: peaks(zero(stage)) for stage in (1, 2, 3)}
    values = zero(1).trained
    slack = 2**20  # Blocks and workspaces.
    copies = 4 * values / GPUS
    workspaces = found[3]["loading"] - (2 * values / GPUS + copies)
    assert 0 < workspaces < 32 * slack
    assert found[1]["loading"] == pytest.approx(2 * values + copies + workspaces, abs=slack)
    assert found[1]["backward"] - found[2]["backward"] > values / 2  # Gradients of all weights, or of a part.
    # From the second step on, sums and their joined copy exist in 16 bits beside fp32 gradients and moments.
    assert found[2]["optimizer"] - found[2]["loading"] == pytest.approx((2 + 2 + 4 + 8) * values / GPUS, abs=slack)
    assert found[1]["optimizer"] > found[1]["loading"] + 8 * values / GPUS  # Moments, and the gradients' copy.
    assert found[3]["optimizer"] < found[2]["optimizer"] - values


def test_buckets_count_twice_if_reduction_overlaps():
    bucket = 4_000_000
    plain, overlapping = (
        peaks(zero(2, reduce_bucket_size=bucket, overlap_comm=on))["backward"] for on in (False, True)
    )
    assert overlapping - plain == 2 * bucket


def test_state_on_the_host_leaves_the_device():
    on_host = peaks(zero(2, offload_optimizer={"device": "cpu"}))
    assert on_host["optimizer"] < peaks(zero(2))["optimizer"] - 12 * zero(2).own_values


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("examples/deepspeed/ds_z2_offload_config.json", (2, True)),
        ("deepspeed_configs/zero3_bf16.json", (3, False)),
        ({"zero_optimization": {"stage": 1}}, (1, False)),
    ],
)
def test_the_stage_is_that_of_the_configuration_or_of_its_name(given: object, expected: tuple[int, bool]):
    found = zero_of(given, 2, CONFIG, train_of("full"))
    assert isinstance(found, Zero) and (found.stage, found.on_host) == expected


def test_what_is_not_known_is_said():
    train = train_of("full")
    assert zero_of("ds.json", 2, CONFIG, train) == "DeepSpeed's stage is not known from ds.json"
    weights = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
    assert zero_of(weights, 2, CONFIG, train) == "DeepSpeed's offload of weights is not described here"


def test_a_named_configuration_is_read_beside_the_tools_own(tmp_path: Path):
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    assert read_deepspeed("examples/ds.json", tmp_path) == {"zero_optimization": {"stage": 3}}
    assert read_deepspeed("missing.json", tmp_path) == "missing.json"


def test_a_damaged_configuration_is_refused_and_not_guessed_from_its_name(tmp_path: Path):
    (tmp_path / "ds_z3.json").write_text('{"zero_optimization": {"stage": 2,')
    with pytest.raises(UserError, match=r"ds_z3\.json: must be JSON"):
        read_deepspeed("ds_z3.json", tmp_path)
    assert read_deepspeed("x" * 5000, tmp_path) == "x" * 5000


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        ([1], "zero_optimization: must be an object"),
        ({"stage": 2, "offload_optimizer": "cpu"}, "offload_optimizer: must be an object"),
        ({"stage": 2, "offload_param": ["cpu"]}, "offload_param: must be an object"),
        *(
            ({"stage": 2, "reduce_bucket_size": size}, "reduce_bucket_size: must be auto, or a number")
            for size in ("big", None, -5, float("inf"), float("nan"), 1e18, True, [1])
        ),
    ],
)
def test_values_of_other_types_are_refused(content: object, rule: str):
    with pytest.raises(UserError, match=f"deepspeed: {rule}"):
        zero_of({"zero_optimization": content}, 2, CONFIG, train_of("full"))


def test_a_null_section_says_nothing():
    found = zero_of({"zero_optimization": None}, 2, CONFIG, train_of("full"))
    assert found == "DeepSpeed's stage is not known from its configuration"
