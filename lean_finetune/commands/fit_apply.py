"""`lean-finetune fit --apply`: write an offer into params.yaml."""

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cuda_memory.units import counted
from lean_finetune.commands.project.params_file import change_params
from lean_finetune.config.load import load_params, with_flags
from lean_finetune.core.errors import UsageFault, UserError
from lean_finetune.core.file_names import refuse_link_out

if TYPE_CHECKING:
    from lean_finetune.memory.advice.search import Remedy


def check_target(file: Path, *, usual: bool) -> None:
    """Refuse to apply an offer for a run that is not the one of a params file.

    Raises:
        UsageFault: the file does not exist, or the run is a usual one.
        UserError: a link leads out of the file's directory.
    """
    if not file.exists():
        raise UsageFault(f"--apply: writes into {file}, which does not exist; name a file by --params")
    if usual:
        raise UsageFault(
            f"--apply: changes the run of {file}, but --model and --from without --params mean a usual one; add "
            f"--params {file}"
        )
    refuse_link_out(file.parent, file)


def apply_offer(file: Path, number: int, offers: "Sequence[Remedy]", flags: Sequence[str]) -> Iterator[str]:
    """Write an offer, counted from 1, into a params file with the options of the command line; yield what changed.

    Comments stay. `flags` are overrides of the run that the offers are for.

    Raises:
        UsageFault: there are fewer offers.
        UserError: there is none.
    """
    if not offers:
        raise UserError("--apply: nothing to apply: no settings were found with which the run fits")
    if number > len(offers):
        raise UsageFault(f"--apply: must be at most {len(offers)}, the number of offers for this run; got {number}")
    changed = change_params(_sections(file, [*flags, *offers[number - 1].flags]), file, file)
    yield f"{file}: offer {number} of {len(offers)}, {counted(len(changed), 'parameter')} changed"
    for key, value in changed.items():
        yield f"{key}: {'' if value is None else value}"


def _sections(file: Path, flags: Iterable[str]) -> dict[str, Any]:
    """The values of overrides, in nested sections as in the file."""
    flags = [*flags]
    values = with_flags(load_params(file), flags).model_dump()
    sections: dict[str, Any] = {}
    for path in (flag.partition("=")[0].split(".") for flag in flags):
        section = reduce(lambda found, name: found.setdefault(name, {}), path[:-1], sections)
        section[path[-1]] = reduce(lambda found, name: found[name], path, values)
    return sections
