"""The answer of `lean-finetune fit --from` about the run as the other tool does it, as lines and as JSON."""

import json
import textwrap
from collections.abc import Callable, Iterator, Mapping
from functools import partial, reduce
from pathlib import Path
from typing import Any

from cuda_memory.units import COLUMNS, labelled, readable_size
from lean_finetune.commands.convert.conversions import Converted
from lean_finetune.commands.convert.read_config import PYTHON, read_config_of_tool
from lean_finetune.commands.fit_text import first_step_lines
from lean_finetune.core.errors import UserError
from lean_finetune.memory.advice.as_tool import AsTool, predict_as_tool
from lean_finetune.memory.advice.run import Run
from lean_finetune.memory.choice.tool_changes import ToolOffer, ToolSearch, changes_of
from lean_finetune.memory.switches.switch import EFFECTS
from lean_finetune.memory.tool_step.deepspeed import read_deepspeed

RunOf = Callable[[Converted], Run]
"""The run of a converted configuration, with the options of the command line."""


def tool_lines(run: Run, here: str, here_bytes: int, converted: Converted, path: Path, run_of: RunOf) -> Iterator[str]:
    """The run as the tool does it, phase by phase; why it is larger than here; what to change there, or to move here.

    `here`: the verdict here, whose peak is `here_bytes`.
    """
    try:
        found = predict_as_tool(run, converted.tool, _keys(converted, path))
    except UserError as error:
        found = str(error)
    if isinstance(found, str):
        yield labelled("as that tool runs it", f"not known: {found}")
        return
    usable = f"{readable_size(run.usable_bytes)} usable on {run.device.name}"
    peak = f"needs {readable_size(found.peak.bytes)} in {found.worst_phase}"
    state = f"{found.state} in {converted.tool}: {peak}, {usable}"
    if found.state == "tight":
        state += f"; within {found.margin.text}"
    yield labelled("as that tool runs it", state)
    phases = ", ".join(f"{phase} {readable_size(peak.bytes)}" for phase, peak in found.by_phase.items())
    yield labelled("  by phase", phases)
    if found.reserved_bytes is not None and found.process_bytes is not None:
        reserved, process = readable_size(found.reserved_bytes), readable_size(found.process_bytes)
        yield labelled("  reserved memory", f"{reserved} with fixed segments, process {process}")
    if (dying := found.dying_first_step(run.device.usable_bytes(0))) is not None:
        yield "  tensors over its first step"
        yield from first_step_lines(dying, run.device, dying.update)
    for number, cause in enumerate(found.causes()):
        yield labelled("  larger because of" if number == 0 else "", f"{readable_size(cause.bytes)}: {cause.what}")
    if found.state != "fits":
        yield from _change_lines(_search(run, found, converted, path, run_of))
    saved = found.peak.bytes - here_bytes
    more = "less" if saved >= 0 else "more"
    difference = f"{readable_size(abs(saved))} {more} than in {converted.tool}"
    yield labelled("as it would run here", f"{here}: needs {readable_size(here_bytes)}, {difference}")


def _change_lines(search: ToolSearch) -> Iterator[str]:
    """What to change in the tool's configuration for the run to fit, or what saves most there."""
    offers = search.offers()
    if offers:
        yield labelled("what fits there", "the least harmful to learning first, then the fastest")
    else:
        nothing, best = "no combination of its keys that we know", search.best_alone()
        yield labelled("what fits there", nothing if best is None else f"{nothing}; this saves most:")
        offers = [] if best is None else [best]
    for offer in offers:
        keys = ", ".join(f"{key}: {json.dumps(value)}" for key, value in offer.keys.items())
        yield textwrap.fill(keys, COLUMNS, initial_indent=" " * 2, subsequent_indent=" " * 5, break_on_hyphens=False)
        peak = f"peak {readable_size(offer.found.peak.bytes)}, {offer.found.state}"
        text = f"{peak}, about {offer.slowdown:.2f}x time per token; {EFFECTS[offer.effect]}"
        yield textwrap.fill(text, COLUMNS, initial_indent=" " * 4, subsequent_indent=" " * 4)


def tool_json(run: Run, converted: Converted, path: Path, run_of: RunOf) -> dict[str, Any]:
    """The same for `--json`: sizes in bytes, or the reason why it is not known."""
    try:
        found = predict_as_tool(run, converted.tool, _keys(converted, path))
    except UserError as error:
        found = str(error)
    if isinstance(found, str):
        return {"not_known": found}
    search = _search(run, found, converted, path, run_of)
    best: ToolOffer | None = search.best_alone()
    change = best and {"keys": best.keys, "peak_bytes": best.found.peak.bytes, "verdict": best.found.state}
    offers = [] if found.state == "fits" else search.offers()
    return {**found.as_json(), "one_change": change, "what_fits": [offer.as_json() for offer in offers]}


def converted_json(converted: Converted) -> dict[str, Any]:
    """What became of each key of the configuration, for `--json`."""
    image = converted.image and {"width": converted.image.width, "height": converted.image.height}
    fields = {name: value for name, value in vars(converted).items() if name != "template_text"}  # For `import` alone.
    return {**fields, "image": image, "adapted_parts": sorted(converted.adapted_parts)}


def _keys(converted: Converted, path: Path) -> Mapping[str, Any]:
    """The configuration's values, with the content of the DeepSpeed configuration that it names or has inside."""
    keys = converted.keys
    if "deepspeed" in keys:
        return {**keys, "deepspeed": read_deepspeed(keys["deepspeed"], path.parent)}
    inside: dict[str, Any] = {}
    for key, value in keys.items():
        first, *sections = key.split(".")
        if first == "deepspeed" and sections:
            reduce(lambda found, name: found.setdefault(name, {}), sections[:-1], inside)[sections[-1]] = value
    return {**keys, "deepspeed": inside} if inside else keys


def _search(run: Run, found: AsTool, converted: Converted, path: Path, run_of: RunOf) -> ToolSearch:
    """The search for changes of the configuration with which the run fits in the tool."""
    gpus = converted.values.get("hardware.num_gpus", 1)
    changes = changes_of(converted.tool, converted.keys, gpus)
    if path.suffix in PYTHON:  # Such changes are other code there, not other values.
        changes = [one for one in changes if one.about not in ("weights", "sharding")]
    return ToolSearch(run=run, found=found, changes=changes, variant=partial(_variant, path, gpus, run_of))


def _variant(path: Path, gpus: int, run_of: RunOf, changes: Mapping[str, Any]) -> tuple[Run, str, Mapping[str, Any]]:
    """The configuration with other values of some keys.

    Raises:
        UserError: the tool, or the run here, does not allow them.
    """
    changed = read_config_of_tool(path, gpus, with_data=False, changes=changes)
    return run_of(changed), changed.tool, _keys(changed, path)
