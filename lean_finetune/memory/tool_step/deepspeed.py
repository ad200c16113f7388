"""DeepSpeed's ZeRO in a training step: which part of the state a process has, its buckets, and what it gathers.

Rajbhandari et al. 2020, arXiv 1910.02054; runtime/zero/stage_1_and_2.py and stage3.py of DeepSpeed 0.17. Sizes follow
from the configuration and the number of weights; no GPU has measured them for us.
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from lean_finetune.config.schema import Train
from lean_finetune.core.errors import UserError, shortened
from lean_finetune.memory.predict.state_formulas import model_shapes, trained_values, weight_lines
from lean_finetune.memory.trace.memory_trace import OPTIMIZER, SHARDING, WEIGHTS, MemoryTrace

BUCKET_VALUES = 500_000_000
"""DeepSpeed's default of reduce_bucket_size."""
LIVE_VALUES = 1_000_000_000
"""Its default of stage3_max_live_parameters."""
MOST_VALUES = 10**12
"""Most values of a bucket: more than any model has."""
STAGE_IN_NAME = re.compile(r"(?i)(?:z|zero|stage)[-_ ]?([0-3])")
HALF_BYTES, FP32_BYTES = 2, 4


@dataclass(frozen=True, kw_only=True)
class Zero:
    """How DeepSpeed shares a run among `gpus` processes."""

    stage: int
    """1: state of the optimizer is divided; 2: gradients too; 3: weights too."""
    gpus: int
    weight_bytes: int
    """Of all weights."""
    trained: int
    """Number of trained values."""
    reduce_bucket_values: int = BUCKET_VALUES
    overlaps: bool = False
    """Reduction overlaps with backward, for which there are two buckets."""
    on_host: bool = False
    """State of the optimizer, and its update, are in host memory."""
    live_values: int = LIVE_VALUES
    """Weights of stage 3 that are gathered at a time."""

    @property
    def own_values(self) -> int:
        """The number of trained values that a process updates."""
        return -(-self.trained // self.gpus)

    def register(self, trace: MemoryTrace, weights: Sequence[torch.Tensor]) -> None:
        """Count weights, and the fp32 copies of those that this process updates."""
        if self.stage == 3:
            trace.ignore(weights)
            trace.register_bytes(-(-self.weight_bytes // self.gpus), WEIGHTS)
            trace.register_bytes(min(self.live_values * HALF_BYTES, self.weight_bytes), SHARDING)
        else:
            trace.register(weights, WEIGHTS)
        if not self.on_host:
            trace.register_bytes(self.own_values * FP32_BYTES, OPTIMIZER)

    def buckets(self) -> list[torch.Tensor]:
        """What exists during backward: buckets of gradients, and this process's part of divided gradients."""
        count = 2 if self.overlaps else 1
        made = [torch.empty(self.reduce_bucket_values, dtype=torch.bfloat16) for _ in range(count)]
        return made


class ZeroOptimizer:
    """Stands for DeepSpeed's optimizer: its first step makes the moments, each step an fp32 copy of the gradients."""

    def __init__(self, zero: Zero, trained: Sequence[nn.Parameter]):
        """Free each gradient in backward if stage 2 or 3 divides gradients."""
        self._zero, self._trained = zero, trained
        self._moments: torch.Tensor | None = None
        self.own_gradients: torch.Tensor | None = None
        if zero.stage >= 2:
            for parameter in trained:
                parameter.register_post_accumulate_grad_hook(_free)

    def begin_backward(self) -> list[torch.Tensor]:
        """The tensors that live until backward ends."""
        if self._zero.stage >= 2 and self.own_gradients is None and not self._zero.on_host:
            self.own_gradients = torch.empty(self._zero.own_values, dtype=torch.bfloat16)
        return self._zero.buckets()

    def step(self) -> None:
        """Update this process's part; DeepSpeed then gathers the 16-bit weights of all in their place."""
        zero = self._zero
        if zero.on_host:
            return
        # Stages 1 and 2 join the gradients of the part in 16 bits before they convert them.
        joined = torch.empty(zero.own_values if zero.stage < 3 else 0, dtype=torch.bfloat16)
        gradient = torch.empty(zero.own_values, dtype=torch.float32)
        del joined
        self.own_gradients = None
        if self._moments is None:
            self._moments = torch.empty(2 * zero.own_values, dtype=torch.float32)
        del gradient

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free all gradients."""
        self.own_gradients = None
        for parameter in self._trained:
            parameter.grad = None


def _free(parameter: torch.Tensor) -> None:
    parameter.grad = None


def read_deepspeed(given: object, folder: Path) -> object:
    """The content of a DeepSpeed configuration that a key names, from here or from `folder`; else what was given.

    Raises:
        UserError: the file is not JSON.
    """
    if not isinstance(given, str):
        return given
    for path in (Path(given), folder / given, folder / Path(given).name):
        try:
            if path.is_file():
                return json.loads(path.read_text(encoding="utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}: must be JSON, as DeepSpeed's configurations are ({error}); correct it") from None
        except OSError:  # The name is too long, or the file is another user's.
            return given
    return given


def zero_of(given: object, gpus: int, config: PretrainedConfig, train: Train) -> Zero | str:
    """The ZeRO settings of a DeepSpeed configuration (content or file name), or why they are not known.

    Raises:
        UserError: a value of the configuration has another type.
    """
    content = _section(given, "zero_optimization") if isinstance(given, Mapping) else {}
    named = STAGE_IN_NAME.search(Path(given).name) if isinstance(given, str) else None
    stage = content.get("stage", int(named[1]) if named else None)
    if stage not in (1, 2, 3):
        return f"DeepSpeed's stage is not known from {given if isinstance(given, str) else 'its configuration'}"
    text = config.get_text_config()
    shapes = model_shapes(config)

    def values(name: str, default: int, automatic: int) -> int:
        found = content.get(name, default)
        return automatic if found == "auto" else _number_of_values(name, found)

    device = _section(content, "offload_optimizer").get("device", "none")
    if _section(content, "offload_param").get("device", "none") != "none":
        return "DeepSpeed's offload of weights is not described here"
    hidden = text.hidden_size
    return Zero(
        stage=stage,
        gpus=gpus,
        weight_bytes=sum(line.total_bytes(1) for line in weight_lines(shapes, train)),
        trained=trained_values(shapes, train),
        reduce_bucket_values=values("reduce_bucket_size", BUCKET_VALUES, hidden * hidden),
        overlaps=bool(content.get("overlap_comm", stage == 3)),
        on_host=device != "none" or (isinstance(given, str) and "offload" in given.lower()),
        live_values=values("stage3_max_live_parameters", LIVE_VALUES, LIVE_VALUES),
    )


def _section(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A section of a configuration; empty if it is not there, or null."""
    found = content.get(name)
    if found is not None and not isinstance(found, Mapping):
        raise UserError(f"deepspeed: {name}: must be an object; got {shortened(repr(found))}; correct it")
    return found or {}


def _number_of_values(name: str, found: object) -> int:
    if isinstance(found, int | float | str) and not isinstance(found, bool):
        with suppress(ValueError, OverflowError):
            number = int(float(found))
            if 0 <= number <= MOST_VALUES:
                return number
    raise UserError(
        f"deepspeed: {name}: must be auto, or a number from 0 to {MOST_VALUES:.0e}; got {shortened(repr(found))}; "
        "correct it"
    )
