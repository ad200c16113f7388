"""The objective of another tool's configuration, and the parameters of its loss."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lean_finetune.commands.convert.conversions import Converted
from lean_finetune.config.other_tools import Table, of_objectives
from lean_finetune.core.errors import UserError
from lean_finetune.islands.objectives.registry import OBJECTIVES, SFT

PRETRAINING = "pt"
"""LLaMA-Factory's stage for rows of plain text. The objective is the same."""
PATH_PARTS = 3
"""Parts of a path in which the name of a trainer is looked for."""
SECTION = "train.preference."
HEADS = ("classifier", "lm_head", "score", "v_head")
"""Heads of language models and of other tools' reward models."""


def combine_objective(facts: Mapping[str, Any], converted: Converted, table: Table, path: Path) -> None:
    """Set train.objective and its parameters, with the tool's own values where the configuration leaves them out.

    Raises:
        UserError: the configuration names a loss that its trainer does not combine with here.
    """
    name = _objective(facts, converted, table, path)
    if facts.get("scores") is not None and name != "reward":
        raise UserError(
            f"{path}: num_labels: classification is not done here; change it, or run it with {table['tool']}"
        )
    if name not in OBJECTIVES:
        raise UserError(f"{path}: objective {name} is not done here; run it with {table['tool']}")
    values, objective = converted.values, OBJECTIVES[name]
    own = table["objectives"].get(name, {})
    for key, value in own.get("values", {}).items():
        if key not in converted.used.values():
            values[key] = value
    converted.differs += own.get("differs", [])
    read = {f"{SECTION}{key}" for key in objective.defaults}
    _leave_out({key for key in values if key.startswith(SECTION)} - read, converted, f"not read by objective {name}")
    if not objective.compares:
        unread = {key for key in converted.used if _is_loss_of_pairs(table, key)}
        _ignore(unread, converted, f"not read by objective {name}")
        return
    values |= {"train.objective": name, **objective.off}
    if objective.scored and (copies := values.get("train.lora.modules_to_save")):  # The head is trained in full anyway.
        values["train.lora.modules_to_save"] = [name for name in copies if name not in HEADS]
    _leave_out({"data.train_on"}, converted, "of a pair, the answers are trained")
    if values.get("train.lora.dropout"):
        values["train.lora.dropout"] = 0.0
    if "train.lora.dropout" in converted.used.values():
        converted.differs.append(f"train.lora.dropout=0.0: {table['tool']} turns dropout off for {name}")


def _objective(facts: Mapping[str, Any], converted: Converted, table: Table, path: Path) -> str:
    """The objective by what names it: a key, the trainer that only reads such keys, or the file's path."""
    named, loss = facts.get("objective"), facts.get("pair_loss")
    if named is None:
        trainers = table["objective_of_keys"]
        named = next((name for name, keys in trainers.items() if any(key in converted.keys for key in keys)), None)
        in_paths = "|".join(name for name, one in of_objectives().items() if one.get("in_paths"))
        by_path = re.search(rf"(?i)(?<![a-z])({in_paths})(?![a-z])", "/".join(path.parts[-PATH_PARTS:]))
        if named == "dpo" and loss in (None, "dpo"):
            named, why = (by_path[1].lower(), "by its path") if by_path else ("dpo", "by its keys")
            converted.differs.append(
                f"{table['tool']}'s command names the trainer, the file does not: {why}, train.objective={named}; "
                "--set train.objective=… sets another"
            )
    if named in (None, SFT, PRETRAINING) or loss in (None, "dpo", named):
        return SFT if named in (None, PRETRAINING) else named
    if named == "dpo" or (named == "cpo" and loss == "simpo"):
        return str(loss)
    raise UserError(
        f"{path}: loss {loss} of objective {named} is not done here; change it, or run it with {table['tool']}"
    )


def _leave_out(ours: set[str], converted: Converted, reason: str) -> None:
    """Remove parameters, and list the keys that set them as ignored."""
    for name in ours:
        converted.values.pop(name, None)
    _ignore({key for key, name in converted.used.items() if name in ours}, converted, reason)


def _is_loss_of_pairs(table: Table, key: str) -> bool:
    rule = table["keys"].get(key)
    return isinstance(rule, Mapping) and rule.get("fact") == "pair_loss"


def _ignore(keys: set[str], converted: Converted, reason: str) -> None:
    """List keys as ignored, no longer as used."""
    for key in [key for key in converted.used if key in keys]:
        del converted.used[key]
        converted.ignored.setdefault(reason, []).append(key)
