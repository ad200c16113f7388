"""Rules of params.yaml for runs that several GPUs share."""

from lean_finetune.config.field_types import Sharding
from lean_finetune.config.schema import Params
from lean_finetune.core.errors import UserError

CUTTING: frozenset[Sharding] = frozenset({"zero2", "zero3", "hsdp"})
"""Modes in which every GPU holds a part of each weight."""
GATHERING: frozenset[Sharding] = frozenset({"zero3", "hsdp"})
"""Those of them in which a layer's weights are whole only while it computes."""


def check_sharing(params: Params) -> None:
    """Refuse what has no effect, or has another one than its name says.

    Raises:
        UserError: naming the parameters, the rule, what was given and the remedy.
    """
    train, gpus = params.train, params.hardware.num_gpus
    mode, group = train.sharding, train.shard_group_gpus
    several, cut = gpus > 1, train.sharding in CUTTING
    faults = (
        (
            several and mode == "none",
            f"train.sharding: several GPUs must be told how they share the run; got none with hardware.num_gpus={gpus}"
            "; set it to ddp (every GPU holds all) or zero3 (a part each), or set hardware.num_gpus=1",
        ),
        (
            not several and mode != "none",
            f"train.sharding: has an effect only with hardware.num_gpus above 1; got {mode} with 1; set it to none, or "
            "raise hardware.num_gpus",
        ),
        (
            group is not None and mode != "hsdp",
            f"train.shard_group_gpus: has an effect only with train.sharding=hsdp; got {group} with {mode}; "
            "leave it blank",
        ),
        (
            mode == "hsdp" and group is not None and (gpus % group != 0 or not 1 < group < gpus),
            f"train.shard_group_gpus: must be a divisor of hardware.num_gpus={gpus}, above 1 and below it; got {group}"
            "; set it, or use train.sharding=zero3 (one group of all) or ddp (groups of one)",
        ),
        (
            mode == "hsdp" and group is None and not any(gpus % size == 0 for size in range(2, gpus)),
            f"train.sharding: hsdp needs at least two groups of two GPUs; got hsdp with hardware.num_gpus={gpus}; use "
            "zero3 (one group of all) or ddp (groups of one), or change hardware.num_gpus",
        ),
        (
            cut and train.method == "int8_lora",
            f"train.sharding: 8-bit weights cannot be cut: bitsandbytes keeps them outside of parameters; got {mode} "
            "with train.method=int8_lora; use ddp or zero1, or train.method=qlora",
        ),
        (
            train.offload == "parameters" and mode not in GATHERING,
            "train.offload: parameters sends a GPU the weights of a layer when zero3 or hsdp gather it; got parameters "
            f"with train.sharding={mode}; set train.sharding=zero3 (hardware.num_gpus above 1), or use optimizer",
        ),
    )
    for wrong, message in faults:
        if wrong:
            raise UserError(message)
