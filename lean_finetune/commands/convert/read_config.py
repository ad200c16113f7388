"""Read the configuration of another tool: find its kind, then convert it."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from lean_finetune.commands.convert.conversions import Converted, combine_facts
from lean_finetune.commands.convert.data_sets import (
    check_kinds,
    combine_data,
    drop_parts,
    has_pairs,
    name_sub_keys,
    turn_off_evaluation,
)
from lean_finetune.commands.convert.images import combine_images
from lean_finetune.commands.convert.notebook_cells import MOST_NOTEBOOK_BYTES
from lean_finetune.commands.convert.objectives import combine_objective
from lean_finetune.commands.convert.python_keys import flat_values, keys_of_python
from lean_finetune.commands.convert.shell_script import Unresolved, commands_of
from lean_finetune.commands.convert.table_rules import NO_DATA, Reading
from lean_finetune.config.other_tools import Table, tables
from lean_finetune.core.errors import UserError, shortened
from lean_finetune.core.read_yaml import MOST_BYTES, NotYaml, parse_yaml, read_start, read_yaml
from lean_finetune.islands.objectives.registry import OBJECTIVES, SFT

SCRIPTS, PYTHON = (".sh", ".bash"), (".py", ".ipynb")
BOOLEANS = {"yes": True, "on": True, "true": True, "no": False, "off": False, "false": False}
"""Words that the other tools read as booleans: they read YAML 1.1."""
NUMBER = re.compile(r"[+-]?\d{1,20}(\.\d{0,20})?([eE][+-]?\d{1,3})?")
ENVIRONMENT = re.compile(r"(\w+)=(.*)", re.DOTALL)
FILES = (".yaml", ".yml", ".json")


def read_keys(path: Path, commands: Sequence[str]) -> tuple[dict[str, Any], str | None]:
    """The values of a configuration by dotted key, without those left blank; and the command of a script.

    A shell script must have exactly one of `commands`, such as `swift sft`. Its flags are keys, and what is set before
    it is below `ENV`. Of a Python script or a notebook, None stands for no limit.

    Raises:
        UserError: the file cannot be read, or has no keys.
    """
    if path.suffix in PYTHON:
        return keys_of_python(path, _text(path, MOST_NOTEBOOK_BYTES)), None
    content, command = _of_script(path, commands) if path.suffix in SCRIPTS else (_of_yaml(path), None)
    return {key: value for key, value in _flat(content) if value not in (None, "", [])}, command


def _of_yaml(path: Path) -> Mapping[str, Any]:
    content = read_yaml(path, "file does not exist; name a configuration of another tool", "name another")
    if not isinstance(content, Mapping):
        got = "an empty file" if content is None else type(content).__name__
        raise UserError(f"{path}: must be a mapping of keys; got {got}; name another")
    return content


def _flat(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Values by dotted key; words that YAML 1.1 reads as booleans are booleans."""
    for key, value in flat_values(content):
        yield key, BOOLEANS.get(value.lower(), value) if isinstance(value, str) else value


def _text(path: Path, most_bytes: int) -> str:
    """The text of a script."""
    try:
        text = read_start(path, most_bytes).decode("utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: file does not exist; name a configuration of another tool") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path}: must be a script that can be read ({reason}); name another") from None
    if len(text) > most_bytes:
        raise UserError(f"{path}: must have at most {most_bytes} bytes; name another")
    return text


def _of_script(path: Path, commands: Sequence[str]) -> tuple[dict[str, Any], str]:
    """The flags of a script's command, and the command."""
    text = _text(path, MOST_BYTES)
    found = [(name, one, place) for one in commands_of(text, path) for name, place in _starts(one.words, commands)]
    if len(found) != 1:
        names = " or ".join(f"`{command}`" for command in commands)
        raise UserError(f"{path}: must have one command {names}; got {len(found)}; name another file")
    [(name, command, place)] = found
    variables = {**command.variables, **_variables(command.words[:place])}
    flags = _flags(command.words[place + 2 :], path)
    return ({"ENV": variables, **flags} if variables else flags), name


def _starts(words: Sequence[str], commands: Sequence[str]) -> Iterator[tuple[str, int]]:
    """The first of `commands` among the words of one, and its place; nothing if there is none."""
    pairs = (" ".join(pair) for pair in pairwise(words))
    yield from islice(((pair, place) for place, pair in enumerate(pairs) if pair in commands), 1)


def _variables(words: Sequence[str]) -> dict[str, str]:
    """The variables that `env` and such commands set."""
    found = (ENVIRONMENT.fullmatch(word) for word in words)
    return {match[1]: match[2] for match in found if match}


def _flags(words: Sequence[str], path: Path) -> dict[str, Any]:
    """Flags with their values, which are lists for several words.

    Raises:
        UserError: the command reads a file, or has a word that may hold flags and that only a shell knows.
    """
    flags: dict[str, list[str]] = {}
    given: list[str] | None = None
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            given = flags.setdefault(name.replace("-", "_"), [])
            given[:] = [_as_known(value, word)] if equals else []
        elif isinstance(word, Unresolved) and given != []:
            raise UserError(f"{path}:{word.line}: {word.why}, so that its flags are not known; write them there")
        elif given is not None:
            given.append(word)
        elif word.endswith(FILES):
            raise UserError(f"{path}: its command reads {shortened(word)}; name that file")
    if (named := flags.get("config", [])) and named[0].endswith(FILES):
        raise UserError(f"{path}: its command reads {shortened(named[0])}; name that file")
    return {name: _value(given) for name, given in flags.items()}


def _as_known(value: str, word: str) -> str:
    """A part of a word, which is not known where the word is not."""
    return Unresolved(value, word.line, word.why) if isinstance(word, Unresolved) else value


def _value(words: list[str]) -> Any:
    """The value of a flag: true without a word, a list for several."""
    found = [_word(word) for word in words]
    return True if not found else found[0] if len(found) == 1 else found


def _word(word: str) -> Any:
    """A number, an object of JSON, or the text."""
    if isinstance(word, Unresolved):
        return word
    if NUMBER.fullmatch(word):
        return float(word) if set(word) & set(".eE") else int(word)
    with suppress(NotYaml):
        return parse_yaml(word) if word.startswith("{") else word
    return word


# Turn a configuration of another tool into our parameters; lean_finetune/other_tools has a table for each.

READS_IMAGES = re.compile(
    r"(?i)(?<![a-z])(\d*vl\d*|vision|omni|mllm|multimodal|llava|pixtral|paligemma|smolvlm\d*|internvl\w*|minicpm-?[vo]|"
    r"glm-?4[\d._]*v|ovis\d*|molmo\d*|mllama|voxtral|audio|asr|ocr\w*|image\w*|video\w*)(?![a-z])"
)
"""Parts of names of models, templates and data sets whose rows usually have more than text."""


def read_config_of_tool(
    path: Path, gpus: int, *, with_data: bool = True, changes: Mapping[str, Any] | None = None
) -> Converted:
    """Convert a configuration file for a run on so many GPUs; `with_data=False` leaves its data sets out.

    `changes`: keys of the tool that replace those of the file.

    Raises:
        UserError: it cannot be read, is of no known tool, or of a run or data that cannot be had here.
    """
    of_command = {command: table for table in tables() for command in table.get("commands", {})}
    given, command = read_keys(path, [*of_command])
    table = _table_of(given, path) if command is None else of_command[command]
    of_this_command = {} if command is None else table["commands"][command]
    given = {**of_this_command, **given, **(changes or {})}
    defaults = {key: value for key, value in (table.get("defaults") or {}).items() if key not in given}
    given = {key: value for key, value in given.items() if value is not None}
    if given.get("fp16") is True:
        defaults.pop("bf16", None)
    converted = Converted(tool=table["tool"], keys={**defaults, **given})
    reading = Reading(path, table, converted)
    for key, value in {**defaults, **given}.items():
        reading.read(key, value, is_given=key in given, with_data=with_data)
    facts = reading.facts
    name_sub_keys(given, reading, with_data=with_data)
    if has_pairs(facts, path, table):
        facts.setdefault("objective", "dpo")
    combine_objective(facts, converted, table, path)
    check_kinds(facts, path, facts.get("objective", SFT))
    if not OBJECTIVES[converted.values.get("train.objective", SFT)].compares:
        for line in (one["text"] for one in table.get("says", ()) if not any(key in given for key in one["keys"])):
            converted.say(line)
    combine_facts(facts, converted, table, gpus, path)
    combine_images(facts, converted, path, _named_by_images(facts, converted))
    _combine_start(facts, converted, path)
    if with_data:
        combine_data(facts, converted, table, path)
    else:
        drop_parts(converted, NO_DATA)
    turn_off_evaluation(converted.values)
    if converted.image is None:
        _say_what_has_images(facts, converted)
    return converted


def _combine_start(facts: Mapping[str, Any], converted: Converted, path: Path) -> None:
    """model.adapter; without it where the adapter is not here, because a prediction needs only its rank and targets."""
    if (name := facts.get("start")) is None or converted.values["train.method"] == "full":
        return
    if os.path.isdir(name):
        converted.values["model.adapter"] = name
    else:
        converted.differs.append(f"adapter {name} is no directory here: set model.adapter to it")
    if OBJECTIVES[converted.values.get("train.objective", SFT)].has_reference:
        converted.differs.append(f"the reference is the adapter's start here; {converted.tool} may take the base model")


def _table_of(given: Mapping[str, Any], path: Path) -> Table:
    """The table of the tool with the most keys of the configuration, of those whose required keys it has."""
    found = [table for table in tables() if all(any(key in given for key in keys) for keys in table["known_by"])]
    if not found:
        names = ", ".join(dict.fromkeys(table["tool"] for table in tables()))
        keys = shortened(", ".join(list(given)[:5]))
        raise UserError(f"{path}: must be a training configuration of {names}; got keys {keys}; name another")
    return max(found, key=lambda table: sum(key in table["keys"] for key in given))


def _named_by_images(facts: Mapping[str, Any], converted: Converted) -> str | None:
    """The template or data set of LLaMA-Factory whose rows have images by its name; None without one."""
    if converted.tool != "LLaMA-Factory":
        return None
    sets = [entry for entry in facts.get("dataset", ()) if isinstance(entry, str)]
    found = (str(name) for name in [facts.get("template"), *sets] if name and READS_IMAGES.search(str(name)))
    return next(found, None)


def _say_what_has_images(facts: Mapping[str, Any], converted: Converted) -> None:
    """Note a model, template or data set by whose name the rows have more than text."""
    sets = [entry if isinstance(entry, str) else str(entry.get("path", "")) for entry in facts.get("dataset", ())]
    for name in [converted.values.get("model.name"), facts.get("template"), *sets]:
        if name and READS_IMAGES.search(str(name)):
            converted.differs.append(f"{name} has more than text, by its name: images, audio and video are not counted")
            return
