"""Read the keys of another tool's configuration: a YAML file, or a shell script with its command."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

from lean_finetune.core.errors import UserError
from lean_finetune.core.read_yaml import MOST_BYTES, NotYaml, parse_yaml, read_yaml

SCRIPTS = (".sh", ".bash")
BOOLEANS = {"yes": True, "on": True, "true": True, "no": False, "off": False, "false": False}
"""Words that the other tools read as booleans: they read YAML 1.1."""
NUMBER = re.compile(r"[+-]?\d{1,20}(\.\d{0,20})?([eE][+-]?\d{1,3})?")
ENVIRONMENT = re.compile(r"(\w+)=(.*)", re.DOTALL)
VARIABLE = re.compile(r"^[ \t]*(?:export[ \t]+)?(\w+)=([\w./-]{1,200})[ \t]*$", re.MULTILINE)
QUOTIENT = re.compile(r"\$\(expr\s+(\d{1,9}(?:\s*/\s*\d{1,9}){1,4})\s*\)")
OPERATORS = re.compile(r"[;&|<>()]+|\d?>+&?\d?")


def read_keys(path: Path, commands: Sequence[str]) -> tuple[dict[str, Any], str | None]:
    """The values of a configuration by dotted key, without those left blank; and the command of a script.

    A shell script must have exactly one of `commands`, such as `swift sft`. Its flags are keys, and what is set before
    it is below `ENV`.

    Raises:
        UserError: the file cannot be read, or has no keys.
    """
    content, command = _of_script(path, commands) if path.suffix in SCRIPTS else (_of_yaml(path), None)
    return {key: value for key, value in _flat(content) if value not in (None, "", [])}, command


def _of_yaml(path: Path) -> Mapping[str, Any]:
    content = read_yaml(path, "file does not exist; name a configuration of another tool", "name another")
    if not isinstance(content, Mapping):
        got = "an empty file" if content is None else type(content).__name__
        raise UserError(f"{path}: must be a mapping of keys; got {got}; name another")
    return content


def _flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values by dotted key."""
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", BOOLEANS.get(value.lower(), value) if isinstance(value, str) else value


def _of_script(path: Path, commands: Sequence[str]) -> tuple[dict[str, Any], str]:
    """The flags of a script's command, and the command."""
    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES).decode("utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: file does not exist; name a configuration of another tool") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: must be a shell script that can be read ({error}); name another") from None
    found = [words for line in _lines(text, path) if (words := _from_command(line, commands))]
    if len(found) != 1:
        names = " or ".join(f"`{command}`" for command in commands)
        raise UserError(f"{path}: must have one command {names}; got {len(found)}; name another file")
    return _flags(found[0], path), next(command for command in commands if command in " ".join(found[0]))


def _lines(text: str, path: Path) -> Iterator[list[str]]:
    """The words of each line without comments; a backslash at its end continues a line."""
    text = _substituted(re.sub(r"\\[ \t]*\n", " ", text))
    if len(text) > MOST_BYTES:
        raise UserError(f"{path}: must have at most {MOST_BYTES} bytes, with its variables; name another")
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            words = [] if line.lstrip().startswith("#") else shlex.split(line)
        except ValueError as error:
            if "--" in line:
                raise UserError(f"{path}: line {number}: {error}; correct it") from None
            continue
        yield words[: next((k for k, word in enumerate(words) if word.startswith("#")), len(words))]


def _substituted(text: str) -> str:
    """A script with the values of its variables, and with the results of `$(expr 16 / 4)`."""
    values = dict(VARIABLE.findall(text))
    text = re.sub(r"\$\{?(\w+)\}?", lambda match: values.get(match[1], match[0]), text)
    return QUOTIENT.sub(lambda match: str(_quotient(match[1])), text)


def _quotient(text: str) -> int:
    first, *others = (int(number) for number in text.split("/"))
    return first // max(1, prod(others))


def _from_command(words: list[str], commands: Sequence[str]) -> list[str]:
    """The variables before one of the commands, it and its flags; nothing if the line has none."""
    for number, pair in enumerate(zip(words, words[1:], strict=False)):
        if " ".join(pair) in commands:
            ends = (k for k, word in enumerate(words) if k > number and OPERATORS.fullmatch(word))
            return words[: next(ends, len(words))]
    return []


def _flags(words: list[str], path: Path) -> dict[str, Any]:
    """Flags with their values, which are lists for several words, and variables of the environment."""
    flags: dict[str, list[str]] = {}
    variables: dict[str, Any] = {}
    given: list[str] | None = None
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            given = flags.setdefault(name.replace("-", "_"), [])
            given[:] = [value] if equals else []
        elif given is not None:
            given.append(word)
        elif match := ENVIRONMENT.fullmatch(word):
            variables[match[1]] = match[2]
        elif word.endswith((".yaml", ".yml", ".json")):
            raise UserError(f"{path}: its command reads {word}; name that file")
    values = {name: _value(given) for name, given in flags.items()}
    return {"ENV": variables, **values} if variables else values


def _value(words: list[str]) -> Any:
    """The value of a flag: true without a word, a list for several."""
    found = [_word(word) for word in words]
    return True if not found else found[0] if len(found) == 1 else found


def _word(word: str) -> Any:
    """A number, an object of JSON, or the text."""
    if NUMBER.fullmatch(word):
        return float(word) if set(word) & set(".eE") else int(word)
    with suppress(NotYaml):
        return parse_yaml(word) if word.startswith("{") else word
    return word
