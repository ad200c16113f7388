"""What of sharing a run excludes each other is told in one line."""

from typing import Any

import pytest

from lean_finetune.config.load import parse_params
from lean_finetune.core.errors import UserError
from tests.test_schema import put, values  # noqa: F401 (a fixture)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_gpus": 2}, r"train\.sharding: several GPUs need .*; got none with hardware\.num_gpus=2; set it to ddp"),
        ({"sharding": "ddp"}, r"train\.sharding: has an effect only with hardware\.num_gpus above 1; got ddp with 1"),
        (
            {"num_gpus": 4, "sharding": "zero3", "shard_group_gpus": 2},
            r"train\.shard_group_gpus: has an effect only with train\.sharding=hsdp; got 2 with zero3; leave it blank",
        ),
        (
            {"num_gpus": 4, "sharding": "hsdp", "shard_group_gpus": 3},
            r"train\.shard_group_gpus: must be a divisor of hardware\.num_gpus=4, above 1 and below it; got 3; change",
        ),
        (
            {"num_gpus": 4, "sharding": "hsdp", "shard_group_gpus": 4},
            r"train\.shard_group_gpus: .* got 4; change it, or use train\.sharding=zero3",
        ),
        *(
            (
                {"num_gpus": gpus, "sharding": "hsdp"},
                rf"train\.sharding: hsdp needs at least two groups of two GPUs; .*num_gpus={gpus}; use zero3",
            )
            for gpus in (2, 3)
        ),
        (
            {"num_gpus": 2, "sharding": "zero2", "method": "int8_lora"},
            r"train\.sharding: cannot split 8-bit weights.* got zero2 with train\.method=int8_lora; use ddp",
        ),
    ],
)
def test_what_excludes_each_other_is_told(values: dict[str, Any], changes: dict[str, Any], message: str):  # noqa: F811
    """A setting that has another effect than its name says must not be taken in silence."""
    for key, value in changes.items():
        put(values, f"{'hardware' if key == 'num_gpus' else 'train'}.{key}", value)
    with pytest.raises(UserError, match=message) as told:
        parse_params(values)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("sharding", ["ddp", "zero1", "zero2", "zero3", "hsdp"])
def test_every_mode_is_taken_for_several_gpus(values: dict[str, Any], sharding: str):  # noqa: F811
    put(put(values, "hardware.num_gpus", 4), "train.sharding", sharding)
    assert parse_params(values).train.sharding == sharding
