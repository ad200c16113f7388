"""Compare what commands print with `--json` with the fields that they promise. As a module: write the docs' tables."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lean_finetune.commands.json_fields import ANSWER_FIELDS, Field
from tests.conftest import ROOT


def type_of(value: Any) -> str:
    """The JSON type of a value."""
    if value is None:
        return "null"
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return kinds[type(value)]


def check_answer(name: str, answer: Any) -> None:
    """Assert that an answer has all fields of its kind with their types, and no others."""
    fields = {field.path: field for field in ANSWER_FIELDS[name]}
    wrong = list(wrong_fields(answer, "", fields))
    assert not wrong, f"{name}: {wrong}"


def check_event(event: Mapping[str, Any]) -> None:
    """The same of an event of `run`."""
    check_answer(f"run: {event['event']}", event)


def wrong_fields(value: Any, path: str, fields: Mapping[str, Field], *, is_open: bool = False) -> Iterator[str]:
    """What is missing, has another type, or is not listed, below a path."""
    if isinstance(value, list):
        for item in value:
            yield from _wrong_field(item, f"{path}[]", fields, is_open=is_open)
    elif isinstance(value, dict):
        prefix = f"{path}." if path else ""
        for key, item in value.items():
            known = f"{prefix}{key}" in fields
            yield from _wrong_field(item, f"{prefix}{key}" if known else f"{prefix}*", fields, is_open=is_open, key=key)
        for name, field in fields.items():
            own = name.removeprefix(prefix)
            if name == f"{prefix}{own}" and not set(".[*") & set(own) and not field.only and own not in value:
                yield f"{name}: is missing"


def _wrong_field(
    value: Any, path: str, fields: Mapping[str, Field], *, is_open: bool, key: str | None = None
) -> Iterator[str]:
    field = fields.get(path)
    if field is None:
        if not is_open:
            yield f"{path} ({key}): is not in json_fields.py; add it"
        return
    allowed, found = field.type.split(" or "), type_of(value)
    if found not in allowed and not (found == "integer" and "number" in allowed):
        yield f"{path}: must be {field.type}; got {found}"
        return
    yield from wrong_fields(value, path, fields, is_open=field.is_open)


def promises(answers: Mapping[str, Sequence[Field]]) -> set[str]:
    """A line for each field: answer, path, type, and whether it is always there."""
    return {
        f"{name} | {field.path} | {field.type} | {'sometimes' if field.only else 'always'}"
        for name, fields in answers.items()
        for field in fields
    }


PAGE = ROOT / "docs/scripts.md"
BEFORE_TABLES = "All numbers of bytes are\nintegers.\n"


def tables() -> Iterator[str]:
    """The lines of the tables of docs/scripts.md."""
    for name, fields in ANSWER_FIELDS.items():
        yield from ("", f"### {name}", "| field | type | meaning |", "|---|---|---|")
        for field in fields:
            only = f"only: {field.only}" if field.only else ""
            meaning = "; ".join(filter(None, (field.meaning, only)))
            yield f"| `{field.path}` | {field.type} | {meaning} |"


def with_tables(page: str) -> str:
    """The page with the tables of today at its end."""
    text, mark, _ = page.partition(BEFORE_TABLES)
    return f"{text}{mark}" + "".join(f"{line}\n" for line in tables())


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
