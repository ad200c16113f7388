"""Bring a params.yaml to another version's keys. The user's values and comments stay."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ruamel.yaml import YAML

from lean_finetune.core.errors import UserError
from lean_finetune.core.read_yaml import NotYaml, parse_yaml

Keys = tuple[str, ...]


@dataclass(frozen=True)
class Merged:
    """A merged params.yaml."""

    text: str
    added: dict[str, Any]
    """The values of new keys, by dotted key. A whole new section is one key."""
    removed: dict[str, Any]
    """The values of keys that are no parameters any more."""


def merge_params(text: str, template: str) -> Merged:
    """Add the keys that a params.yaml lacks, with their comments, and remove those that the template does not have.

    Raises:
        UserError: the lines of a key cannot be told apart, as in `lora: {rank: 8}`.
    """
    theirs, ours = parse_yaml(text), parse_yaml(template)
    missing, unknown = dict(_without(ours, theirs)), dict(_without(theirs, ours))
    source, target = _File(template, ours), _File(text, ours)
    added: dict[int, list[str]] = {}
    for keys in missing:
        space = [""] if len(keys) == 1 else []
        added.setdefault(target.place(keys, source), []).extend([*space, *source.lines[slice(*source.block(keys))]])
    dropped = {line for keys in unknown for line in range(*target.block(keys))}
    lines = []
    for number, line in enumerate([*target.lines, ""]):
        lines += added.get(number, [])
        if number < len(target.lines) and number not in dropped:
            lines.append(line)
    merged = "".join(f"{line}\n" for line in lines)
    if not _has_values(merged, _merged_values(theirs, ours)):
        raise UserError(
            "params.yaml: cannot be merged, as several keys are on one line, or a text of several lines ends in a line "
            "with #; give each key its own line, or add the new keys by hand, then rerun"
        )
    return Merged(
        merged, *({".".join(map(str, keys)): value for keys, value in each.items()} for each in (missing, unknown))
    )


def _without(values: Mapping[str, Any], other: Mapping[str, Any], above: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """The keys that `other` lacks, with their values; a section that it lacks is one key."""
    for key, value in values.items():
        if key not in other:
            yield (*above, key), value
        elif isinstance(value, Mapping) and isinstance(other[key], Mapping):
            yield from _without(value, other[key], (*above, key))


def _merged_values(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """The user's values for our keys, and ours where there are none."""
    found = {}
    for key, value in ours.items():
        given = theirs.get(key, value)
        both = isinstance(value, Mapping) and isinstance(given, Mapping)
        found[key] = _merged_values(given, value) if both else given
    return found


def _has_values(text: str, values: Mapping[str, Any]) -> bool:
    try:
        return bool(parse_yaml(text) == values)
    except NotYaml:
        return False


class _File:
    """The lines of a params.yaml, and in which of them each key is."""

    def __init__(self, text: str, sections: Mapping[str, Any]):
        """`sections` has a mapping as the value of each key whose keys are parameters."""
        self.lines = text.splitlines()
        self.key_lines: dict[Keys, int] = {}
        self._find_keys(YAML(typ="rt").load(text), sections, ())

    def _find_keys(self, content: Any, sections: Mapping[str, Any], above: Keys) -> None:
        for key, value in content.items():
            self.key_lines[(*above, key)] = content.lc.key(key)[0]
            if isinstance(value, Mapping) and isinstance(sections.get(key), Mapping):
                self._find_keys(value, sections[key], (*above, key))

    def _is_comment(self, line: int) -> bool:
        return self.lines[line].lstrip().startswith("#")

    def block(self, keys: Keys) -> tuple[int, int]:
        """The first line of a key with the comment above it, and the line after its value."""
        first = self.key_lines[keys]
        later = [line for other, line in self.key_lines.items() if line > first and len(other) <= len(keys)]
        end = min(later, default=len(self.lines))
        while self._is_comment(end - 1) or not self.lines[end - 1].strip():  # They belong to what follows.
            end -= 1
        while first and self._is_comment(first - 1):
            first -= 1
        return first, end

    def place(self, keys: Keys, source: "_File") -> int:
        """The line where a new key belongs: behind the one that precedes it in `source`, or first in its section."""
        siblings = [other for other in source.key_lines if other[:-1] == keys[:-1]]
        for other in reversed(siblings[: siblings.index(keys)]):
            if other in self.key_lines:
                return self.block(other)[1]
        return self.key_lines[keys[:-1]] + 1 if keys[:-1] else 0
