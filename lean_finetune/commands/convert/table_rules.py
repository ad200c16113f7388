"""The rules of a tool's table, applied to the keys of a configuration."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lean_finetune.commands.convert.conversions import FACTS, PARAMETERS, Conversion, Converted
from lean_finetune.commands.convert.shell_script import Unresolved
from lean_finetune.config.other_tools import Table, shared
from lean_finetune.core.errors import UserError, shortened

DATA_FACTS = ("dataset", "eval_dataset", "dataset_dir", "chat_template", "template_text")
NO_DATA = "a prediction needs no data"


@dataclass
class Reading:
    """Applies a table's rules to keys, one after the other."""

    path: Path
    table: Table
    converted: Converted
    facts: dict[str, Any] = field(default_factory=dict)

    def read(self, key: str, value: Any, *, is_given: bool, with_data: bool) -> None:
        """Apply the rule of a key, or list it with the reason why it has none."""
        rule = self.rule(key)
        if rule is None:
            name = self._twin(key)
            reason = next((reason for reason, keys in self.table["ignored"].items() if name in keys), None)
            if reason is None and key.startswith("ENV."):
                reason = "variables of the environment stay yours"
            if reason is None and key.startswith("deepspeed."):
                reason = "set by train.sharding"
            if reason is None:
                self.converted.unknown.append(key)
            else:
                self.converted.ignore(key, reason)
            return
        if ours := rule.get("source"):  # `data_sets` reads it.
            self.converted.used[key] = ours if self._twin(key) == key else ours.replace("source", "heldout_source")
        else:
            self._apply(rule, key, value, is_given=is_given)
        if not with_data and is_given and rule.get("fact") in DATA_FACTS:
            self.converted.ignore(key, NO_DATA)

    def rule(self, key: str) -> Mapping[str, Any] | None:
        """The rule of a key, or of all keys of its section."""
        keys, name = self.table["keys"], self._twin(key)
        rule = keys.get(name) or keys.get(f"{name.partition('.')[0]}.*")
        return {"to": rule} if isinstance(rule, str) else rule

    def _twin(self, key: str) -> str:
        """The key whose rule holds for this one: held-out rows are described as others are."""
        section, dot, name = key.partition(".")
        return f"{self.table.get('same_keys', {}).get(section, section)}{dot}{name}" if dot else key

    def _apply(self, rule: Mapping[str, Any], key: str, value: Any, *, is_given: bool) -> None:
        converted, values = self.converted, rule.get("values")
        unknown = [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, Unresolved)]
        if unknown and "differs" not in rule:
            raise UserError(f"{self.path}:{unknown[0].line}: {key}: must be a value; {unknown[0].why}; write it there")
        if "adapts" in rule:
            adapted = self.facts.setdefault("adapted_layers", [])
            adapted += rule["adapts"] if value is True else []
            converted.used[key] = shared()["facts"]["adapted_layers"]
            return
        is_one = not isinstance(value, list | Mapping)
        for ours, by_value in rule.get("also", {}).items():
            if is_one and value in by_value and ours not in converted.used.values():
                converted.values[ours] = by_value[value]
        if "differs" in rule and values is None:
            if not is_one or value not in (False, 0):
                converted.say(f"{key}={shortened(str(value))}: {rule['differs']}")
            if "fact" in rule:
                self.facts[rule["fact"]] = value
            return
        if values is not None:
            values = shared()[values] if isinstance(values, str) else values
            if rule.get("one_of_list") and isinstance(value, list) and len(value) == 1:
                [value] = value
            if isinstance(value, list | Mapping) or value not in values:
                self._refuse_value(rule, key, value)
                kept = f"; {rule['to']} stays as it is by default" if "to" in rule else ""
                why = f": {rule['differs']}" if "differs" in rule else f" is not known here{kept}"
                converted.say(f"{key}={shortened(str(value))}{why}")
                return
            value = values[value]
        if value is None:
            if is_given:
                converted.used[key] = "as here"
        elif "to" in rule:
            ours = rule["to"]
            converted.values[ours] = self._convert(PARAMETERS.get(ours), key, value)
            if is_given:
                converted.used[key] = ours
        elif "fact" in rule:
            self._note_fact(rule["fact"], key, self._convert(FACTS.get(rule["fact"]), key, value), is_given=is_given)

    def _refuse_value(self, rule: Mapping[str, Any], key: str, value: Any) -> None:
        if "refuse" in rule:
            remedy = f"change it, or run it with {self.converted.tool}"
            raise UserError(f"{self.path}: {key}: {rule['refuse']}; got {shortened(str(value))}; {remedy}")

    def _note_fact(self, fact: str, key: str, value: Any, *, is_given: bool) -> None:
        self.facts[fact] = value
        if is_given:
            self.converted.used[key] = str(shared()["facts"].get(fact, "")).partition(" (")[0] or "as here"

    def _convert(self, convert: Conversion | None, key: str, value: Any) -> Any:
        """A value of the tool in our type. Raises UserError if it is of another."""
        if convert is None:
            return value
        try:
            return convert(key, value, self.converted)
        except (TypeError, ValueError, OverflowError) as error:
            got = shortened(repr(value))
            raise UserError(f"{self.path}: {key}: {error}; got {got}; correct it") from None
