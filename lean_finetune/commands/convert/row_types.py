"""What another tool's `type` of a data set means: the format and the columns of its rows, and their chat template."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lean_finetune.islands.columns  # noqa: F401 - registers the formats of rows
from lean_finetune.commands.convert.conversions import Converted
from lean_finetune.config.other_tools import Table
from lean_finetune.core.errors import UserError, shortened
from lean_finetune.data.format.format_base import FORMATS
from lean_finetune.data.format.messages import ROLE_KEYS, ROLE_NAMES, ROLES_KEY, TEXT_KEYS
from lean_finetune.objectives.row_kind import RowKind

CHATML, OWN = "chatml", "tokenizer"
"""Values of data.chat_template."""
FALLBACK = "tokenizer_default"
"""How names of the tokenizer's own template begin in Axolotl."""
INLINE = "jinja"
"""Axolotl's name for the template of chat_template_jinja."""


@dataclass(frozen=True, kw_only=True)
class RowType:
    """The rows of a data set."""

    format: str | None = None
    """data.format; None where the rows tell."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """data.columns."""
    read: frozenset[str] = frozenset()
    """Columns that the tool reads."""
    template: str | None = None
    """The tool's name of the chat template, where the type decides it."""

    def source_keys(self) -> dict[str, Any]:
        """Keys of an entry of data.source."""
        columns = {key: column for key, column in self.columns.items() if key != column}
        return {**({"format": self.format} if self.format else {}), **({"columns": columns} if columns else {})}


def row_type(entry: Mapping[str, Any], kind: RowKind, table: Table, converted: Converted, where: str) -> RowType:
    """The rows of a data set by its `type`, and by the keys that name its fields; `where` begins refusals.

    Raises:
        UserError: rows of that type are not read here.
    """
    name = entry.get("type")
    if name is None or "row_types" not in table:
        return RowType()
    known = table["row_types"][kind.name]
    if isinstance(name, Mapping):
        return _user_defined(name, table["user_types"][kind.name], kind, converted)
    base = str(name).partition(":")[0].removesuffix(".load")
    writer, _, rest = base.partition(".")
    found = known.get(base) or (known.get(f"*.{rest or 'default'}") if writer in table["row_writers"] else None)
    if found is None:
        raise UserError(
            f"{where}: type: rows of this type are not read here; got {shortened(str(name))}; write them in a form of "
            "data.format, and remove type"
        )
    row_format = FORMATS.get(found.get("format", ""))
    columns = dict(found.get("columns", {}))
    for key, ours in table["row_fields"].items():
        if (column := entry.get(key)) is not None and row_format is not None:
            ours = row_format.required[0] if ours == "messages" and ours not in row_format.keys else ours
            columns |= {ours: str(column)} if ours in row_format.keys else {}
    if row_format is not None and (roles := _roles(entry, where)):
        columns[ROLES_KEY] = roles
    _check_turns(entry, where)
    if found.get("prompt") or writer in table["row_writers"] and table["row_writers"][writer] is None:
        converted.say(f"type {name}: its prompts are written in a form of its own there, and by the chat template here")
    required = row_format.required if row_format is not None else ()
    read = [columns.get(key, key) for key in (*required, *found.get("reads", ()))]
    template = table["row_writers"].get(writer) or (_template(entry) if "chat_template" in base else None)
    return RowType(format=found.get("format"), columns=columns, read=frozenset(read), template=template)


def _user_defined(given: Mapping[str, Any], types: Table, kind: RowKind, converted: Converted) -> RowType:
    """Rows of a type that the configuration describes by itself; `types` are the table's of such rows."""
    forms = [key for key in given if key.endswith("format") or key == "system_prompt"]
    if forms:
        converted.say(f"type: {', '.join(forms)}: the chat template (data.chat_template) writes the text here")
    found = types["formed" if forms else "plain"]
    keys = {"field_system": "system", "field_input": "input", **found["keys"]}
    columns = {
        **found["columns"],
        **{keys[key]: str(column) for key, column in given.items() if key in keys and column},
    }
    for label in kind.labels:
        if columns.get(label) in kind.labels:
            del columns[label]
    converted.unknown += [f"type.{key}" for key in given if key not in keys and key not in forms]
    return RowType(format=found["format"], columns=columns, read=frozenset(columns.values()) | {"system", "input"})


def _roles(entry: Mapping[str, Any], where: str) -> dict[str, str]:
    """Our role of each name that we do not know."""
    given = entry.get("roles") or {}
    if not isinstance(given, Mapping) or not all(isinstance(names, list) for names in given.values()):
        raise UserError(f"{where}: roles: must be lists of names by role; got {shortened(str(given))}; correct it")
    roles = {str(name): str(role) for role, names in given.items() for name in names}
    return {name: role for name, role in roles.items() if ROLE_NAMES.get(name.strip().lower()) != role}


def _check_turns(entry: Mapping[str, Any], where: str) -> None:
    """Refuse turns whose role or content has a name that is not read here."""
    given = entry.get("message_property_mappings") or {}
    old = {"role": entry.get("message_field_role"), "content": entry.get("message_field_content")}
    names = {**{key: name for key, name in old.items() if name}, **(given if isinstance(given, Mapping) else {})}
    known = {"role": ROLE_KEYS, "content": TEXT_KEYS}
    for key, name in names.items():
        if name not in known.get(key, (key,)):
            raise UserError(
                f"{where}: message_property_mappings.{key}: must be {' or '.join(known.get(key, (key,)))} here; got "
                f"{shortened(str(name))}; rename that key of the turns"
            )


# The chat template.


def _template(entry: Mapping[str, Any]) -> str | None:
    """The template that a data set names."""
    if text := entry.get("chat_template_jinja"):
        return str(text)
    return str(entry["chat_template"]) if entry.get("chat_template") else None


def chat_template(
    templates: Sequence[str | None], facts: Mapping[str, Any], converted: Converted, path: Path
) -> str | None:
    """data.chat_template, by the configuration and by its data sets' own; None where the default stays.

    The text of a template in the configuration becomes `converted.template_text`.

    Raises:
        UserError: data sets have different templates, or a template is announced and missing.
    """
    own = facts.get("template_text") or facts.get("chat_template")
    names = sorted({str(name) for name in (one or own for one in templates or [None]) if name})
    if len(names) > 1:
        raise UserError(
            f"{path}: chat_template: must be one for all data sets here; got {' and '.join(map(shortened, names))}; "
            "import the data sets one by one"
        )
    name = names[0] if names else OWN
    if name == OWN or name.startswith(FALLBACK):
        return None
    if name == CHATML:
        return CHATML
    file = next((start / name for start in (Path(), path.parent) if _is_file(start / name)), None)
    if file is not None:
        return str(file)
    if "{" in name:
        converted.template_text = name
        return None
    if name == INLINE:
        raise UserError(f"{path}: chat_template_jinja: must be a template or a file of one; got none; give one")
    converted.say(
        f"chat_template={shortened(name)}: the tokenizer's own is used here; save another one as a .jinja file and "
        "name it in data.chat_template"
    )
    return None


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # A text is too long for a path.
        return False
