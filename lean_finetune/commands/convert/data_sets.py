"""Data sets that another tool's configuration names."""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lean_finetune.commands.convert.conversions import Converted
from lean_finetune.commands.convert.dataset_info import (
    FILE,
    Described,
    check_kind,
    columns_to_ignore,
    read_sources,
)
from lean_finetune.commands.convert.row_types import chat_template, row_type
from lean_finetune.commands.convert.table_rules import NO_DATA, Reading
from lean_finetune.config.other_tools import Table
from lean_finetune.core.errors import UserError
from lean_finetune.core.read_yaml import read_yaml
from lean_finetune.islands.objectives.registry import OBJECTIVES, SFT
from lean_finetune.pinning.hub import HUB_ID


def find_above(name: str, config: Path) -> Path | None:
    """A file that a configuration names, whose path is relative to here or to a folder above the configuration."""
    for start in (Path(), *config.parents):
        with suppress(OSError, ValueError):  # A name of another kind may be too long, or have a null character.
            if (start / name).is_file():
                return start / name
    return None


# Data sets of other tools' configurations, as entries of `data.source` and `data.heldout_source`.

SLICE = re.compile(r"(?P<split>[^\[\]]+)\[(?P<start>(?:-?\d{1,15}%?)?):(?P<end>(?:-?\d{1,15}%?)?)\]")
"""Part of a split, as `datasets` writes it: `train[:20%]`, `train[100:200]`."""
NAMED = re.compile(r"(?P<path>.+?)(?::(?P<config>[^#:/\\]+))?(?:#(?P<rows>\d{1,15}))?")
"""A data set of ms-swift: name:subset#rows."""
PAIR = "pair"
"""LLaMA-Factory's v1: `chosen` and `rejected` are whole conversations."""
FORMATS = {"alpaca": "alpaca", "sharegpt": "sharegpt", PAIR: "preference"}
PARTS = ("data.config", "data.split", "data.format")
GENERIC = ("json", "csv", "parquet", "arrow", "text")
"""Names of readers of files, where others name a data set."""


def name_sub_keys(given: Mapping[str, Any], reading: Reading, *, with_data: bool) -> None:
    """Account for the keys of data sets that a configuration lists: `datasets.split`."""
    converted, rules = reading.converted, reading.table["keys"]
    for key, listed in given.items():
        rule = rules.get(key)
        if not (isinstance(rule, Mapping) and rule.get("fact") in ("dataset", "eval_dataset")):
            continue
        for entry in (entry for entry in listed if isinstance(entry, Mapping)):
            for name, value in sorted(entry.items(), key=lambda item: str(item[0])):
                dotted = f"{key}.{name}"
                if not with_data and reading.rule(dotted) is not None:
                    converted.ignore(dotted, NO_DATA)
                elif value not in (None, "") and dotted not in converted.unknown:
                    reading.read(dotted, value, is_given=True, with_data=with_data)


def _names(data: Mapping[str, Any], fact: str) -> list[str]:
    """The names of data sets."""
    return [_name(entry) for entry in data.get(fact) or ()]


def _name(entry: Any) -> str:
    return entry if isinstance(entry, str) else str(entry.get("path") or entry.get("id") or "")


def check_kinds(data: Mapping[str, Any], path: Path, objective: str) -> None:
    """Refuse data sets that have more than text or are not for the objective, where dataset_info.json is found.

    Raises:
        UserError: a data set is of such a kind.
    """
    info = find_above(str(Path(data["dataset_dir"]) / FILE), path) if "dataset_dir" in data else None
    if info is not None:
        for name in _names(data, "dataset"):
            check_kind(name, info, objective)


def has_pairs(data: Mapping[str, Any], path: Path, table: Table) -> bool:
    """Whether all data sets that LLaMA-Factory's v1 describes in files are preference pairs.

    Raises:
        UserError: some are and some are not.
    """
    found: dict[str, bool] = {}
    for name in _names(data, "dataset") if table.get("data_names") == "files" else ():
        if (file := find_above(name, path)) and file.suffix in (".yaml", ".yml"):
            found |= {f"{file}: {title}": entry.get("converter") == PAIR for title, entry in _described(file)}
    if any(found.values()) and not all(found.values()):
        title = next(title for title, paired in found.items() if paired)
        raise UserError(f"{title}: converter: must be {PAIR} for all data sets or for none; remove some")
    return any(found.values())


def combine_data(data: Mapping[str, Any], converted: Converted, table: Table, path: Path) -> None:
    """data.source and data.heldout_source, and the limit of rows, which is one for each data set there."""
    values = converted.values
    info = find_above(str(Path(data["dataset_dir"]) / FILE), path) if "dataset_dir" in data else None
    described: list[Described] = []
    for fact, ours in (("dataset", "data.source"), ("eval_dataset", "data.heldout_source")):
        names = _names(data, fact)
        if info is None:
            found = _sources(data, fact, ours, converted, table, path) if names else []
        else:
            found = read_sources(names, info, data.get("objective", SFT))
        described += found
        if sources := [one.source for one in found]:
            values[ours] = sources[0]["source"] if [*sources[0]] == ["source"] and len(sources) == 1 else sources
        else:
            for key in [key for key, name in converted.used.items() if name.startswith(ours)]:
                converted.ignore(key, "not found here")
    ignored, notes = columns_to_ignore([one for one in described if one.read])
    values |= {"data.ignore_columns": ignored} if ignored else {}
    converted.differs += notes
    if (template := chat_template([one.template for one in described], data, converted, path)) is not None:
        values["data.chat_template"] = template
    if "data.source" not in values:
        drop_parts(converted, "not found here")
    if isinstance(values.get("data.split"), str) and isinstance(values.get("data.source"), str):
        entries = _slices(values["data.split"], "data.split", converted)
        values["data.split"] = entries[0]["split"]
        if len(entries) > 1 or [*entries[0]] != ["split"]:
            del values["data.split"]
            values["data.source"] = [{"source": values["data.source"], **entry} for entry in entries]
    if "data.heldout_source" in values:
        values["data.heldout_fraction"] = 0
    elif "data.source" in values and "data.heldout_fraction" not in values:
        converted.differs.append("a share of the rows is held out to evaluate on: data.heldout_fraction")
    if isinstance(values.get("data.source"), list) and "data.max_rows" in values:
        most = values.pop("data.max_rows")
        converted.used = {key: name.replace("max_rows", "source.rows") for key, name in converted.used.items()}
        for source in values["data.source"]:
            source["rows"] = min(most, source.get("rows", most))


def drop_parts(converted: Converted, reason: str) -> None:
    """Without data.source, drop the parameters that choose its rows."""
    for key in [key for key, ours in converted.used.items() if ours in PARTS]:
        converted.values.pop(converted.used.pop(key), None)
        converted.ignored.setdefault(reason, []).append(key)


def turn_off_evaluation(values: dict[str, Any]) -> None:
    """Without held-out rows, set the parameters that need some."""
    if values.get("data.heldout_fraction") == 0 and "data.heldout_source" not in values:
        values |= {"train.heldout_every_steps": None, "evaluate.generate_rows": 0}


def _sources(
    data: Mapping[str, Any], fact: str, ours: str, converted: Converted, table: Table, path: Path
) -> list[Described]:
    """The data sets; none, with a word on it, where one is not found."""
    found = [one for each in data[fact] for one in _entries(each, ours, converted, table, path)]
    if all(one.source["source"] for one in found):
        return found
    missing = f", and there is no {data['dataset_dir']}/{FILE}" if "dataset_dir" in data else ""
    names = ", ".join(_names(data, fact))
    converted.say(f"data: {names} has no path here{missing}; set {ours} to your rows")
    return []


def _entries(entry: Any, ours: str, converted: Converted, table: Table, path: Path) -> Iterator[Described]:
    """The parts of a data set; its `source` is blank where it has no path here."""
    name, given = _name(entry), entry if isinstance(entry, Mapping) else {}
    form = table.get("data_names")
    if form == "files" and (file := find_above(name, path)) and file.suffix in (".yaml", ".yml"):
        yield from (_described_source(title, one, path) for title, one in _described(file))
        return
    if form == "named" and (match := NAMED.fullmatch(name)) and not os.path.exists(name):
        rows = {"rows": int(match["rows"])} if match["rows"] else {}
        name, given = match["path"], {"config": match["config"], **rows}
    kind = OBJECTIVES[converted.values.get("train.objective", SFT)].kind
    typed = row_type(given, kind, table, converted, f"{path}: {name}")
    named = {
        "config": given.get("name") or given.get("config"),
        "rows": given.get("rows"),
        "weight": given.get("weight"),
        "revision": given.get("revision"),
    }
    parts = _slices(str(given["split"]), f"{ours}.split", converted) if given.get("split") else [{}]
    for place in _places(name, given, form, path):
        for part in parts:
            weight = (named["weight"] or 1.0) * part.get("weight", 1.0)
            if weight != 1.0 and ours != "data.source":
                converted.say(f"a share of {weight:g} of {name}: here all its rows are held out")
            shared = weight if weight != 1.0 and ours == "data.source" else None
            both = {**named, **part, "weight": shared, **typed.source_keys()}
            source = {"source": place, **{key: value for key, value in both.items() if value is not None}}
            yield Described(name=name, source=source, read=typed.read, template=typed.template)


def _places(name: str, given: Mapping[str, Any], form: str | None, path: Path) -> list[str]:
    """Where the rows of a data set are: its files, a path or a name on the hub; blank where they are not found."""
    if files := given.get("data_files"):
        found = [_file_of(name, str(file), path) for file in (files if isinstance(files, list) else [files])]
        return found if all(found) else [""]
    on_hub = HUB_ID.fullmatch(name) and form != "named"
    return [name if os.path.exists(name) else f"hf://{name}" if on_hub else ""]


def _file_of(name: str, file: str, path: Path) -> str:
    """A file of a data set, which may be a directory; blank where there is none here."""
    with suppress(OSError, ValueError):
        if name not in GENERIC and (Path(name) / file).is_file():
            return str(Path(name) / file)
    return str(find_above(file, path) or "") if name in GENERIC else ""


def _described_source(name: str, described: Mapping[str, Any], path: Path) -> Described:
    """A data set of a file of LLaMA-Factory's v1."""
    hub = described.get("source", "hf_hub") == "hf_hub"
    local = None if hub else find_above(str(described.get("path")), path)
    found = {
        "source": f"hf://{described.get('path')}" if hub else str(local or ""),
        "split": described.get("split"),
        "format": FORMATS.get(str(described.get("converter"))),
        "rows": described.get("size"),
        "weight": described.get("weight"),
    }
    source = {key: value for key, value in found.items() if value is not None}
    return Described(name=name, source=source, read=frozenset())


def _described(file: Path) -> list[tuple[str, Mapping[str, Any]]]:
    """The data sets that a file of LLaMA-Factory's v1 describes, by name."""
    content = read_yaml(file, "file does not exist; name another")
    if not isinstance(content, Mapping) or not all(isinstance(entry, Mapping) for entry in content.values()):
        raise UserError(f"{file}: must be a mapping of data sets, each with its path; correct it")
    return list(content.items())


def _slices(split: str, key: str, converted: Converted) -> list[dict[str, Any]]:
    """The parts of a split such as `train[:20%]+test`, each with its rows or its share as a weight."""
    parts = []
    for text in split.split("+"):
        match = SLICE.fullmatch(text.strip())
        if match is None:
            parts.append({"split": text.strip()})
            continue
        found, note = _part(match["start"], match["end"])
        if note:
            converted.differs.append(f"{key}={text}: {note}")
        parts.append({"split": match["split"], **found})
    return parts


def _part(start: str, end: str) -> tuple[dict[str, Any], str]:
    """Rows or share of `[start:end]`, and what is otherwise here."""
    if "%" in start + end:
        if any(bound and not bound.endswith("%") for bound in (start, end)):
            return {}, "a mixture of rows and shares is not known here; all rows are read"
        share = round(_share(end, 1.0) - _share(start, 0.0), 6)
        if 0 < share < 1:
            return {"weight": share}, f"{share:g} of the rows in each epoch, other ones in the next"
        return {}, "" if share == 1 else "is no share of the rows; all rows are read"
    first, last = int(start or 0), int(end or 0)
    if last > first >= 0:
        return {"rows": last - first}, f"the first {last - first} rows" if first else ""
    if first < 0 and not end:
        return {"rows": -first}, f"the first {-first} rows, not the last"
    return {}, "all rows are read" if start or end else ""


def _share(bound: str, default: float) -> float:
    """A bound such as `20%`, or `-20%` from the end, as a share of the rows."""
    if not bound:
        return default
    share = int(bound.rstrip("%")) / 100
    return 1 + share if bound.startswith("-") else share
