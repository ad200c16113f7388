"""The objectives that `train.objective` can name. To add one, add its class to `_ALL`."""

from lean_finetune.objectives.cpo import Cpo
from lean_finetune.objectives.dpo import Dpo
from lean_finetune.objectives.ipo import Ipo
from lean_finetune.objectives.kto import Kto
from lean_finetune.objectives.objective import Objective
from lean_finetune.objectives.orpo import Orpo
from lean_finetune.objectives.reward import Reward
from lean_finetune.objectives.simpo import Simpo

SFT = "sft"
"""Supervised fine-tuning: the cross-entropy of trained tokens."""
_ALL: tuple[type[Objective], ...] = (Dpo, Ipo, Simpo, Cpo, Orpo, Kto, Reward)
OBJECTIVES: dict[str, Objective | None] = {SFT: None, **{kind.name: kind() for kind in _ALL}}
"""By name; None for supervised fine-tuning."""
