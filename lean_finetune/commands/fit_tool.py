"""The answer of `lean-finetune fit --from` about the run as the other tool does it, as lines and as JSON."""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

from cuda_memory.units import labelled, readable_size
from lean_finetune.commands.convert.conversions import Converted
from lean_finetune.commands.convert.read_config import read_config_of_tool
from lean_finetune.commands.fit_text import first_step_lines
from lean_finetune.core.errors import UserError
from lean_finetune.memory.advice.as_tool import best_key, predict_as_tool
from lean_finetune.memory.advice.run import Run
from lean_finetune.memory.tool_step.deepspeed import read_deepspeed
from lean_finetune.memory.tool_step.tools import SAVING_KEYS

RunOf = Callable[[Converted], Run]
"""The run of a converted configuration, with the options of the command line."""


def tool_lines(run: Run, here_bytes: int, converted: Converted, path: Path, run_of: RunOf) -> Iterator[str]:
    """The run as the tool does it, phase by phase; why it differs from here; the key that saves most there."""
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
    if (best := best_key(found, _variants(path, converted, run_of))) is not None:
        keys = ", ".join(f"{key}: {json.dumps(value)}" for key, value in best[0].items())
        yield labelled("  best change there", f"{keys} → {readable_size(best[1].peak.bytes)}, {best[1].state}")
    saved = found.peak.bytes - here_bytes
    more = "less" if saved >= 0 else "more"
    difference = f"{readable_size(abs(saved))} {more} than in {converted.tool}"
    yield labelled("as it would run here", f"needs {readable_size(here_bytes)}, {difference}")


def tool_json(run: Run, converted: Converted, path: Path, run_of: RunOf) -> dict[str, Any]:
    """The same for `--json`: sizes in bytes, or the reason why it is not known."""
    try:
        found = predict_as_tool(run, converted.tool, _keys(converted, path))
    except UserError as error:
        found = str(error)
    if isinstance(found, str):
        return {"not_known": found}
    best = best_key(found, _variants(path, converted, run_of))
    change = best and {"keys": best[0], "peak_bytes": best[1].peak.bytes, "verdict": best[1].state}
    return {**found.as_json(), "one_change": change}


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


def _variants(
    path: Path, converted: Converted, run_of: RunOf
) -> Iterator[tuple[Mapping[str, Any], Run, str, Mapping[str, Any]]]:
    """The configuration with each of the tool's saving keys that it does not have yet."""
    gpus = converted.values.get("hardware.num_gpus", 1)
    for changes in SAVING_KEYS.get(converted.tool, ()):
        if all(converted.keys.get(key) == value for key, value in changes.items()):
            continue
        try:
            changed = read_config_of_tool(path, gpus, with_data=False, changes=changes)
            yield changes, run_of(changed), changed.tool, _keys(changed, path)
        except UserError:  # This configuration does not allow it.
            continue
