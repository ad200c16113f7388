"""What two equal runs agree on: all that a stage tells but times, speeds, and the system's counts of the process."""

import re
from typing import Any

OF_THE_PROCESS = re.compile(r"(^|_)(seconds|per_second|rss|host|held|reserved|unused|growth)(_|$)")
"""Names of metrics and columns that say how a run went, and not what came of it. (`allocated` and `measured` are
counted tensor by tensor, and are equal; `growth` is judged by the process's memory.)"""


def repeatable(value: Any) -> Any:
    """The same JSON value without the entries, at any depth, that are of the process alone."""
    if isinstance(value, dict):
        return {name: repeatable(item) for name, item in value.items() if not OF_THE_PROCESS.search(name)}
    return [repeatable(item) for item in value] if isinstance(value, list) else value
