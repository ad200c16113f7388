"""The result of converting another tool's configuration."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from cuda_memory.units import labelled


@dataclass
class Converted:
    """A configuration in our parameters, and what became of each of its keys."""

    tool: str
    values: dict[str, Any] = field(default_factory=dict)
    """By dotted key."""
    used: dict[str, str] = field(default_factory=dict)
    """By key of the tool: the parameter that it sets."""
    differs: list[str] = field(default_factory=list)
    """What is done otherwise here."""
    ignored: dict[str, list[str]] = field(default_factory=dict)
    """Keys by the reason."""
    unknown: list[str] = field(default_factory=list)

    def flags(self) -> list[str]:
        """The parameters as overrides."""
        return [f"{key}={json.dumps(value, default=str)}" for key, value in self.values.items()]

    def lines(self) -> Iterator[str]:
        """What became of each key, for people."""
        yield f"from a configuration of {self.tool}"
        for key, ours in self.used.items():
            value = json.dumps(self.values[ours], default=str) if ours in self.values else ""
            yield labelled("  used", f"{key} → {ours}{f'={value}' if value else ''}")
        for text in self.differs:
            yield labelled("  otherwise here", text)
        for reason, keys in self.ignored.items():
            yield labelled("  ignored", f"{', '.join(keys)} ({reason})")
        if self.unknown:
            yield labelled("  not known", f"{', '.join(self.unknown)} (no effect here)")
