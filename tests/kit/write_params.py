"""A params.yaml with some values changed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

ROOT = Path(__file__).parents[2]


def write_params(directory: Path, changes: Mapping[str, Any], source: Path = ROOT / "params.yaml") -> None:
    """Write `source` as params.yaml into a directory, with the dotted parameters in `changes` replaced."""
    yaml = YAML()
    values = yaml.load(source.read_text(encoding="utf-8"))
    for dotted, value in changes.items():
        *sections, key = dotted.split(".")
        section = values
        for name in sections:
            section = section[name]
        section[key] = value
    with open(directory / "params.yaml", "w", encoding="utf-8") as file:
        yaml.dump(values, file)
