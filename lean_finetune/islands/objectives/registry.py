"""The objectives that `train.objective` can name: one class each, in a package of its own but for the usual one.

Apart from the other lists, because params.yaml is read by it. So the modules of objectives import torch in functions.
"""

from collections.abc import Mapping

from lean_finetune.objectives.objective import Objective, Sft
from lean_finetune.objectives.row_kind import RowKind
from lean_finetune.preferences.objectives.kto import Kto
from lean_finetune.preferences.objectives.pair_objectives import Cpo, Dpo, Ipo, Orpo, Reward, Simpo

_ALL: tuple[type[Objective], ...] = (Sft, Dpo, Ipo, Simpo, Cpo, Orpo, Kto, Reward)
OBJECTIVES: dict[str, Objective] = {kind.name: kind() for kind in _ALL}
"""By name."""
LOSS_PARAMETERS = {name: one for objective in OBJECTIVES.values() for name, one in objective.parameters.items()}
"""The keys of train.preference."""
OWN_FIGURES = tuple(one.figure_name for one in OBJECTIVES.values() if one.figure_name)
"""Names of the figures of a step that single objectives have."""
KINDS: Mapping[str, RowKind] = {one.kind.name: one.kind for one in OBJECTIVES.values()}
"""What rows are for these objectives, by name."""
SFT = Sft.name
