"""How often verdicts on published runs were right: `fits` of runs that ended, `does not fit` of runs that did not."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from cuda_memory.gpus import Device
from lean_finetune.memory.advice.margins import MARGINS, Kind, State, Tier, judge_bytes


@dataclass(frozen=True, kw_only=True)
class JudgedRow:
    """A published run with its prediction."""

    predicted_bytes: int
    tier: Tier
    """What `predicted_bytes` counts."""
    device: Device
    kind: Kind
    """The row of the table of margins that applies."""
    ran: bool
    """False: it ran out of memory."""
    headroom_percent: float = 0.0

    @property
    def verdict(self) -> State:
        """The verdict, with the margin."""
        margin = MARGINS[self.kind]
        return judge_bytes(self.predicted_bytes, self.device, self.tier, margin, self.headroom_percent)


@dataclass(frozen=True, kw_only=True)
class VerdictCounts:
    """Numbers of rows by verdict and outcome. A tight run may end either way, so it is neither right nor wrong."""

    fits_right: int
    fits_wrong: int
    """Said to fit, and ran out of memory."""
    tight: int
    refused_right: int
    refused_wrong: int
    """Said not to fit, and ended."""

    @property
    def share_of_fits(self) -> float:
        """How often `fits` was right, from 0 to 1; 1 if nothing was said to fit."""
        fits = self.fits_right + self.fits_wrong
        return self.fits_right / fits if fits else 1.0

    @property
    def text(self) -> str:
        """The numbers in words."""
        fits, refused = self.fits_right + self.fits_wrong, self.refused_right + self.refused_wrong
        return (
            f"`fits` was right for {self.fits_right} of {fits}, `does not fit` for {self.refused_right} of {refused}; "
            f"{self.tight} were `tight`"
        )


def count_verdicts(judged: Iterable[tuple[State, bool]]) -> VerdictCounts:
    """Count pairs of a verdict and whether the run ended."""
    found = Counter(judged)
    return VerdictCounts(
        fits_right=found["fits", True],
        fits_wrong=found["fits", False],
        tight=found["tight", True] + found["tight", False],
        refused_right=found["does not fit", False],
        refused_wrong=found["does not fit", True],
    )
