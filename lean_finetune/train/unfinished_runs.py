"""Which unfinished training a run resumes, and why it does not resume another.

Each training has a directory below scratch/train, named by a hash of its record (`RECORD`, JSON for people): what
decides its result, and the runs with other code or versions that it resumed. Such a mixture has a directory of its own,
so that an exact run never resumes one.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lean_finetune.config.field_types import Resume
from lean_finetune.distributed.control_messages import ControlChannel
from lean_finetune.train.checkpoint.checkpoint_files import steps_in
from lean_finetune.train.checkpoint.scratch_dir import FINISHED, RECORD, Choice
from lean_finetune.train.run_fingerprint import KEY_DIGITS, Parts, differences, run_key

COMPATIBLE = {"code", "versions"}
"""Kinds in which a run may differ that is resumed with `run.resume: compatible`."""
SHOWN_NAMES = 3
"""Of each kind that differs."""


@dataclass(frozen=True, kw_only=True)
class Unfinished:
    """A training that was broken off."""

    directory: Path
    parts: Parts
    earlier: Sequence[Mapping[str, Any]]
    """As in the record."""
    step: int
    """Optimizer steps in its last checkpoint."""


def told_of_mixture(choice: Choice) -> dict[str, str]:
    """What metrics say of a run that resumed one with other code or versions."""
    earlier = choice.record["earlier"] if choice.record else ()
    said = [f"compatible: with other {told_names(one['differs'])} up to step {one['step']}" for one in earlier]
    return {"resumed": "; ".join(said)} if said else {}


def choose(root: Path, parts: Parts, resume: Resume, told: Callable[[str], None]) -> Choice:
    """Find the unfinished training that a run of these parts resumes; tell why the nearest one is not resumed.

    Args:
        root: the directory of all.
        parts: of the run.
        resume: run.resume.
        told: gets lines for the user.
    """
    record: dict[str, Any] = {"parts": parts, "earlier": []}
    own = Choice(directory=root / run_key(record), earlier=None, record=record)
    if steps_in(own.directory):
        return own
    others = sorted(_unfinished(root), key=lambda other: _distance(parts, other))
    if not others:
        return own
    nearest, apart = others[0], differences(parts, others[0].parts)
    where = f"the unfinished training in {nearest.directory} (optimizer step {nearest.step})"
    if resume == "compatible" and not apart:
        mixture = {"parts": parts, "earlier": nearest.earlier}
        return Choice(directory=nearest.directory, earlier=None, record=mixture)
    if resume == "compatible" and apart.keys() <= COMPATIBLE:
        told(f"note: {where} is resumed although it had other {told_names(apart)}: run.resume is compatible")
        step = {"run": nearest.directory.name, "step": nearest.step, "differs": apart}
        record["earlier"] = [*nearest.earlier, step]
        return Choice(directory=root / run_key(record), earlier=nearest.directory, record=record)
    hint = "; -S run.resume=compatible resumes it" if apart.keys() <= COMPATIBLE else ""
    why = _told(apart, parts, nearest.parts) if apart else "it is itself a mixture of other code or versions"
    told(f"note: {where} is not resumed: {why}{hint}")
    return own


def choose_together(
    root: Path, parts: Callable[[], Parts], resume: Resume, told: Callable[[str], None], channel: ControlChannel
) -> Choice:
    """As `choose`, for all processes of a run: the first one decides. What it is of is read once."""
    nothing = bytes(KEY_DIGITS // 2)
    if not channel.is_first:
        heard = bytes(channel.gather_after_work(*nothing, *nothing)[0])
        own, earlier = heard[: len(nothing)], heard[len(nothing) :]
        other = None if earlier == nothing else root / earlier.hex()
        return Choice(directory=root / own.hex(), earlier=other, record=None)
    choice = choose(root, parts(), resume, told)
    resumed = nothing if choice.earlier is None else bytes.fromhex(choice.earlier.name)
    channel.gather_after_work(*bytes.fromhex(choice.directory.name), *resumed)
    return choice


def _unfinished(root: Path) -> Iterator[Unfinished]:
    """Trainings that were broken off with a checkpoint, and say what they are."""
    for path in root.glob(f"*/{RECORD}"):
        directory, steps = path.parent, steps_in(path.parent)
        if steps and not (directory / FINISHED).exists():
            record = json.loads(path.read_text(encoding="utf-8"))
            yield Unfinished(directory=directory, parts=record["parts"], earlier=record["earlier"], step=steps[-1])


def _distance(parts: Parts, other: Unfinished) -> tuple[int, int, int, int]:
    """How far another training is: kinds that matter most, then how much differs, then what was done."""
    apart = differences(parts, other.parts)
    return len(apart.keys() - COMPATIBLE), len(apart), sum(map(len, apart.values())), -other.step


def told_names(apart: Mapping[str, Sequence[str]]) -> str:
    """Kinds and the first names of each, for people."""
    return ", ".join(f"{kind} ({_few(names)})" for kind, names in apart.items())


def _told(apart: Mapping[str, Sequence[str]], here: Parts, there: Parts) -> str:
    """What differs, with values that people can read."""

    def value(kind: str, name: str) -> str:
        if kind in ("data", "model", "code") or name == "bucket":
            return name
        return f"{name}: {_value(there, kind, name)} there, {_value(here, kind, name)} here"

    return ", ".join(f"{kind} differ ({_few([value(kind, name) for name in names])})" for kind, names in apart.items())


def _value(parts: Parts, kind: str, name: str) -> str:
    """As params.yaml would have it, nearly."""
    return json.dumps(parts.get(kind, {}).get(name))


def _few(names: Sequence[str]) -> str:
    """The first of them."""
    more = len(names) - SHOWN_NAMES
    return ", ".join(names[:SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")
