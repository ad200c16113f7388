"""Plan a project's params.yaml, as `lean-finetune plan` does in it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lean_finetune.commands.choose.plan import asked_for, chosen_sets, nested
from lean_finetune.commands.project.params_file import change_params
from lean_finetune.commands.project.template import SAMPLE, template_files
from lean_finetune.commands.without_compiler import importing_without_compiler
from lean_finetune.config.load import COMMON_PARAMS, PARAMS_FILE, load_params, parse_params
from lean_finetune.config.rule import SWITCHED_OFF
from lean_finetune.config.schema import Params
from lean_finetune.core.errors import DoesNotFit
from lean_finetune.core.read_yaml import parse_yaml
from lean_finetune.pinning.locate import TINY

CHOSEN = (
    *SWITCHED_OFF,
    *("data.max_length", "train.precision", "train.grad_ckpt", "train.grad_ckpt_every", "train.loss_chunk"),
    "train.sharding",
)
"""Parameters that plan chooses, besides those of section bucket."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The set of switches that was written."""

    words: str
    device: str
    peak_bytes: int
    usable_bytes: int
    changed: Mapping[str, Any]
    """Parameters that have another value now."""


def is_unplanned(given: Sequence[str]) -> bool:
    """Whether ./params.yaml has the switches with which projects start, so that nobody has chosen any.

    That of the tiny sample has been planned already. `given` are parameters that the user sets.
    """
    start = parse_params(parse_yaml(template_files()[PARAMS_FILE.name]))
    p = load_params()
    if p.model.name == TINY and p.data.source == SAMPLE:
        return False
    return any(_choices(p, given) == _choices(other, given) for other in (start, load_params(COMMON_PARAMS)))


def _choices(p: Params, given: Sequence[str]) -> dict[str, Any]:
    """The values of what plan chooses, without the parameters that the user sets."""
    sections = p.model_dump()
    values = {f"bucket.{key}": value for key, value in sections["bucket"].items()}
    for dotted in CHOSEN:
        section, _, key = dotted.partition(".")
        values[dotted] = sections[section][key]
    return {key: value for key, value in values.items() if key not in given}


def plan_project(sets: Sequence[str]) -> Planned:
    """Write the fastest switches that fit into ./params.yaml. Parameters of `sets`, as of --set, keep their values.

    Raises:
        DoesNotFit: nothing fits, and nothing is written.
        UserError: the rows, the model or a parameter cannot be used.
    """
    options = dict.fromkeys(("model.name", "hardware.num_gpus", "train.precision"))
    asked = asked_for(options, None, sets, None, None)
    with importing_without_compiler():  # Here: imports torch, which --help skips.
        from lean_finetune.commands.choose.plan_text import nothing_fits, set_words
        from lean_finetune.commands.choose.sampled_rows import sampled_rows
        from lean_finetune.memory.choice.choose import lighter_that_fits

    rows = sampled_rows("data.source", asked.params)
    chosen, flags, _ = chosen_sets(asked, rows, None, rows_known=True)
    if not chosen.choices:
        index = rows.index.shortened(chosen.start.run.params.data.max_length)
        raise DoesNotFit(nothing_fits(chosen, lighter_that_fits(chosen, asked.fixed, index)))
    best = chosen.choices[0]
    picked = {**dict(text.split("=", 1) for text in flags), **chosen.settings(best)}
    return Planned(
        words=set_words(best.run),
        device=best.run.device.name,
        peak_bytes=best.prediction.peak.bytes,
        usable_bytes=best.run.usable_bytes,
        changed=change_params(nested(picked), PARAMS_FILE, PARAMS_FILE),
    )
